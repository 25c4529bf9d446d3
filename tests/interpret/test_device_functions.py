"""Device functions that several kernels share, in the interpreter.

Claims:
* writing e4m3 by bit arithmetic gives torch's bits: every number between two codes, ties, both
  ends of the subnormals, saturation, infinities, NaN and signed zeros;
* reading e4m3 bytes gives all 256 values;
* what is written and read back is the number again.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from flash_qsa.ops.device import e4m3_from_fp32, e4m3_to_fp16
from flash_qsa.ops.fp8 import from_storage, to_storage


@triton.jit
def _write(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, e4m3_from_fp32(x), mask=at < count)


@triton.jit
def _read(codes_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + at, e4m3_to_fp16(code).to(tl.float32), mask=at < count)


def write(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.numel(), dtype=torch.uint8)
    _write[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096)
    return out


@pytest.mark.bug("O-42", "O-43")
def test_writing_gives_torchs_bits() -> None:
    # every FP32 number with 12 significant bits up to 2^10, and their neighbours
    high = torch.arange(0x3A000000, 0x44800000, 1 << 11, dtype=torch.int32)
    x = torch.cat([(high + step).view(torch.float32) for step in (-1, 0, 1)])
    special = [0.0, 448.0, 448.1, 464.0, 480.0, 1e30, torch.inf, torch.nan, 2.0**-10, 1e-45]
    x = torch.cat((x, torch.tensor(special)))
    x = torch.cat((x, -x))
    got, want = write(x), to_storage(x, torch.uint8)
    assert torch.equal(got, want), x[got != want][:8]


@pytest.mark.bug("O-43")
def test_reading_gives_every_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256)
    _read[(1,)](codes, out, 256, BLOCK=256)
    want = from_storage(codes)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(0), want.nan_to_num(0))
    assert torch.equal(write(want), codes)
