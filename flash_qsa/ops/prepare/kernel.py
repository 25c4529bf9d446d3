"""prepare in Triton: one launch over rows and requests. Mirrors `reference.py`.

The programs of a row norm and rotate its query heads and copy their gates, some heads each; one
more takes its key, value and index query heads, and the group that it closes if all members are in
this step. A program a request pools the group that was open before the step, if the step closes
it, and then commits the step's raw keys to the ring. That group is the only one that needs ring
rows, so whoever overwrites them has read them.

Reads and writes about 2 · (qkv + index_qk) bytes and nothing else of size: rotation partners,
cosines and weights come from L1. Everything about a row is a scalar, and every tile is loaded in
the lanes that use it, so nothing passes through shared memory but the sums of squares of a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_qsa.ops.compress_keys.ring_rows import position_offset, stores_positions
from flash_qsa.ops.device import (
    Groups,
    Heads,
    Ring,
    Rope,
    Turns,
    norm_and_rotate,
    pool_group,
    ring_position,
    rotary_channels,
    step_position,
    to_cache,
)
from flash_qsa.ops.fp8 import as_bytes, is_fp8
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.prepare.tiles import Tiles, choose_tiles
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan


class Plan(NamedTuple):
    """The plan's tensors, with the ring table's stride."""

    query_start: Any
    seq_lens: Any
    ring_table: Any
    ring_table_stride: Any
    request_ids: Any
    positions: Any
    main_slots: Any
    compressed_slots: Any
    ring_slots: Any


class Weights(NamedTuple):
    """Norm weights and their epsilon."""

    index_query: Any
    index_key: Any
    query: Any
    key: Any
    eps: Any


class Cells(NamedTuple):
    """A paged cache and how many cells it has."""

    ptr: Any
    stride_page: Any
    stride_row: Any
    stride_head: Any
    count: Any


class Output(NamedTuple):
    """An output [T, heads, dim] with a contiguous last axis."""

    ptr: Any
    stride_row: Any
    stride_head: Any


class Scales(NamedTuple):
    """FP8 scales of K and V: None, a number, or a device tensor."""

    k: Any
    v: Any


class Sizes(NamedTuple):
    """Compile-time sizes; block and index_block are the head dims rounded up to powers of two."""

    heads: int
    kv_heads: int
    index_heads: int
    dim: int
    block: int
    index_dim: int
    index_block: int
    page: int
    page_groups: int
    main_is_fp8: bool
    index_is_fp8: bool
    k_scale: str
    v_scale: str


@triton.jit
def _rotated(turns, row, src_ptr, head, HEADS, STRIDE, weight_ptr, eps, DIM, BLOCK, ROPE):
    """Normed and rotated heads [len(head), BLOCK] of one row: `head` of HEADS, STRIDE apart."""
    d = tl.arange(0, BLOCK)
    partner, _, _, rotates = rotary_channels(BLOCK, ROPE)
    at = src_ptr + (head * STRIDE)[:, None]
    live = (head < HEADS)[:, None]
    x = tl.load(at + d[None, :], mask=live & (d < DIM)[None, :], other=0.0)
    partner_x = tl.load(at + partner[None, :], mask=live & rotates[None, :], other=0.0)
    position = step_position(turns, row, tl.load(turns.request_ids + row) >= 0)
    dtype: tl.constexpr = src_ptr.dtype.element_ty
    x, partner_x = x.to(tl.float32), partner_x.to(tl.float32)
    return norm_and_rotate(x, partner_x, weight_ptr, eps, turns, position, DIM, ROPE, dtype)


@triton.jit
def _queries_gates(
    qkv, turns, weights, queries, gates, row, first, TILE: tl.constexpr, SIZES: tl.constexpr, ROPE
):
    """Normed and rotated query heads of a row, and their gates as they are."""
    DIM: tl.constexpr = SIZES.dim
    BLOCK: tl.constexpr = SIZES.block
    HEADS: tl.constexpr = SIZES.heads
    head = first + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK)
    mask = (head < HEADS)[:, None] & (d < DIM)[None, :]
    src_ptr = qkv.ptr + row * qkv.stride
    gate_at = src_ptr + (head * (2 * DIM) + DIM)[:, None] + d[None, :]
    gate = tl.load(gate_at, mask=mask, other=0.0)
    weight_ptr = weights.query
    query = _rotated(
        turns, row, src_ptr, head, HEADS, 2 * DIM, weight_ptr, weights.eps, DIM, BLOCK, ROPE
    )
    tl.store(_at(gates, row, head) + d[None, :], gate, mask=mask)
    tl.store(_at(queries, row, head) + d[None, :], query.to(gate.dtype), mask=mask)


@triton.jit
def _index_queries(
    index, turns, weights, queries, row, first, TILE: tl.constexpr, SIZES: tl.constexpr, ROPE
):
    """Normed and rotated index query heads of a row, in the compressed cache's dtype."""
    DIM: tl.constexpr = SIZES.index_dim
    BLOCK: tl.constexpr = SIZES.index_block
    HEADS: tl.constexpr = SIZES.index_heads
    head = first + tl.arange(0, TILE)
    src_ptr = index.ptr + row * index.stride
    weight_ptr = weights.index_query
    query = _rotated(
        turns, row, src_ptr, head, HEADS, DIM, weight_ptr, weights.eps, DIM, BLOCK, ROPE
    )
    d = tl.arange(0, BLOCK)
    mask = (head < HEADS)[:, None] & (d < DIM)[None, :]
    query = to_cache(query, SIZES.index_is_fp8, src_ptr.dtype.element_ty)
    tl.store(_at(queries, row, head) + d[None, :], query, mask=mask)


