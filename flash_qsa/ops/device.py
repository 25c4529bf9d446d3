"""Triton device functions that several kernels share unchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def e4m3_to_fp16(code):
    """Exact FP16 values of FP8 e4m3 bytes (uint8), for devices without the type.

    The seven low bits are an FP16 number 2^8 times too small, subnormals included; the code with
    all of them set is NaN. Every finite e4m3 number is an FP16 number.
    """
    bits = code.to(tl.uint16)
    magnitude = ((bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where(bits >= 0x80, -magnitude, magnitude).to(tl.float16)


class Heads(NamedTuple):
    """Packed heads [T, width]: a pointer, and the elements from row to row."""

    ptr: Any
    stride: Any


class Positions(NamedTuple):
    """Canonical rotary positions [T, 1, 3] (int64). The stride from axis to axis is passed beside
    them: it may be the number of rows, which no binary may be specialised on."""

    ptr: Any
    stride_row: Any


class Table(NamedTuple):
    """A rotary table [rows, rotary_dim]: cosines, then sines."""

    ptr: Any
    stride: Any
    rows: Any


class Ring(NamedTuple):
    """A raw-key ring [slots, capacity, 1, width], seen as integers of the keys' size."""

    ptr: Any
    stride_slot: Any
    stride_row: Any
    slots: Any


class Rope(NamedTuple):
    """Compile-time facts of a rotation. axes: "one" (the first axis alone), or mRoPE's channel
    orders "interleaved" and "runs", with the channels of each axis. packed: the device rounds two
    numbers to 16 bits in one instruction."""

    half: int
    neox: bool
    axes: str
    section_t: int
    section_h: int
    section_w: int
    packed: bool


class Groups(NamedTuple):
    """Compile-time facts of groups and rings: C, rows of a ring slot, Di and the power of two
    above it, and where a ring row's three positions start (without them, the key's end)."""

    ratio: int
    capacity: int
    dim: int
    block: int
    position_at: int
    has_positions: bool


@triton.jit
def e4m3_from_fp32(x):
    """FP8 e4m3 bytes (uint8) of FP32 numbers, on every device.

    Rounds to nearest even, saturates at ±448, keeps NaN and signs. The same bits as torch's cast
    of a clamped tensor, so one device's cache reads the same on another.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    capped = tl.minimum(magnitude, 0x43E00000)  # 448
    # rebias the exponent by 120 and keep three mantissa bits
    normal = (capped - (120 << 23) + 0x7FFFF + ((capped >> 20) & 1)) >> 20
    # a sum with 2^14 is rounded to multiples of 2^-9, the step of e4m3's subnormals
    small = (capped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(capped < 0x3C800000, small, normal)  # 2^-6
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_cache(x, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """Values as a cache stores them: e4m3 bytes, or rounded to `dtype`."""
    if IS_FP8:
        return e4m3_from_fp32(x.to(tl.float32))
    else:
        return x.to(dtype)


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
def step_position(positions, axis_stride, row, real):
    """Rotary position (T, H, W) of a row of this step; a row that is not `real` stands at 0,
    because its own may be anything."""
    at = positions.ptr + row * positions.stride_row
    pos_t = tl.where(real, tl.load(at), 0)
    pos_h = tl.where(real, tl.load(at + axis_stride), 0)
    pos_w = tl.where(real, tl.load(at + 2 * axis_stride), 0)
    return pos_t, pos_h, pos_w


@triton.jit
def rotary_channels(BLOCK: tl.constexpr, ROPE: tl.constexpr):
    """Where each channel of a head finds its rotation: its partner, its frequency, the sign of the
    sine, and whether it rotates at all; [BLOCK] each."""
    HALF: tl.constexpr = ROPE.half
    d = tl.arange(0, BLOCK)
    if ROPE.neox:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        frequency = tl.where(d < HALF, d, d - HALF)
        if HALF % 8 == 0:
            # lets both be loaded 16 bytes at a time
            partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
            frequency = tl.max_contiguous(tl.multiple_of(frequency, 8), 8)
        sign = tl.where(d < HALF, -1.0, 1.0)
    else:
        partner = d + 1 - 2 * (d % 2)
        frequency = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    return partner, frequency, sign, d < 2 * HALF


@triton.jit
def rotary_values(table, position, known, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROPE):
    """FP32 cosines and signed sines [HEADS, BLOCK] at one position; the table must have it to be
    `known`. Channels that do not rotate read nothing.

    Every head loads its own copy from L1, so that no value has to change lanes.
    """
    HALF: tl.constexpr = ROPE.half
    pos_t, pos_h, pos_w = position
    _, frequency, sign, _ = rotary_channels(BLOCK, ROPE)
    each = tl.zeros((HEADS, 1), dtype=tl.int32)
    mask = (tl.arange(0, BLOCK)[None, :] + each) < tl.where(known, 2 * HALF, 0)
    at = table.ptr + pos_t * table.stride + (frequency[None, :] + each)
    cos = tl.load(at, mask=mask, other=0.0)
    sin = tl.load(at + HALF, mask=mask, other=0.0)
    if ROPE.axes != "one":
        if ROPE.axes == "interleaved":
            on_h = (frequency % 3 == 1) & (frequency < 3 * ROPE.section_h)
            on_w = (frequency % 3 == 2) & (frequency < 3 * ROPE.section_w)
        else:
            on_w = frequency >= ROPE.section_t + ROPE.section_h
            on_h = (frequency >= ROPE.section_t) & (frequency < ROPE.section_t + ROPE.section_h)
        # text stands at one position on all axes; elsewhere whole rows of each, then a choice in
        # registers, because loads masked by axis are narrow
        if (pos_h != pos_t) | (pos_w != pos_t):
            at_h = table.ptr + pos_h * table.stride + (frequency[None, :] + each)
            at_w = table.ptr + pos_w * table.stride + (frequency[None, :] + each)
            cos_h = tl.load(at_h, mask=mask, other=0.0)
            sin_h = tl.load(at_h + HALF, mask=mask, other=0.0)
            cos_w = tl.load(at_w, mask=mask, other=0.0)
            sin_w = tl.load(at_w + HALF, mask=mask, other=0.0)
            cos = tl.where(on_h[None, :], cos_h, tl.where(on_w[None, :], cos_w, cos))
            sin = tl.where(on_h[None, :], sin_h, tl.where(on_w[None, :], sin_w, sin))
    return cos.to(tl.float32), sin.to(tl.float32) * sign[None, :]


@triton.jit
def norm_and_rotate(x, partner_x, weight_ptr, eps, table, position, DIM, ROPE: tl.constexpr, dtype):
    """RMSNorm (gain 1 + w), then rotation to `position`, of FP32 heads x [HEADS, BLOCK]; returns
    `dtype`.

    partner_x: each rotating channel's partner in x, 0 elsewhere. The norm is rounded to `dtype`
    before the rotation. Heads at a position outside the table come out NaN, not wrong.
    """
    HEADS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    PACKED: tl.constexpr = ROPE.packed
    pos_t, pos_h, pos_w = position
    known = tl.minimum(pos_t, tl.minimum(pos_h, pos_w)) >= 0
    known = known & (tl.maximum(pos_t, tl.maximum(pos_h, pos_w)) < table.rows)
    cos, sin = rotary_values(table, position, known, HEADS, BLOCK, ROPE)
    partner, _, _, rotates = rotary_channels(BLOCK, ROPE)
    each = tl.zeros((HEADS, 1), dtype=tl.int32)
    d = tl.arange(0, BLOCK)[None, :] + each
    weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    at = weight_ptr + (partner[None, :] + each)
    partner_weight = tl.load(at, mask=d < 2 * ROPE.half, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    factor = tl.where(known, factor, float("nan"))[:, None]
    y = round_to(x * factor * (1.0 + weight), dtype, PACKED)
    partner_y = round_to(partner_x * factor * (1.0 + partner_weight), dtype, PACKED)
    turned = y.to(tl.float32) * cos + partner_y.to(tl.float32) * sin
    # in FP32, where a choice is one instruction; rounding what is rounded changes nothing
    return round_to(tl.where(rotates[None, :], turned, y.to(tl.float32)), dtype, PACKED)


@triton.jit
def _group_member(keys, ring, back, group, channel, kept, GROUPS: tl.constexpr, HAS_RING):
    """FP32 raw key [1, BLOCK] of the token `back` before a group's last."""
    last_row, last_position, first_here, slot = group
    in_step = last_position - back >= first_here
    at = keys.ptr + (last_row - back) * keys.stride + channel
    key = tl.load(at, mask=kept < tl.where(in_step, 1, 0), other=0.0)
    if HAS_RING:
        row = (last_position - back) % GROUPS.capacity
        at = ring.ptr + slot * ring.stride_slot + row * ring.stride_row + channel
        bits = tl.load(at, mask=kept < tl.where(in_step, 0, 1), other=0)
        key = tl.where(in_step, key, bits.to(key.dtype, bitcast=True))
    return key.to(tl.float32)


