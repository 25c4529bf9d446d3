"""Values with a running error bound: truth in float64, and how far arithmetic in a dtype may stray.

Every step returns what exact arithmetic gives and adds the error that the step's own rounding and
its inputs' errors allow (Higham 2002, sections 2.2 and 3.1). Norms and rotations are those of
DESIGN.md's numerics: FP32 inside, rounded where it says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_qsa.ops.fp8 import E4M3_MAX, is_fp8
from flash_qsa.testing.compare import U_FP32, unit_roundoff

U_E4M3 = 2.0**-4
E4M3_STEP = 2.0**-9
"""Spacing of e4m3 numbers near zero; rounding there errs by half of it."""

FEW = 8
"""FP32 operations around a sum that a step spends on each element: square root, gain, products."""


@dataclass(frozen=True)
class Bounded:
    """float64 truth and, element by element, the largest error that a result may show."""

    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def exact(cls, tensor: torch.Tensor) -> Bounded:
        value = tensor.double()
        return cls(value, torch.zeros_like(value))

    def map(self, function) -> Bounded:
        """Applies a pure rearrangement (a view, a slice, an index) to both parts."""
        return Bounded(function(self.value), function(self.error))

    def rounded(self, dtype: torch.dtype, scale: float = 1.0) -> Bounded:
        """Rounded to a dtype; FP8 stores value / scale, saturated, and is compared as stored."""
        if not is_fp8(dtype):
            tiny = torch.finfo(dtype).smallest_normal
            extra = unit_roundoff(dtype) * (self.value.abs() + self.error) + tiny
            return Bounded(self.value, self.error + extra)
        value, error = self.value / scale, self.error / scale
        error = error + U_FP32 * value.abs()
        extra = U_E4M3 * (value.abs() + error) + E4M3_STEP / 2
        return Bounded(value.clamp(-E4M3_MAX, E4M3_MAX), error + extra)


def mean(members: torch.Tensor) -> Bounded:
    """FP32 mean over axis 1 of exact [n, C, Di]; not yet rounded to a dtype."""
    value, count = members.double(), members.shape[1]
    return Bounded(value.mean(1), (count + 2) * U_FP32 * value.abs().mean(1))


def norm(x: Bounded, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> Bounded:
    """Zero-centred RMSNorm over the last axis, rounded to `dtype`.

    The sum of D squares errs by D · u₃₂ relatively and enters under a square root. An input error
    moves an element by itself and, through the mean square, along the whole row.
    """
    gain = 1 + weight.double()
    dim = x.value.shape[-1]
    scale = torch.rsqrt(x.value.square().mean(-1, keepdim=True) + eps)
    value = x.value * scale * gain
    through_scale = x.value.abs() * scale.square() * (x.value.abs() * x.error).mean(-1, True)
    error = scale * gain.abs() * (x.error + through_scale)
    error = error + (dim / 2 + FEW) * U_FP32 * value.abs()
    return Bounded(value, error).rounded(dtype)


def rotate(x: Bounded, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> Bounded:
    """NeoX rotation of the leading channels of [T, ..., D] by exact cos, sin [T, half], rounded."""
    half = cos.shape[-1]
    shape = (cos.shape[0],) + (1,) * (x.value.dim() - 2) + (half,)
    cos, sin = cos.double().view(shape), sin.double().view(shape)
    (a, a_error), (b, b_error) = (
        (part.value, part.error)
        for part in (x.map(lambda t: t[..., :half]), x.map(lambda t: t[..., half : 2 * half]))
    )
    value = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    ac, bs, bc, a_sin = (t.abs() for t in (a * cos, b * sin, b * cos, a * sin))
    error = torch.cat(
        (
            cos.abs() * a_error + sin.abs() * b_error + 3 * U_FP32 * (ac + bs),
            cos.abs() * b_error + sin.abs() * a_error + 3 * U_FP32 * (bc + a_sin),
        ),
        -1,
    )
    turned = Bounded(value, error).rounded(dtype)
    rest = x.map(lambda t: t[..., 2 * half :])
    return Bounded(
        torch.cat((turned.value, rest.value), -1), torch.cat((turned.error, rest.error), -1)
    )