@triton.jit
def _keys_values(
    qkv, turns, weights, plan, main, scales, row, first, TILE: tl.constexpr, SIZES, ROPE
):
    """Normed and rotated key heads of a row, and its value heads, to the main cache."""
    DIM: tl.constexpr = SIZES.dim
    BLOCK: tl.constexpr = SIZES.block
    HEADS: tl.constexpr = SIZES.kv_heads
    dtype: tl.constexpr = qkv.ptr.dtype.element_ty
    slot = tl.load(plan.main_slots + row)
    inside = (slot >= 0) & (slot < main.count)
    head = first + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK)
    mask = (head < tl.where(inside, HEADS, 0))[:, None] & (d < DIM)[None, :]
    src_ptr = qkv.ptr + row * qkv.stride + 2 * SIZES.heads * DIM
    value_at = src_ptr + (HEADS * DIM + head * DIM)[:, None] + d[None, :]
    value = tl.load(value_at, mask=mask, other=0.0).to(tl.float32)
    key = _rotated(
        turns, row, src_ptr, head, HEADS, DIM, weights.key, weights.eps, DIM, BLOCK, ROPE
    )
    K_SCALE: tl.constexpr = SIZES.k_scale
    V_SCALE: tl.constexpr = SIZES.v_scale
    key = to_cache(_unscaled(key, scales.k, K_SCALE), SIZES.main_is_fp8, dtype)
    value = to_cache(_unscaled(value, scales.v, V_SCALE), SIZES.main_is_fp8, dtype)
    cell = slot // SIZES.page * main.stride_page + slot % SIZES.page * main.stride_row
    at = main.ptr + cell + (head * main.stride_head)[:, None] + d[None, :]
    tl.store(at, key, mask=mask)
    tl.store(at + DIM, value, mask=mask)


@triton.jit
def _unscaled(x, scale, KIND: tl.constexpr):
    """x / scale, rounded as a division is. KIND: the scale is "none", a "number", or on the
    "device", where a captured graph reads its later values."""
    if KIND == "none":
        return x
    else:
        divisor = tl.load(scale) if KIND == "device" else scale
        return tl.math.div_rn(x, tl.zeros(x.shape, tl.float32) + divisor)