@triton.jit
def pool_group(keys, ring, group, channel, unread, GROUPS: tl.constexpr, HAS_RING: tl.constexpr):
    """Mean [1, BLOCK] of a group's raw keys: FP32, summed from the oldest token to the newest,
    rounded to the keys' dtype.

    group: int64 (last_row, last_position, first_here, slot): it ends at `last_position`, which is
    the step's `last_row`; members at or after `first_here` are rows of this step, older ones are in
    the ring `slot`, which only matters with HAS_RING. channel [1, BLOCK] says which channels to
    take; `unread` [1, BLOCK] is 0 where they are read and 1 where not, which gives zeros.
    """
    RATIO: tl.constexpr = GROUPS.ratio
    total = tl.zeros(channel.shape, dtype=tl.float32)
    if RATIO <= 8:
        for i in tl.static_range(RATIO):
            back = RATIO - 1 - i
            total += _group_member(keys, ring, back, group, channel, unread, GROUPS, HAS_RING)
    else:
        for i in range(RATIO):
            back = RATIO - 1 - i
            total += _group_member(keys, ring, back, group, channel, unread, GROUPS, HAS_RING)
    mean = tl.math.div_rn(total, tl.full(total.shape, RATIO, tl.float32))
    return mean.to(keys.ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def ring_position(ring, slot, position, AXIS: tl.constexpr, GROUPS: tl.constexpr):
    """int64 rotary position, on one axis, of the token at `position` of ring `slot`.

    Put together from integers of the keys' size: no wider alignment is certain.
    """
    BITS: tl.constexpr = ring.ptr.dtype.element_ty.primitive_bitwidth
    PIECES: tl.constexpr = 64 // BITS
    row = slot * ring.stride_slot + position % GROUPS.capacity * ring.stride_row
    value = tl.zeros((), dtype=tl.int64)
    for piece in tl.static_range(PIECES):
        part = tl.load(ring.ptr + row + (GROUPS.position_at + AXIS * PIECES + piece))
        value |= (part.to(tl.int64) & ((1 << BITS) - 1)) << (piece * BITS)
    return value
