"""Device functions of prepare for groups of keys: pooling, compressed keys, the raw-key ring."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.device import pool_group, ring_position, step_position, to_cache
from flash_qsa.ops.prepare.kernel_heads import store_heads
from flash_qsa.ops.prepare.kernel_rotary import norm_and_rotate, rotary_pairs

RING_ROWS = tl.constexpr(2)
"""Rows that go to the ring at a time: more registers would leave a processor fewer programs."""


@triton.jit
def _store_group(
    keys,
    ring,
    table,
    weights,
    cache,
    group,
    position,
    cache_slot,
    SIZES: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS,
    HAS_RING,
):
    """Pools a group, norms and rotates it at its first position, and stores the compressed key."""
    DIM: tl.constexpr = SIZES.index_dim
    PAGE: tl.constexpr = SIZES.page_groups
    dtype: tl.constexpr = keys.ptr.dtype.element_ty
    d = tl.arange(0, SIZES.index_block)
    first, second, paired = rotary_pairs(ROPE.pairs, ROPE)
    unread = (d >= DIM).to(tl.int32)[None, :]
    pooled = pool_group(keys, ring, group, d[None, :], unread, GROUPS, HAS_RING)
    # pooled again from L1: the pairs' registers belong to other lanes
    unread = 1 - paired.to(tl.int32)[None, :]
    a = pool_group(keys, ring, group, first[None, :], unread, GROUPS, HAS_RING)
    b = pool_group(keys, ring, group, second[None, :], unread, GROUPS, HAS_RING)
    weight_ptr = weights.index_key
    eps = weights.eps
    y, a, b = norm_and_rotate(pooled, a, b, weight_ptr, eps, table, position, DIM, ROPE, dtype)
    cell = cache_slot // PAGE * cache.stride_page
    cell += cache_slot % PAGE * cache.stride_row
    at = cache.ptr + cell + tl.zeros((1, 1), dtype=tl.int32)
    live = tl.full((1, 1), 1, tl.int1)
    FP8: tl.constexpr = SIZES.index_is_fp8
    y, a, b = to_cache(y, FP8, dtype), to_cache(a, FP8, dtype), to_cache(b, FP8, dtype)
    store_heads(at, live, y, a, b, DIM, ROPE)


@triton.jit
def closed_group(plan, cache, row, requests, GROUPS: tl.constexpr):
    """Whether a row closes a group that lies wholly inside the step; the group, and its cache slot.

    Asked before the row's index queries are worked on, so that no load waits for them.
    """
    cache_slot = tl.load(plan.compressed_slots + row)
    last_position = tl.load(plan.positions + row)
    request = tl.load(plan.request_ids + row)
    known = (request >= 0) & (request < requests)
    start = tl.load(plan.query_start + request, mask=known, other=0)
    end = tl.load(plan.query_start + request + 1, mask=known, other=0)
    length = tl.load(plan.seq_lens + request, mask=known, other=0)
    first_here = (length - (end - start)).to(tl.int64)
    closes = known & (last_position >= 0) & ((last_position + 1) % GROUPS.ratio == 0)
    closes = closes & (cache_slot >= 0) & (cache_slot < cache.count)
    closes = closes & (last_position - (GROUPS.ratio - 1) >= first_here)
    return closes, (row, last_position, first_here, row), cache_slot


@triton.jit
def store_closed_group(
    keys,
    ring,
    positions,
    axis_stride,
    table,
    weights,
    cache,
    group,
    cache_slot,
    SIZES,
    ROPE,
    GROUPS: tl.constexpr,
):
    """Stores a `closed_group`."""
    first_row = group[0] - (GROUPS.ratio - 1)
    position = step_position(positions, axis_stride, first_row, True)
    _store_group(
        keys, ring, table, weights, cache, group, position, cache_slot, SIZES, ROPE, GROUPS, False
    )


@triton.jit
def store_open_group(
    keys,
    ring,
    table,
    weights,
    plan,
    cache,
    request,
    start,
    end,
    first_here,
    SIZES,
    ROPE,
    GROUPS: tl.constexpr,
):
    """Stores the group that earlier steps left open, if this step closes it."""
    slot = tl.load(plan.ring_table + request * plan.ring_table_stride).to(tl.int64)
    first_position = (first_here // GROUPS.ratio * GROUPS.ratio).to(tl.int64)
    last_position = first_position + (GROUPS.ratio - 1)
    last_row = start + last_position - first_here
    closes = (first_here > 0) & (first_here % GROUPS.ratio != 0) & (last_row < end)
    if closes & (slot >= 0) & (slot < ring.slots):
        cache_slot = tl.load(plan.compressed_slots + last_row)
        if (cache_slot >= 0) & (cache_slot < cache.count):
            pos_t = first_position
            pos_h = first_position
            pos_w = first_position
            if GROUPS.has_positions:
                pos_t = ring_position(ring, slot, first_position, 0, GROUPS)
                pos_h = ring_position(ring, slot, first_position, 1, GROUPS)
                pos_w = ring_position(ring, slot, first_position, 2, GROUPS)
            group = (last_row, last_position, first_here.to(tl.int64), slot)
            position = (pos_t, pos_h, pos_w)
            _store_group(
                keys,
                ring,
                table,
                weights,
                cache,
                group,
                position,
                cache_slot,
                SIZES,
                ROPE,
                GROUPS,
                True,
            )


@triton.jit
def ring_rows(keys, ring, positions, axis_stride, plan, base, end, GROUPS: tl.constexpr):
    """Raw keys and exact positions of RING_ROWS rows from `base` on, for `commit_ring`; rows from
    `end` on are not live."""
    d = tl.arange(0, GROUPS.block)
    piece = tl.arange(0, 16)
    PIECES: tl.constexpr = 64 // ring.ptr.dtype.element_ty.primitive_bitwidth
    row = (base + tl.arange(0, RING_ROWS)).to(tl.int64)
    slot = tl.load(plan.ring_slots + row, mask=row < end, other=-1)
    # whether a row is live is not waited for
    inside = (row < end)[:, None]
    source = keys.ptr + (row * keys.stride)[:, None] + d[None, :]
    key = tl.load(source, mask=inside & (d < GROUPS.dim)[None, :], other=0.0)
    value = tl.zeros((RING_ROWS, 16), tl.int64)
    if GROUPS.has_positions:
        axis = piece // PIECES * axis_stride
        source = positions.ptr + (row * positions.stride_row)[:, None] + axis[None, :]
        value = tl.load(source, mask=inside & (piece < 3 * PIECES)[None, :], other=0)
    return slot, key, value


@triton.jit
def commit_ring(ring, rows, GROUPS: tl.constexpr):
    """Stores `ring_rows` of a request."""
    CAPACITY: tl.constexpr = GROUPS.capacity
    element: tl.constexpr = ring.ptr.dtype.element_ty
    BITS: tl.constexpr = element.primitive_bitwidth
    PIECES: tl.constexpr = 64 // BITS
    d = tl.arange(0, GROUPS.block)
    piece = tl.arange(0, 16)
    slot, key, value = rows
    live = ((slot >= 0) & (slot // CAPACITY < ring.slots))[:, None]
    cell = slot // CAPACITY * ring.stride_slot + slot % CAPACITY * ring.stride_row
    at = ring.ptr + cell[:, None]
    mask = live & (d < GROUPS.position_at)[None, :]
    tl.store(at + d[None, :], key.to(element, bitcast=True), mask=mask)
    if GROUPS.has_positions:
        part = value >> (piece % PIECES * BITS).to(tl.int64)[None, :]
        mask = live & (piece < 3 * PIECES)[None, :]
        tl.store(at + (GROUPS.position_at + piece)[None, :], part.to(element), mask=mask)