@triton.jit
def _at(out, row, head):
    """Pointers [len(head), 1] to heads of a row of an output."""
    return out.ptr + row * out.stride_row + (head * out.stride_head)[:, None]


@triton.jit
def _store_group(
    keys,
    ring,
    turns,
    weights,
    cache,
    group,
    position,
    cache_slot,
    SIZES: tl.constexpr,
    ROPE,
    GROUPS,
    HAS_RING,
):
    """Pools a group, norms and rotates it at its first position, and stores the compressed key."""
    DIM: tl.constexpr = SIZES.index_dim
    PAGE: tl.constexpr = SIZES.page_groups
    dtype: tl.constexpr = keys.ptr.dtype.element_ty
    d = tl.arange(0, SIZES.index_block)
    partner, _, _, rotates = rotary_channels(SIZES.index_block, ROPE)
    unread = (d >= DIM).to(tl.int32)[None, :]
    pooled = pool_group(keys, ring, group, d[None, :], unread, GROUPS, HAS_RING)
    # pooled again from L1: the partners' registers belong to other lanes
    unread = 1 - rotates.to(tl.int32)[None, :]
    partners = pool_group(keys, ring, group, partner[None, :], unread, GROUPS, HAS_RING)
    weight_ptr = weights.index_key
    eps = weights.eps
    key = norm_and_rotate(pooled, partners, weight_ptr, eps, turns, position, DIM, ROPE, dtype)
    cell = cache_slot // PAGE * cache.stride_page
    cell += cache_slot % PAGE * cache.stride_row
    at = cache.ptr + cell + d[None, :]
    tl.store(at, to_cache(key, SIZES.index_is_fp8, dtype), mask=(d < DIM)[None, :])


@triton.jit
def _store_closed_group(
    keys, ring, turns, weights, plan, cache, row, requests, SIZES, ROPE, GROUPS: tl.constexpr
):
    """Stores the group that a row closes, if it lies wholly inside the step."""
    cache_slot = tl.load(plan.compressed_slots + row)
    last_position = tl.load(plan.positions + row)
    request = tl.load(plan.request_ids + row)
    closes = (last_position >= 0) & ((last_position + 1) % GROUPS.ratio == 0)
    closes = closes & (cache_slot >= 0) & (cache_slot < cache.count)
    if closes & (request >= 0) & (request < requests):
        start = tl.load(plan.query_start + request)
        end = tl.load(plan.query_start + request + 1)
        first_here = (tl.load(plan.seq_lens + request) - (end - start)).to(tl.int64)
        if last_position - (GROUPS.ratio - 1) >= first_here:
            position = step_position(turns, row - (GROUPS.ratio - 1), True)
            group = (row, last_position, first_here, row)
            _store_group(
                keys,
                ring,
                turns,
                weights,
                cache,
                group,
                position,
                cache_slot,
                SIZES,
                ROPE,
                GROUPS,
                False,
            )


