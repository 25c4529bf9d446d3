"""The entry point that vLLM calls in each of its processes.

It must be cheap, must not touch CUDA and may be called any number of times, so it registers three
names and imports no model code.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from flash_qsa.integrations.vllm.settings import SWITCH, enabled_in_environment

TESTED_VERSIONS = ("0.32", "0.33")
"""Minor versions of vLLM whose internals this integration was tested with."""

ARCHITECTURES = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Qwen4ExpMTP")
"""Registered under vLLM's own names: its configuration fix-ups are keyed on them."""

ENTRY_POINT = "flash_qsa"
ALLOWED_PLUGINS = "VLLM_PLUGINS"
"""vLLM's own list of the plugins that it loads; unset means all."""

MODELS_MODULE = "flash_qsa.integrations.vllm.models"

# A child of vLLM's own logger: it has the handlers that make a line appear in the server's log.
logger = logging.getLogger("vllm.flash_qsa")

_warned: set[str] = set()


@dataclass(frozen=True)
class Status:
    """Whether vLLM in this environment would run our layer, and why."""

    active: bool
    reason: str


def status() -> Status:
    """What `register` would do here; registers nothing, imports no model code.

    Raises:
        ValueError: FLASH_QSA_VLLM is neither 0 nor 1.
    """
    if not enabled_in_environment():
        return Status(False, f"{SWITCH}=0")
    allowed = os.environ.get(ALLOWED_PLUGINS)
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        return Status(False, f"{ALLOWED_PLUGINS}={allowed} does not name {ENTRY_POINT}")
    try:
        import vllm
    except ImportError as error:
        return Status(False, f"vLLM cannot be imported: {error}")
    version = getattr(vllm, "__version__", "unknown")
    if minor_version(version) not in TESTED_VERSIONS:
        return Status(
            False,
            f"vLLM {version} was not tested with this flash-qsa; tested are "
            f"{', '.join(TESTED_VERSIONS)}",
        )
    return Status(True, f"vLLM {version}")


def minor_version(version: str) -> str:
    """ "0.33.0.dev1+cu130" → "0.33"; other spellings come back as they are."""
    parts = version.split(".")
    return ".".join(parts[:2]) if len(parts) >= 2 else version


def register() -> None:
    """Puts our models behind vLLM's three Qwen4-Exp names; inert where `status` says so.

    Raises:
        ValueError: FLASH_QSA_VLLM is neither 0 nor 1.
    """
    found = status()
    if not found.active:
        if not found.reason.startswith(SWITCH) and found.reason not in _warned:
            _warned.add(found.reason)
            logger.warning("flash-qsa is inactive, vLLM's own QSA runs: %s.", found.reason)
        return
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"{MODELS_MODULE}:{name}")
