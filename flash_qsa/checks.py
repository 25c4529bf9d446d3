"""Input checks with one error form: the argument's name, what was expected, what was seen.

Checks read shapes, strides, dtypes and devices alone, never a tensor's contents, so they are safe
under graph capture and tracing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class UnsupportedError(NotImplementedError, ValueError):
    """A well-formed request for something flash-qsa does not offer; the message names it."""


FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E4M3_DTYPES = (torch.float8_e4m3fn, torch.uint8)
"""FP8 storage: typed, or as raw e4m3 bytes where the type is missing (capability below 8.9)."""

INT32 = (torch.int32,)
INDEX_DTYPES = (torch.int32, torch.int64)

Scale = float | torch.Tensor
"""A per-tensor FP8 scale: a float, or a one-element FP32 tensor that is read on the device."""


class Axes:
    """Sizes of named axes, bound at first sight and required to agree from then on."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, str]] = {}
        self._met: dict[tuple[str | int, ...], torch.Size] = {}

    def __getitem__(self, name: str) -> int:
        return self._seen[name][0]

    def shape(self, argument: str, tensor: torch.Tensor, spec: tuple[str | int, ...]) -> None:
        """Requires `tensor` to have the axes of `spec`: a name, or a fixed size.

        Raises:
            TypeError: not a tensor.
            ValueError: wrong rank, or a size that disagrees with an earlier argument's.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{argument}: expected a tensor, got {type(tensor).__name__}")
        sizes, seen = tensor.shape, self._seen
        if self._met.get(spec) == sizes:  # as an earlier argument of the same axes
            return
        if len(sizes) != len(spec):
            raise ValueError(f"{argument}: expected shape {_shown(spec)}, got {list(sizes)}")
        for axis, size in zip(spec, sizes):
            if axis.__class__ is int:
                if size != axis:
                    raise ValueError(
                        f"{argument}: expected shape {_shown(spec)}, got {list(sizes)}"
                    )
                continue
            bound, by = seen.setdefault(axis, (size, argument))
            if bound != size:
                raise ValueError(
                    f"{argument}: expected shape {_shown(spec)} with {axis} = {bound} "
                    f"(from {by}), got {list(sizes)}"
                )
        self._met[spec] = sizes


def _shown(spec: Sequence[str | int]) -> str:
    return "[" + ", ".join(str(axis) for axis in spec) + "]"


def expect_dtype(argument: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Requires one of `allowed`; raises UnsupportedError naming the dtype seen."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        seen = str(tensor.dtype).removeprefix("torch.")
        raise UnsupportedError(f"{argument}: dtype {seen} is not supported; expected {names}")


def expect_device(argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Requires `tensor` on `device`."""
    if tensor.device != device:
        raise ValueError(f"{argument}: expected device {device}, got {tensor.device}")


def expect_placed(argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Requires `tensor` on `device` with unit stride along the last axis."""
    if tensor.device != device or tensor.stride(-1) != 1:
        expect_device(argument, tensor, device)
        expect_contiguous_last(argument, tensor)


def expect_contiguous_last(argument: str, tensor: torch.Tensor) -> None:
    """Requires unit stride along the last axis; every other stride is free."""
    if tensor.stride(-1) != 1 and tensor.numel() and tensor.shape[-1] > 1:
        raise ValueError(
            f"{argument}: the last axis must be contiguous, got strides {list(tensor.stride())}"
        )


def expect_positive(argument: str, value: int) -> None:
    """Requires an integer above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{argument}: expected a positive integer, got {value!r}")


def expect_out(
    out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Requires a caller's output buffer to match what would have been allocated."""
    if out.shape != shape:
        raise ValueError(f"out: expected shape {list(shape)}, got {list(out.shape)}")
    expect_dtype("out", out, (dtype,))
    expect_placed("out", out, device)


def expect_scale(
    argument: str, value: Scale | None, cache_dtype: torch.dtype, device: torch.device
) -> None:
    """Requires a valid FP8 scale for an FP8 cache, and none for another."""
    if value is None:
        return
    if cache_dtype not in E4M3_DTYPES:
        raise ValueError(f"{argument}: only an FP8 cache has scales, the cache is {cache_dtype}")
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype != torch.float32:
            raise ValueError(
                f"{argument}: expected one FP32 element, got {value.dtype} {list(value.shape)}"
            )
        expect_device(argument, value, device)
    elif not (math.isfinite(value) and value > 0):
        raise ValueError(f"{argument}: expected a positive finite number, got {value}")
