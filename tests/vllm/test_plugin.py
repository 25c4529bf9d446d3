"""The entry point, with a stand-in for vLLM.

Claims: `register` puts three architecture strings into vLLM's registry and imports neither model
code nor CUDA; calling it again changes nothing; an untested version, a broken vLLM and
FLASH_QSA_VLLM=0 leave vLLM alone, the first two with one warning a process; the package's metadata
declares the entry point.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

from flash_qsa.integrations.vllm import plugin
from flash_qsa.integrations.vllm.settings import Settings, enabled_in_environment


class Registry:
    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def register_model(self, name: str, target: str) -> None:
        self.models[name] = target


@pytest.fixture
def vllm(monkeypatch) -> SimpleNamespace:
    """A vLLM of a tested version that records registrations."""
    module = ModuleType("vllm")
    module.__version__ = "0.33.0"
    module.ModelRegistry = Registry()
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.delenv("FLASH_QSA_VLLM", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(plugin, "_warned", set())
    return module


def test_the_entry_point_is_declared():
    declared = {e.name: e.value for e in entry_points(group="vllm.general_plugins")}
    assert declared["flash_qsa"] == "flash_qsa.integrations.vllm.plugin:register"


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1.dev7+gabc.cu130"])
def test_three_names_are_registered_by_string_however_often_it_is_called(vllm, version):
    vllm.__version__ = version
    plugin.register()
    plugin.register()
    assert vllm.ModelRegistry.models == {
        name: f"flash_qsa.integrations.vllm.models:{name}"
        for name in ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Qwen4ExpMTP")
    }


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_an_untested_version_is_left_alone_with_one_warning(vllm, version, caplog):
    vllm.__version__ = version
    with caplog.at_level(logging.INFO, logger="vllm.flash_qsa"):
        plugin.register()
        plugin.register()
    assert vllm.ModelRegistry.models == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for word in (version, "0.32", "0.33", "inactive"):
        assert word in record.getMessage()


def test_the_switch_turns_it_off_silently(vllm, monkeypatch, caplog):
    monkeypatch.setenv("FLASH_QSA_VLLM", "0")
    with caplog.at_level(logging.DEBUG, logger="vllm.flash_qsa"):
        plugin.register()
    assert vllm.ModelRegistry.models == {} and not caplog.records
    assert plugin.status() == plugin.Status(False, "FLASH_QSA_VLLM=0")


@pytest.mark.parametrize(
    ("allowed", "active"),
    [("flash_qsa", True), ("other,flash_qsa", True), ("other", False), ("", False)],
)
def test_vllms_list_of_plugins_decides_too(vllm, monkeypatch, allowed, active):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    status = plugin.status()
    assert status.active is active
    assert active or status.reason == f"VLLM_PLUGINS={allowed} does not name flash_qsa"


def test_a_misspelt_switch_is_an_error(monkeypatch):
    monkeypatch.setenv("FLASH_QSA_VLLM", "off")
    with pytest.raises(ValueError, match="FLASH_QSA_VLLM.*'off'"):
        enabled_in_environment()


def test_without_vllm_the_reason_is_the_import_error(vllm, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    status = plugin.status()
    assert not status.active and "cannot be imported" in status.reason


def test_registering_imports_no_model_code_and_no_triton():
    code = """
import sys, types
vllm = types.ModuleType("vllm")
vllm.__version__ = "0.33.0"
vllm.ModelRegistry = types.SimpleNamespace(register_model=lambda *names: None)
sys.modules["vllm"] = vllm
from flash_qsa.integrations.vllm.plugin import register
register()
loaded = {m for m in sys.modules if m.startswith(("flash_qsa.integrations.vllm", "triton"))}
print(sorted(loaded))
import torch
assert not torch.cuda.is_initialized()
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ("", ".plugin", ".settings")
    assert out.stdout.strip() == str([f"flash_qsa.integrations.vllm{name}" for name in names])


def test_options_come_from_additional_config():
    assert Settings.from_config(None) == Settings.from_config({}) == Settings()
    assert not Settings.from_config({"flash_qsa": False}).enabled
    given = {"backend": "reference", "deterministic": True, "workspace_mib": 64}
    assert Settings.from_config({"flash_qsa": given, "other": 1}) == Settings(
        True, "reference", True, 64
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("on", "flash_qsa"),
        ({"enable": True}, "enable"),
        ({"enabled": 1}, "enabled"),
        ({"deterministic": "yes"}, "deterministic"),
        ({"backend": "cuda"}, "backend"),
        ({"workspace_mib": 0}, "workspace_mib"),
        ({"workspace_mib": True}, "workspace_mib"),
        ({"fused_prepare": None}, "fused_prepare"),
    ],
)
def test_wrong_options_are_named_with_their_value(given, named):
    with pytest.raises(ValueError, match=named):
        Settings.from_config({"flash_qsa": given})
