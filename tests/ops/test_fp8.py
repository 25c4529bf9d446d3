"""FP8 e4m3 storage.

Claims:
* all 256 codes read as sign · 2^(e-7) · (1 + m/8), subnormals m · 2^-9, and 0x7F, 0xFF as NaN;
* writing rounds to the nearest code, ties to the even one, saturates at ±448 and keeps NaN;
* a scale divides before that, as a number or as a device tensor, so ±448 · scale is the range;
* the typed form and its bytes are the same bits.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.checks import expect_scale
from flash_qsa.ops.fp8 import as_bytes, from_storage, to_storage

CODES = torch.arange(256, dtype=torch.uint8)


def value_of(code: int) -> float:
    """The number of an e4m3 code, from the format's definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8)


TABLE = [value_of(code) for code in range(256)]


def nearest(x: float) -> float:
    """The e4m3 number that x rounds to, by search."""
    if math.isnan(x):
        return math.nan
    x = max(-448.0, min(448.0, x))
    best = min(range(127), key=lambda code: (abs(TABLE[code] - abs(x)), code & 1))
    return math.copysign(TABLE[best], x)


@pytest.mark.bug("O-43")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_every_code_reads_as_the_format_says(dtype: torch.dtype) -> None:
    stored = CODES.view(dtype) if dtype != torch.uint8 else CODES
    want = torch.tensor(TABLE, dtype=torch.float64)
    for read in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        got = from_storage(stored, read).double()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0)), read
        assert torch.equal(torch.signbit(got[:128]), torch.zeros(128, dtype=torch.bool))


@settings(max_examples=60, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-600, max_value=600))
def test_writing_rounds_to_the_nearest_code(x: float) -> None:
    got = from_storage(to_storage(torch.tensor([x]), torch.uint8)).item()
    assert got == nearest(x)


def test_ties_go_to_the_even_code() -> None:
    lower = torch.tensor([TABLE[code] for code in range(126)])
    upper = torch.tensor([TABLE[code + 1] for code in range(126)])
    middle = (lower + upper) / 2
    want = torch.arange(126).where(torch.arange(126) % 2 == 0, torch.arange(1, 127))
    for sign, bit in ((1, 0), (-1, 0x80)):
        assert torch.equal(to_storage(sign * middle, torch.uint8).int(), want.int() + bit)


@pytest.mark.bug("O-42")
def test_saturates_at_the_scaled_range_and_keeps_nan() -> None:
    x = torch.tensor([900.0, -900.0, 2000.0, 223.0, math.inf, -math.inf, math.nan, 1e-9])
    for scale in (0.5, torch.tensor([0.5])):
        got = from_storage(to_storage(x, torch.uint8, scale)) * 0.5
        assert torch.equal(got[:3], torch.tensor([224.0, -224.0, 224.0]))
        assert got[3] == 224 and got[4] == 224 and got[5] == -224
        assert got[6].isnan() and got[7] == 0
    half, third = (from_storage(to_storage(x[3:4], torch.uint8, s)) * s for s in (0.5, 3.0))
    assert half != third  # the scale chooses the grid


def test_typed_and_bytes_are_the_same_bits() -> None:
    x = torch.randn(4096) * 100
    typed = to_storage(x, torch.float8_e4m3fn, 0.7)
    assert typed.dtype == torch.float8_e4m3fn
    assert torch.equal(as_bytes(typed), to_storage(x, torch.uint8, 0.7))


@pytest.mark.bug("O-42")
def test_scales_are_refused_where_they_mean_nothing() -> None:
    device = torch.device("cpu")
    expect_scale("k_scale", torch.ones(1), torch.uint8, device)
    for value, dtype, message in (
        (0.5, torch.bfloat16, "only an FP8 cache"),
        (0.0, torch.uint8, "positive finite"),
        (math.inf, torch.uint8, "positive finite"),
        (torch.ones(2), torch.uint8, "one FP32 element"),
        (torch.ones(1, dtype=torch.float64), torch.uint8, "one FP32 element"),
    ):
        with pytest.raises(ValueError, match=message):
            expect_scale("k_scale", value, dtype, device)
