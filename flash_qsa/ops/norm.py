"""Zero-centred RMSNorm (Zhang & Sennrich 2019, gain 1 + w)."""

from __future__ import annotations

import torch


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """FP32 copy for arithmetic, or float64 where the input already is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · (1 + weight) over the last axis.

    Args:
        x: [..., D], any float dtype.
        weight: [D]; zero means gain one.
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype: computed in FP32 (float64 for float64 inputs) and rounded once.
    """
    x_wide = wide(x)
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + wide(weight).to(x_wide.dtype))).to(x.dtype)
