"""FP8 e4m3 storage: saturating casts, and reads that work where the type is missing."""

from __future__ import annotations

import torch

from flash_qsa.checks import E4M3_DTYPES
from flash_qsa.ops.norm import wide

E4M3_MAX = 448.0


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in E4M3_DTYPES


def to_storage(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Rounds x to a cache dtype. FP8 stores x / scale, saturated to ±448; NaN stays NaN."""
    if not is_fp8(dtype):
        return x.to(dtype)
    scaled = wide(x) if scale is None else wide(x) / scale
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(dtype)


def from_storage(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Reads a cache tensor as `dtype`, without any scale."""
    return (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 tensors as uint8, others as they are: torch moves bytes where it cannot move FP8."""
    return x.view(torch.uint8) if is_fp8(x.dtype) else x
