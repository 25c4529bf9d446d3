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
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


class Heads(NamedTuple):
    """Packed heads [T, width]: a pointer, and the elements from row to row."""

    ptr: Any
    stride: Any


class Positions(NamedTuple):
    """Canonical rotary positions [T, 1, 3] (int64). The stride from axis to axis is passed beside
    them: it may be the number of rows, which no binary may be specialised on."""

    ptr: Any
    stride_row: Any


class Ring(NamedTuple):
    """A raw-key ring [slots, capacity, 1, width], seen as integers of the keys' size."""

    ptr: Any
    stride_slot: Any
    stride_row: Any
    slots: Any


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
def step_position(positions, axis_stride, row, real):
    """Rotary position (T, H, W) of a row of this step; a row that is not `real` stands at 0,
    because its own may be anything."""
    at = positions.ptr + row * positions.stride_row
    pos_t = tl.where(real, tl.load(at), 0)
    pos_h = tl.where(real, tl.load(at + axis_stride), 0)
    pos_w = tl.where(real, tl.load(at + 2 * axis_stride), 0)
    return pos_t, pos_h, pos_w


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
