"""Launches without binding: what is remembered, and what must go through Triton again.

The kernel is a double that records which way a launch took; on a GPU every other test launches
real ones, most of them twice.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flash_qsa.launches import record
from flash_qsa.ops import direct


class Kernel:
    """Takes (tensor, count, scale) and the constant BLOCK; compiles one binary a launch."""

    params = [SimpleNamespace(name=name) for name in ("tensor", "count", "scale", "BLOCK", "FLAG")]

    def __init__(self, returns: bool = True) -> None:
        self.bound: list = []
        self.again: list = []
        self.returns = returns

    def __getitem__(self, grid):
        def run(*args, **named):
            self.bound.append((grid, args, named))
            return self if self.returns else None

        return run if len(grid) != 3 else lambda *args: self.again.append((grid, args))


def launch(kernel, tensor, count=5, scale=0.5, grid=(7,), **named):
    kernel[grid](tensor, count, scale, **{"BLOCK": 64, "FLAG": True, "num_warps": 4, **named})


@pytest.fixture
def memory():
    return torch.zeros(64)


def test_the_same_classes_of_arguments_are_bound_once(memory):
    inner = Kernel()
    kernel = direct.direct(inner)
    launch(kernel, memory)
    launch(kernel, memory[4:], scale=0.25, grid=(9, 2))
    assert len(inner.bound) == 1 and len(inner.again) == 1
    grid, (tensor, *others) = inner.again[0]
    assert grid == (9, 2, 1) and tensor.data_ptr() == memory[4:].data_ptr()
    assert others == [5, 0.25, 64, True]


@pytest.mark.parametrize(
    "other",
    [
        {"count": 6},
        {"count": 1},
        {"tensor": torch.zeros(64, dtype=torch.float64)},
        {"tensor": torch.zeros(64)[1:]},
        {"tensor": (torch.zeros(64), 3)},
        {"scale": torch.zeros(1)},
        {"scale": None},
        {"count": np.int64(5)},
        {"count": True},
        {"BLOCK": 32},
        {"FLAG": False},
        {"num_warps": 8},
        {"launch_pdl": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_triton_tells_apart_is_bound_again(memory, other):
    inner = Kernel()
    kernel = direct.direct(inner)
    launch(kernel, memory)
    launch(kernel, **{"tensor": memory, **other})
    launch(kernel, memory)
    assert len(inner.bound) == 2 and len(inner.again) == 1


def test_members_of_tuples_are_told_apart(memory):
    inner = Kernel()
    kernel = direct.direct(inner)
    for tensor in ((memory, 3), (memory, 4), (memory[1:], 3), (memory, 3)):
        launch(kernel, tensor)
    assert len(inner.bound) == 3 and len(inner.again) == 1


def test_nothing_is_remembered_of_launches_that_returned_no_binary(memory):
    inner = Kernel(returns=False)
    kernel = direct.direct(inner)
    launch(kernel, memory)
    launch(kernel, memory)
    assert len(inner.bound) == 2 and not inner.again


def test_recorded_launches_neither_run_nor_are_remembered(memory, monkeypatch):
    inner = Kernel()
    kernel = direct.direct(inner)
    launch(kernel, memory)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with record("sm_90"):
        launch(kernel, memory)
        launch(kernel, memory, count=9)
    launch(kernel, memory, count=9)
    assert len(inner.bound) == 4 and not inner.again


def test_what_is_remembered_stays_small(memory, monkeypatch):
    monkeypatch.setattr(direct, "MAX_REMEMBERED", 3)
    inner = Kernel()
    kernel = direct.direct(inner)
    for count in range(10):
        launch(kernel, memory, count=count)
        assert len(kernel._known) <= 3
    launch(kernel, memory, count=9)
    assert len(inner.again) == 1
