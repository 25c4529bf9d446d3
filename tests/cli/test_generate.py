"""flash-qsa generate and demo, on a small checkpoint that save_pretrained wrote.

* With --compare-stock an FP32 model gives stock's tokens and logits, sparse or not, and says so.
* The text that streams is the text of the tokens, however characters split over tokens.
* Unequal tokens or logits are reported as such, and exit with 1.
* What cannot run is refused by name: no checkpoint, another model, no prompt, too long a prompt.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers.models.qwen4_exp", reason="needs transformers with qwen4_exp")

from flash_qsa.cli import decoding, demo
from flash_qsa.cli.decoding import Decoded, compare
from flash_qsa.cli.generate import _Stream
from flash_qsa.cli.main import app

runner = CliRunner()
DOCUMENT = "QSA scores compressed keys, and each query takes its best blocks. " * 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return demo.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def flat(output):
    return " ".join(output.split())


def test_demo_prints_equality_and_speed_up(tmp_path):
    document = tmp_path / "document.md"
    document.write_text(DOCUMENT)
    options = ["--prompt-file", str(document), "--max-new-tokens", "3", "--chunk", "80"]
    done = runner.invoke(app, ["demo", "--cache", str(tmp_path / "cache"), *options])
    shown = flat(done.output)
    assert done.exit_code == 0, done.output
    assert "all 3 tokens equal" in shown
    assert ": EQUAL" in shown
    assert "speed-up over stock: prefill" in shown
    assert "QSA ran on backend: reference" in shown


def test_generate_alone_reports_speed_and_memory(checkpoint):
    options = ["--prompt", "hello", "--max-new-tokens", "2"]
    done = runner.invoke(app, ["generate", str(checkpoint), *options])
    assert done.exit_code == 0, done.output
    for word in ("prefill", "tokens/s", "peak memory", "GiB"):
        assert word in done.output
    assert "stock" not in done.output


def test_a_wrong_selection_is_reported_as_different(checkpoint, monkeypatch, tmp_path):
    import flash_qsa.dispatch as dispatch

    genuine = dispatch.implementation

    def implementation(op, backend, device):
        run = genuine(op, backend, device)
        if op != "select_blocks":
            return run

        def without_first_block(*arguments):
            run(*arguments)
            arguments[-1][:, 0] = -1

        return without_first_block

    monkeypatch.setattr(dispatch, "implementation", implementation)
    document = tmp_path / "document.md"
    document.write_text(DOCUMENT)
    options = ["--prompt-file", str(document), "--max-new-tokens", "1", "--compare-stock"]
    done = runner.invoke(app, ["generate", str(checkpoint), *options])
    assert done.exit_code == 1, done.output
    assert ": DIFFERENT" in flat(done.output)


def test_the_demo_document_is_long_and_the_projects_own():
    text = demo.project_documents(demo.DOCUMENT_BYTES)
    assert len(text.encode()) >= 16_000
    assert text.startswith("# ")


def test_the_demo_checkpoint_has_the_whole_architecture(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert {"linear_attention", "indexed_attention"} <= set(config["layer_types"])
    assert config["indexer_budget"] < 1024
    for field in ("num_experts", "hc_count", "ple_layer_ids"):
        assert config[field]


def run_of(tokens, *logits):
    return Decoded(tokens, [torch.tensor(row) for row in logits])


@pytest.mark.parametrize(
    ("ours", "stock", "same", "first", "equal"),
    [
        (run_of([5, 6], [1.0], [2.0]), run_of([5, 6], [1.0], [2.0]), True, None, True),
        (run_of([5, 6], [1.0], [2.0]), run_of([5, 6], [1.0], [2.1]), True, None, False),
        # Logits behind the first unequal token say nothing, those up to it do.
        (run_of([5, 7, 1], [1.0], [2.0], [3.0]), run_of([5, 6, 1], [1.0], [2.0], [9.0]),
         False, 1, False),
        (run_of([5], [1.0]), run_of([5, 6], [1.0], [2.0]), False, 1, False),
        (run_of([5], [float("nan")]), run_of([5], [1.0]), True, None, False),
    ],
    ids=["equal", "logits differ", "tokens part", "one stops early", "NaN"],
)  # fmt: skip
def test_agreement_of_two_runs(ours, stock, same, first, equal):
    seen = compare(ours, stock, torch.float32)
    assert (seen.same_tokens, seen.first_difference, seen.equal) == (same, first, equal)


def test_logits_behind_the_parting_of_the_runs_are_not_compared():
    seen = compare(run_of([5, 7], [1.0], [2.0]), run_of([5, 6], [1.0], [2.0]), torch.float32)
    assert (seen.logit_error, seen.compared) == (0.0, 2)


def test_streamed_text_is_whole_characters():
    letters = SimpleNamespace(
        decode=lambda tokens, skip_special_tokens: bytes(tokens).decode(errors="replace")
    )
    stream = _Stream(letters)
    parts = [stream.add(byte) for byte in "né€\x07".encode()]
    assert parts == ["n", "", "é", "", "", "€", ""]
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"


def test_end_tokens_stop_the_run(checkpoint):
    model, _ = decoding.load(checkpoint, torch.device("cpu"), None)
    prompt = torch.tensor([[70, 71, 72]])
    quiet = {"on_prefill": lambda count: None, "on_token": lambda token: None}
    free = decoding.decode(model, prompt, 4, 2, **quiet)
    model.generation_config.eos_token_id = [free.tokens[1]]
    stopped = decoding.decode(model, prompt, 4, 2, **quiet)
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[1]) + 1]
    assert len(free.logits) == 2 + 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing", "--prompt", "x"], "config.json"),
        (["CHECKPOINT"], "--prompt"),
        (["CHECKPOINT", "--prompt", "x", "--prompt-file", "y"], "--prompt"),
        (["CHECKPOINT", "--prompt-file", "missing.txt"], "missing.txt"),
        (["CHECKPOINT", "--prompt", ""], "empty"),
        (["CHECKPOINT", "--prompt", "x", "--max-new-tokens", "40000"], "positions"),
        (["OTHER", "--prompt", "x"], "llama"),
    ],
)
def test_refusals_name_the_cause(checkpoint, tmp_path, arguments, named):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    places = {"CHECKPOINT": str(checkpoint), "OTHER": str(tmp_path)}
    done = runner.invoke(app, ["generate", *(places.get(word, word) for word in arguments)])
    assert done.exit_code == 2, done.output
    assert named in flat(done.output)
