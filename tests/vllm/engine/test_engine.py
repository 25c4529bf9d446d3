"""A small Qwen4-Exp checkpoint in vLLM's whole engine: API process, engine core and worker.

Claims: with the plugin installed the worker's log says that our layer runs; five requests of
different lengths, prefilled in chunks, batched with decodes and found again in the prefix cache,
give the greedy tokens of the same engine without the plugin and of transformers; and so do five
requests that are preempted, because memory is short, and prefilled again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script: str, *arguments: Path | str, log: Path, **environment: str) -> str:
    """Runs a script of this folder in a process of its own; returns what it printed."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    with log.open("w") as out:
        done = subprocess.run(
            command, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT
        )
    text = log.read_text()
    assert done.returncode == 0, text[-4000:]
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("qwen4_exp")
    run("checkpoint.py", made, log=made / "checkpoint.log", TRITON_INTERPRET="0")
    return made


def serve(folder: Path, memory: str, switch: str) -> tuple[dict, str]:
    name = f"{memory}-{switch}"
    answers = folder / f"{name}.json"
    log = run(
        "serve.py",
        folder,
        memory,
        answers,
        log=folder / f"{name}.log",
        TRITON_INTERPRET="1",
        FLASH_QSA_VLLM=switch,
    )
    return json.loads(answers.read_text()), log


def transformers_tokens(folder: Path, memory: str) -> list[list[int]]:
    requests = json.loads((folder / "REQUESTS.json").read_text())[memory]
    return [request["tokens"] for request in requests]


@pytest.fixture(scope="module")
def ours(folder) -> tuple[dict, str]:
    return serve(folder, "enough", "1")


@pytest.fixture(scope="module")
def stock(folder) -> tuple[dict, str]:
    return serve(folder, "enough", "0")


def test_the_log_says_which_layer_runs(ours, stock):
    line = "flash-qsa: QSA attention layers replaced"
    assert line in ours[1] and "backend reference" in ours[1]
    assert line not in stock[1]


@pytest.mark.parity("P38")
def test_greedy_tokens_equal_transformers_in_chunks_and_from_the_prefix_cache(folder, ours):
    expected = transformers_tokens(folder, "enough")
    assert ours[0]["passes"] == [expected, expected]
    assert ours[0]["counters"]["vllm:prefix_cache_hits"] > 0


def test_greedy_tokens_equal_the_engine_without_the_plugin(ours, stock):
    assert ours[0]["passes"] == stock[0]["passes"]


def test_preempted_requests_equal_transformers_and_the_engine_without_the_plugin(folder):
    expected = transformers_tokens(folder, "little")
    for switch in ("1", "0"):
        answers, _ = serve(folder, "little", switch)
        assert answers["counters"]["vllm:num_preemptions"] > 0, switch
        assert answers["passes"] == [expected, expected], switch
