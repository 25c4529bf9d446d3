"""Tiers: each test folder that needs something special says so here, once.

interpret and compile need processes of their own, because Triton decides at decoration time
whether a kernel is interpreted; `make test` runs them one after the other.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent
INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _missing_reason(tier: str) -> str | None:
    if tier in ("interpret", "compile") and not _has("triton"):
        return "triton is not installed"
    if tier == "interpret" and not INTERPRETING:
        return "runs in a process with TRITON_INTERPRET=1"
    if tier == "compile" and INTERPRETING:
        return "runs in a process without TRITON_INTERPRET"
    if tier == "gpu" and (INTERPRETING or not torch.cuda.is_available()):
        return "needs a CUDA device"
    if tier == "transformers" and not _has("transformers.models.qwen4_exp"):
        return "needs transformers with qwen4_exp"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = Path(item.path).relative_to(ROOT).parts[0]
        marker = {
            "transformers": "hf",
            "interpret": "interpret",
            "compile": "compile",
            "gpu": "gpu",
        }
        if tier in marker:
            item.add_marker(getattr(pytest.mark, marker[tier]))
        if reason := _missing_reason(tier):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20_260_901)
