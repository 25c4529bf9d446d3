"""Device functions of prepare that norm heads and turn them.

Only the pairs of channels that turn are computed twice: once among all channels, for the sum of
squares, and once as pairs, loaded again from L1 so that no value has to change lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Table(NamedTuple):
    """A rotary table [rows, rotary_dim]: cosines, then sines."""

    ptr: Any
    stride: Any
    rows: Any


class Rope(NamedTuple):
    """Compile-time facts of a rotation. half: pairs of channels that turn; pairs: the power of two
    above. axes: "one" (the first axis alone), or mRoPE's channel orders "interleaved" and "runs",
    with the channels of each axis. packed: the device rounds two numbers to 16 bits at once."""

    half: int
    pairs: int
    neox: bool
    axes: str
    section_t: int
    section_h: int
    section_w: int
    packed: bool


@triton.jit
def round_to(x, dtype: tl.constexpr, PACKED: tl.constexpr):
    """FP32 numbers rounded to `dtype`. PACKED converts pairs: left alone, the compiler converts
    one by one, in a unit an eighth as fast."""
    if PACKED and dtype == tl.bfloat16:
        pair: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(pair, "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2)
    elif PACKED and dtype == tl.float16:
        pair: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(pair, "=r,r,r", [x], tl.float16, is_pure=True, pack=2)
    else:
        return x.to(dtype)


@triton.jit
def rotary_pairs(PAIRS: tl.constexpr, ROPE: tl.constexpr):
    """First and second channel of each pair that turns, and whether there is such a pair; [PAIRS]
    each."""
    HALF: tl.constexpr = ROPE.half
    pair = tl.arange(0, PAIRS)
    if ROPE.neox:
        return pair, pair + HALF, pair < HALF
    else:
        return 2 * pair, 2 * pair + 1, pair < HALF


@triton.jit
def rotary_values(table, position, known, HEADS: tl.constexpr, PAIRS: tl.constexpr, ROPE):
    """FP32 cosines and sines [HEADS, PAIRS] at one position; the table must have it to be `known`.

    Every head loads its own copy from L1, so that no value has to change lanes.
    """
    HALF: tl.constexpr = ROPE.half
    pos_t, pos_h, pos_w = position
    each = tl.zeros((HEADS, 1), dtype=tl.int32)
    pair = tl.arange(0, PAIRS)[None, :] + each
    mask = pair < tl.where(known, HALF, 0)
    at = table.ptr + pos_t * table.stride + pair
    cos = tl.load(at, mask=mask, other=0.0)
    sin = tl.load(at + HALF, mask=mask, other=0.0)
    if ROPE.axes != "one":
        if ROPE.axes == "interleaved":
            on_h = (pair % 3 == 1) & (pair < 3 * ROPE.section_h)
            on_w = (pair % 3 == 2) & (pair < 3 * ROPE.section_w)
        else:
            on_w = pair >= ROPE.section_t + ROPE.section_h
            on_h = (pair >= ROPE.section_t) & (pair < ROPE.section_t + ROPE.section_h)
        # whole rows of each axis, then a choice in registers: loads masked by axis are narrow
        at_h = table.ptr + pos_h * table.stride + pair
        at_w = table.ptr + pos_w * table.stride + pair
        cos_h = tl.load(at_h, mask=mask, other=0.0)
        sin_h = tl.load(at_h + HALF, mask=mask, other=0.0)
        cos_w = tl.load(at_w, mask=mask, other=0.0)
        sin_w = tl.load(at_w + HALF, mask=mask, other=0.0)
        cos = tl.where(on_h, cos_h, tl.where(on_w, cos_w, cos))
        sin = tl.where(on_h, sin_h, tl.where(on_w, sin_w, sin))
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _weights(x, weight_ptr, channel, live):
    """w of the channels of x [HEADS, n]; every head loads its own copy from L1."""
    at = weight_ptr + (channel[None, :] + tl.zeros((x.shape[0], 1), dtype=tl.int32))
    return tl.load(at, mask=live[None, :], other=0.0)


@triton.jit
def norm_and_rotate(x, first, second, weight_ptr, eps, table, position, DIM, ROPE, dtype):
    """RMSNorm (gain 1 + w) of heads x [HEADS, BLOCK], and the rotation of their pairs `first`,
    `second` [HEADS, PAIRS] to `position`; returns the normed heads and the turned pairs in `dtype`.

    The norm is rounded to `dtype` before the rotation. Heads at a position outside the table come
    out NaN, not wrong.
    """
    pos_t, pos_h, pos_w = position
    known = tl.minimum(pos_t, tl.minimum(pos_h, pos_w)) >= 0
    known = known & (tl.maximum(pos_t, tl.maximum(pos_h, pos_w)) < table.rows)
    d = tl.arange(0, x.shape[1])
    at_first, at_second, paired = rotary_pairs(first.shape[1], ROPE)
    weight = _weights(x, weight_ptr, d, d < DIM)
    first_weight = _weights(first, weight_ptr, at_first, paired)
    second_weight = _weights(second, weight_ptr, at_second, paired)
    # Every load so far is under way before anything waits: the table for the position, the rest
    # for the heads. Left alone, the compiler puts some loads behind such waits.
    tl.debug_barrier()
    x, first, second = x.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
    cos, sin = rotary_values(table, position, known, first.shape[0], first.shape[1], ROPE)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    factor = tl.where(known, factor, float("nan"))[:, None]
    y = round_to(x * factor * (1.0 + weight.to(tl.float32)), dtype, ROPE.packed)
    a = round_to(first * factor * (1.0 + first_weight.to(tl.float32)), dtype, ROPE.packed)
    b = round_to(second * factor * (1.0 + second_weight.to(tl.float32)), dtype, ROPE.packed)
    a, b = a.to(tl.float32), b.to(tl.float32)
    turned_a = round_to(a * cos - b * sin, dtype, ROPE.packed)
    turned_b = round_to(b * cos + a * sin, dtype, ROPE.packed)
    return y, turned_a, turned_b
