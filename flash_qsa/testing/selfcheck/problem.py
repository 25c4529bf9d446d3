"""What the stages share: the setting, the problems of one length, and the forms of comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flash_qsa import dispatch
from flash_qsa.testing.compare import within_bound
from flash_qsa.testing.inputs import REAL, Problem, Shape, make_problem

Outcome = tuple[float, float, str]
"""Error and bound of the worst element, and what is wrong ("" where nothing is)."""

Cases = Iterator[tuple[str, Callable[[], Outcome]]]
"""Named checks of one stage, each run on its own."""


@dataclass(frozen=True)
class Setting:
    """What a run of the stages is about.

    Attributes:
        device, backend, dtype: where, by which implementation, in which activation dtype.
        shape: head counts and sizes.
        rows: rows of the prefill problems, the last tokens of their request.
        seed: of all random values.
    """

    device: torch.device
    backend: str = "auto"
    dtype: torch.dtype = torch.float32
    shape: Shape = REAL
    rows: int = 3
    seed: int = 0

    @property
    def fp8(self) -> torch.dtype:
        """float8_e4m3fn, or its bytes where the device has no such type."""
        nvidia = self.device.type == "cuda" and torch.version.hip is None
        if nvidia and torch.cuda.get_device_capability(self.device) < (8, 9):
            return torch.uint8
        return torch.float8_e4m3fn


class Problems:
    """The selection and attention problems of one length, built when first asked for and kept."""

    def __init__(self, setting: Setting, length: int) -> None:
        self.setting, self.length = setting, length
        self._built: dict[Any, Problem] = {}

    def get(self, kind: str, fp8: bool = False) -> Problem:
        """ "prefill": the last rows of one request. "decode": one row of each of three."""
        if (kind, fp8) not in self._built:
            at, n = self.setting, self.length
            many = kind == "decode"
            with dispatch.trace():  # ops that only make inputs are not what ran
                self._built[kind, fp8] = make_problem(
                    [n, max(1, n // 3), min(n, 37)] if many else [n],
                    [1, 1, 1] if many else [min(n, at.rows)],
                    at.shape,
                    dtype=at.dtype,
                    kv_dtype=at.fp8 if fp8 else None,
                    index_dtype=at.fp8 if fp8 else None,
                    padding=1,
                    device=at.device,
                    draw_on=at.device,
                    seed=at.seed + n,
                )
        return self._built[kind, fp8]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers, so that NaN equals the same NaN."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(width[tensor.dtype.itemsize])


def within(*parts: tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]) -> Outcome:
    """Worst of several (name, result, truth, bound): the element with most of its bound used."""
    worst, most = (0.0, 0.0, ""), -1.0
    for name, result, truth, bound in parts:
        seen = within_bound(result, truth, bound)
        if seen.where and seen.worst_ratio > most:
            most = seen.worst_ratio
            error = float((result[seen.where].double() - truth[seen.where]).abs())
            detail = "" if seen.ok else f"{name}{list(seen.where)} is off by {error:.3e}"
            worst = (error, float(bound[seen.where]), detail)
    return worst


def exact(*parts: tuple[str, torch.Tensor, torch.Tensor]) -> Outcome:
    """Bitwise equality of several (name, result, truth); the error counts unequal elements."""
    for name, result, truth in parts:
        if result.shape != truth.shape or result.dtype != truth.dtype:
            kinds = [f"{t.dtype} {list(t.shape)}" for t in (result, truth)]
            return 1.0, 0.0, f"{name}: {kinds[0]}, expected {kinds[1]}"
        wrong = bits(result) != bits(truth)
        count = int(wrong.sum())
        if count:
            where = wrong.nonzero()[0].tolist()
            return float(count), 0.0, f"{name}: {count} elements differ, the first at {where}"
    return 0.0, 0.0, ""
