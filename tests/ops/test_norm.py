"""Zero-centred RMSNorm.

Claims:
* the gain is 1 + w, so zero weights only normalise (hand-worked);
* arithmetic is FP32 whatever the dtype and rounded once; float64 stays float64;
* it keeps a derived bound against float64, large and small inputs included;
* each head is normed on its own.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.ops.norm import rms_norm
from flash_qsa.testing.compare import U_FP32, assert_within, unit_roundoff


@pytest.mark.parity("P04", "P29")
def test_hand_worked() -> None:
    x = torch.tensor([[3.0, -4.0]])
    # mean square 12.5
    want = x / 12.5**0.5
    assert torch.allclose(rms_norm(x, torch.zeros(2), 0.0), want, atol=0, rtol=2**-22)
    gained = rms_norm(x, torch.tensor([1.0, -1.0]), 0.0)
    assert torch.allclose(gained, want * torch.tensor([2.0, 0.0]), atol=0, rtol=2**-22)
    assert torch.equal(rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6), torch.zeros(1, 4))


@pytest.mark.bug("O-56")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_keeps_its_bound_against_float64(dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(7, 5, 96) * size).to(dtype)
    weight = (torch.randn(96) * 0.3).to(dtype)
    truth = rms_norm(x.double(), weight.double(), 1e-6)
    # a sum of 96 squares, its root, two products; then one rounding
    relative = unit_roundoff(dtype) + (96 / 2 + 8) * U_FP32
    bound = truth.abs() * relative + torch.finfo(dtype).smallest_normal
    assert_within(rms_norm(x, weight, 1e-6), truth, bound)


def test_float64_is_not_narrowed() -> None:
    x = torch.randn(3, 64, dtype=torch.float64)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(rms_norm(x, torch.zeros(64), 1e-6), want, rtol=1e-14, atol=0)


def test_heads_do_not_see_each_other() -> None:
    x = torch.randn(4, 3, 16)
    changed = x.clone()
    changed[:, 1] *= 1000
    one, two = (rms_norm(t, torch.zeros(16), 1e-6) for t in (x, changed))
    assert torch.equal(one[:, 0], two[:, 0]) and torch.equal(one[:, 2], two[:, 2])
