"""The one place that decides which implementation of an op runs.

`backend="reference"` and `backend="triton"` are orders: they run that implementation or raise.
`backend="auto"` follows the table below, after the environment variable FLASH_QSA_BACKEND. Nothing
is decided at import, and a kernel module is imported only when it has been chosen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flash_qsa.checks import UnsupportedError

BACKENDS = ("auto", "reference", "triton")
OPS = (
    "store_rows",
    "compress_keys",
    "prepare",
    "batch_plan",
    "select_blocks",
    "expand_blocks",
    "sparse_attention",
)

MIN_CUDA_CAPABILITY = (7, 5)
"""Triton's own floor for the matrix instructions that the kernels use."""


@dataclass(frozen=True)
class Choice:
    """Which implementation runs, and why."""

    backend: str
    reason: str


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton kernels run in its CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _triton_obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run on `device`, or None where it can."""
    if not triton_installed():
        return "triton is not installed"
    if device.type == "cpu":
        return None if interpreting() else "tensors are on the CPU"
    if device.type != "cuda":
        return f"device type {device.type!r} has no Triton kernels here"
    if torch.version.hip is None and _capability(device) < MIN_CUDA_CAPABILITY:
        major, minor = _capability(device)
        return f"compute capability {major}.{minor} is below 7.5"
    return None


def choose(backend: str, device: torch.device) -> Choice:
    """Resolves a `backend` argument for tensors on `device`.

    Raises:
        ValueError: an unknown backend, here or in FLASH_QSA_BACKEND.
        UnsupportedError: an explicit "triton" that cannot run on `device`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    ordered_by = "the backend argument"
    if backend == "auto":
        backend = os.environ.get("FLASH_QSA_BACKEND", "auto")
        ordered_by = "FLASH_QSA_BACKEND"
        if backend not in BACKENDS:
            raise ValueError(
                f"FLASH_QSA_BACKEND: expected one of {', '.join(BACKENDS)}, got {backend!r}"
            )
    if backend == "reference":
        return Choice("reference", f"{ordered_by} says reference")
    obstacle = _triton_obstacle(device)
    if backend == "triton":
        if obstacle:
            raise UnsupportedError(f"backend 'triton' (from {ordered_by}): {obstacle}")
        return Choice("triton", f"{ordered_by} says triton")
    if obstacle or device.type == "cpu":
        return Choice("reference", obstacle or "tensors are on the CPU")
    return Choice("triton", f"{device.type} device with Triton installed")


_trace: list[tuple[str, str]] | None = None


@contextlib.contextmanager
def trace() -> Iterator[list[tuple[str, str]]]:
    """Collects (op, backend) for every op that runs inside, in order.

    Example::

        with flash_qsa.dispatch.trace() as ran:
            select_blocks(...)
        assert ran == [("select_blocks", "triton")]
    """
    global _trace
    before, _trace = _trace, []
    try:
        yield _trace
    finally:
        _trace = before


def implementation(op: str, backend: str, device: torch.device) -> Callable:
    """The function that fills the outputs of `op`: `reference.<op>` or `kernel.launch`.

    Both take the same arguments, outputs included: an op's `api.py` checks and allocates, the
    implementations only compute. While a program is traced it is the op's operator instead, which
    chooses when it runs.
    """
    if torch.compiler.is_compiling():
        from flash_qsa import library

        return library.traced(op, backend)
    chosen = choose(backend, device).backend
    if _trace is not None:
        _trace.append((op, chosen))
    return _load(op, chosen)


@functools.cache
def _load(op: str, backend: str) -> Callable:
    if backend == "triton":
        return importlib.import_module(f"flash_qsa.ops.{op}.kernel").launch
    # kernels record no gradients either; sparse_attention's are registered in flash_qsa.library
    return torch.no_grad()(getattr(importlib.import_module(f"flash_qsa.ops.{op}.reference"), op))