@triton.jit
def _store_open_group(
    keys,
    ring,
    turns,
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
                turns,
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
def _commit_ring(keys, ring, turns, plan, start, end, GROUPS: tl.constexpr):
    """Copies the raw keys, and exact positions, of a request's last rows to its ring."""
    CAPACITY: tl.constexpr = GROUPS.capacity
    element: tl.constexpr = ring.ptr.dtype.element_ty
    BITS: tl.constexpr = element.primitive_bitwidth
    PIECES: tl.constexpr = 64 // BITS
    d = tl.arange(0, GROUPS.block)
    piece = tl.arange(0, 16)
    for base in range(tl.maximum(start, end - CAPACITY), end, 8):
        row = (base + tl.arange(0, 8)).to(tl.int64)
        slot = tl.load(plan.ring_slots + row, mask=row < end, other=-1)
        live = (slot >= 0) & (slot // CAPACITY < ring.slots)
        cell = slot // CAPACITY * ring.stride_slot + slot % CAPACITY * ring.stride_row
        at = ring.ptr + cell[:, None]
        source = keys.ptr + (row * keys.stride)[:, None] + d[None, :]
        key = tl.load(source, mask=live[:, None] & (d < GROUPS.dim)[None, :], other=0.0)
        mask = live[:, None] & (d < GROUPS.position_at)[None, :]
        tl.store(at + d[None, :], key.to(element, bitcast=True), mask=mask)
        if GROUPS.has_positions:
            mask = live[:, None] & (piece < 3 * PIECES)[None, :]
            axis = piece // PIECES * turns.stride_axis
            source = turns.positions + (row * turns.stride_row)[:, None] + axis[None, :]
            value = tl.load(source, mask=mask, other=0)
            part = value >> (piece % PIECES * BITS).to(tl.int64)[None, :]
            tl.store(at + (GROUPS.position_at + piece)[None, :], part.to(element), mask=mask)


@triton.jit(do_not_specialize=["rows", "requests"])
def _prepare_kernel(
    qkv,
    index,
    keys,
    turns,
    weights,
    plan,
    main,
    compressed,
    ring,
    query_out,
    gate_out,
    index_out,
    scales,
    rows,
    requests,
    SIZES: tl.constexpr,
    ROPE: tl.constexpr,
    STEP_ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < requests:
        start = tl.load(plan.query_start + pid)
        end = tl.load(plan.query_start + pid + 1)
        first_here = tl.load(plan.seq_lens + pid) - (end - start)
        end = tl.minimum(end, rows)
        _store_open_group(
            keys,
            ring,
            turns,
            weights,
            plan,
            compressed,
            pid.to(tl.int64),
            start,
            end,
            first_here,
            SIZES,
            ROPE,
            GROUPS,
        )
        # every lane has read its ring rows before any lane overwrites them
        tl.debug_barrier()
        _commit_ring(keys, ring, turns, plan, start, end, GROUPS)
    else:
        QUERIES: tl.constexpr = TILES.query_heads
        KEYS: tl.constexpr = TILES.kv_heads
        INDEX: tl.constexpr = TILES.index_heads
        KV_HEADS: tl.constexpr = SIZES.kv_heads
        INDEX_HEADS: tl.constexpr = SIZES.index_heads
        PARTS: tl.constexpr = tl.cdiv(SIZES.heads, QUERIES) + 1
        row = ((pid - requests) // PARTS).to(tl.int64)
        part = (pid - requests) % PARTS
        if part > 0:
            first = (part - 1) * QUERIES
            _queries_gates(
                qkv, turns, weights, query_out, gate_out, row, first, QUERIES, SIZES, STEP_ROPE
            )
        else:
            for head in tl.static_range(0, KV_HEADS, KEYS):
                _keys_values(
                    qkv, turns, weights, plan, main, scales, row, head, KEYS, SIZES, STEP_ROPE
                )
            for head in tl.static_range(0, INDEX_HEADS, INDEX):
                _index_queries(index, turns, weights, index_out, row, head, INDEX, SIZES, STEP_ROPE)
            _store_closed_group(
                keys,
                ring,
                turns,
                weights,
                plan,
                compressed,
                row,
                requests,
                SIZES,
                STEP_ROPE,
                GROUPS,
            )


def launch(
    qkv: torch.Tensor,
    index_qk: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    caches: Caches,
    plan: BatchPlan,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    out: Prepared,
    tiles: Tiles | None = None,
) -> None:
    """Fills `out` and the caches. FP8 is written as bytes: the same bits on every device."""
    rows, (heads, dim) = qkv.shape[0], out.query.shape[1:]
    index_heads, index_dim = out.index_query.shape[1:]
    kv_heads, page = caches.main.shape[1:3]
    requests, ratio = plan.seq_lens.shape[0], plan.compress_ratio
    block = triton.next_power_of_2(dim)
    index_block = max(4, triton.next_power_of_2(index_dim))  # covers a ring key's alignment gap
    tiles = tiles or choose_tiles(rows, heads, kv_heads, index_heads, block, index_block)
    has_positions = stores_positions(caches.ring.shape[3], index_dim, qkv.dtype)
    position_at = position_offset(index_dim, qkv.dtype) if has_positions else index_dim
    capacity = caches.ring.shape[1]
    section = rope.mrope_section
    axes = "one" if section is None else "interleaved" if rope.mrope_interleaved else "runs"
    turn = Rope(rope.rotary_dim // 2, rope.neox_style, axes, *(section or (0, 0, 0)))
    # positions [T] and [1, T] were expanded: one axis then stands for all three
    step_turn = turn._replace(axes="one") if positions.stride(2) == 0 else turn
    parts = triton.cdiv(heads, tiles.query_heads) + 1
    _prepare_kernel[(requests + rows * parts,)](
        *_operands(qkv, index_qk, positions, rope, norms, caches, plan, out),
        Scales(k_scale, v_scale),
        rows,
        requests,
        SIZES=Sizes(
            heads,
            kv_heads,
            index_heads,
            dim,
            block,
            index_dim,
            index_block,
            page,
            page // ratio,
            is_fp8(caches.main.dtype),
            is_fp8(caches.compressed.dtype),
            _scale_kind(k_scale),
            _scale_kind(v_scale),
        ),
        ROPE=turn,
        STEP_ROPE=step_turn,
        GROUPS=Groups(ratio, capacity, index_dim, index_block, position_at, has_positions),
        TILES=tiles,
        num_warps=tiles.num_warps,
    )


def _scale_kind(scale: float | torch.Tensor | None) -> str:
    if scale is None:
        return "none"
    return "device" if isinstance(scale, torch.Tensor) else "number"


def _operands(
    qkv: torch.Tensor,
    index_qk: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    caches: Caches,
    plan: BatchPlan,
    out: Prepared,
) -> tuple:
    """The kernel's operands up to `scales`, in its order."""
    main, compressed = as_bytes(caches.main), as_bytes(caches.compressed)
    index_query = as_bytes(out.index_query)
    ring = caches.ring.view(torch.int32 if qkv.element_size() == 4 else torch.int16)
    keys = index_qk[:, index_query.shape[1] * index_query.shape[2] :]
    table, request_ids = rope.cos_sin, plan.request_ids.contiguous()
    main_cells, key_cells = main.shape[0] * main.shape[2], compressed.shape[0] * compressed.shape[1]
    return (
        Heads(qkv, qkv.stride(0)),
        Heads(index_qk, index_qk.stride(0)),
        Heads(keys, keys.stride(0)),
        Turns(
            positions,
            positions.stride(0),
            positions.stride(2),
            request_ids,
            table,
            table.stride(0),
            table.shape[0],
        ),
        Weights(norms.index_query, norms.index_key, norms.query, norms.key, norms.eps),
        Plan(
            plan.query_start.contiguous(),
            plan.seq_lens.contiguous(),
            plan.ring_table,
            plan.ring_table.stride(0),
            request_ids,
            plan.positions.contiguous(),
            plan.main_slots.contiguous(),
            plan.compressed_slots.contiguous(),
            plan.ring_slots.contiguous(),
        ),
        Cells(main, main.stride(0), main.stride(2), main.stride(1), main_cells),
        Cells(compressed, compressed.stride(0), compressed.stride(1), 0, key_cells),
        Ring(ring, ring.stride(0), ring.stride(1), ring.shape[0]),
        Output(out.query, out.query.stride(0), out.query.stride(1)),
        Output(out.gate, out.gate.stride(0), out.gate.stride(1)),
        Output(index_query, index_query.stride(0), index_query.stride(1)),
    )
