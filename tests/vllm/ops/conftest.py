"""The ops tier: vLLM's own indexer, metadata and kernels in Triton's interpreter, beside ours.

`make test-vllm-ops` runs it in an environment of its own (see ../environments); elsewhere its
files are not collected, because they import vLLM.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
ACTIVE = os.environ.get("FLASH_QSA_TIER") == "ops"

collect_ignore = [] if ACTIVE else [file.name for file in HERE.glob("*.py")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture
def ranks(monkeypatch):
    """Sets how many tensor-parallel ranks there are and which one this is."""
    from vllm.distributed import parallel_state

    def choose(count: int, rank: int = 0) -> None:
        group = SimpleNamespace(world_size=count, rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "_TP", group)

    choose(1)
    return choose


@pytest.fixture(autouse=True)
def current_config(ranks):
    """vLLM's layers look for the engine's configuration while they are built."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config

    before = torch.get_default_dtype()
    with set_current_vllm_config(VllmConfig()):
        yield
    torch.set_default_dtype(before)
