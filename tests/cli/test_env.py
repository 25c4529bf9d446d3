"""flash-qsa env: versions, devices with the backend that runs there, and integrations.

* --json and the table say the same, and nothing is guessed where a package is missing.
* An impossible FLASH_QSA_BACKEND is shown, not raised: the report is for broken set-ups.
* Showing help imports neither torch, triton nor transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import flash_qsa
from flash_qsa.cli import env
from flash_qsa.cli.main import app

runner = CliRunner()


def test_json_says_what_is_installed():
    done = runner.invoke(app, ["env", "--json"])
    facts = json.loads(done.output)
    assert done.exit_code == 0
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["flash-qsa"] == flash_qsa.__version__
    assert facts["devices"][0]["device"] == "cpu"
    assert set(facts["integrations"]) == {"transformers", "vllm"}


def test_table_shows_the_same_versions():
    done = runner.invoke(app, ["env"])
    assert done.exit_code == 0
    for value in (torch.__version__, "flash-qsa", "backend"):
        assert value in done.output


@pytest.mark.parametrize("order", ["nonsense", "triton"])
def test_an_impossible_backend_is_shown(monkeypatch, order):
    monkeypatch.setenv("FLASH_QSA_BACKEND", order)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    facts = json.loads(runner.invoke(app, ["env", "--json"]).output)
    assert facts["devices"][0]["backend"] == "none"
    assert order in facts["devices"][0]["reason"]
    assert facts["variables"]["FLASH_QSA_BACKEND"] == order


@pytest.mark.parametrize(
    ("order", "obstacle", "says"),
    [
        ("auto", None, "CUDA C++ through NVRTC (NVRTC compiles it)"),
        ("auto", "NVRTC is missing", "Triton (NVRTC is missing)"),
        ("triton", None, "Triton (FLASH_QSA_SELECTOR says triton)"),
        ("cuda", "NVRTC is missing", "none: FLASH_QSA_SELECTOR 'cuda': NVRTC is missing"),
        ("fast", None, "none: FLASH_QSA_SELECTOR: expected one of"),
    ],
)
def test_the_selector_and_its_reason_are_shown(monkeypatch, order, obstacle, says):
    from flash_qsa.ops import nvrtc
    from flash_qsa.targets import pretend

    monkeypatch.setenv("FLASH_QSA_SELECTOR", order)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(nvrtc, "obstacle", lambda arch: obstacle)
    with pretend("sm_90"):
        assert env.selector_state(torch.device("cuda")).startswith(says)


def test_missing_packages_are_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(env, "package_version", lambda name: None)
    assert env.transformers_state() == "not installed"
    assert env.vllm_state() == "not installed"


def test_old_transformers_are_told_from_new_ones(monkeypatch):
    monkeypatch.setattr(env, "package_version", lambda name: "5.15.0")
    monkeypatch.setattr(env, "_find", lambda module: False)
    assert "5.16" in env.transformers_state()


@pytest.mark.parametrize(
    ("version", "switch", "says"),
    [
        ("0.33.0", "1", "active: vLLM 0.33.0"),
        ("0.34.1", "1", "inactive: vLLM 0.34.1 was not tested"),
        ("0.33.0", "0", "inactive: FLASH_QSA_VLLM=0"),
        ("0.33.0", "yes", "refused: FLASH_QSA_VLLM"),
    ],
)
def test_vllm_state_is_the_plugins_own_judgement(monkeypatch, version, switch, says):
    monkeypatch.setattr(env, "package_version", lambda name: version if name == "vllm" else None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setenv("FLASH_QSA_VLLM", switch)
    assert env.vllm_state().startswith(says)


def test_help_is_light():
    code = (
        "import sys, flash_qsa.cli.main; "
        "print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
