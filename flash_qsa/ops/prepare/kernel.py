"""prepare in Triton: one launch, whose programs take five kinds of work. Mirrors `reference.py`.

Per request: pool the group that was open before the step, if the step closes it, then commit the
step's raw keys to the ring. That group is the only one that needs ring rows, so whoever overwrites
them has read them. Per tile of rows: pool the groups that lie wholly inside the step. Per tile of
heads: norm and rotate index queries; norm, rotate and store keys, and store values; norm and
rotate queries, and copy their gates.

Reads and writes about 2 · (qkv + index_qk) bytes and nothing else of size: rotation partners,
cosines and weights come from L1.
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
    Positions,
    Ring,
    Rope,
    Table,
    norm_and_rotate,
    pool_groups,
    ring_position,
    rotary_channels,
    step_positions,
    to_cache,
)
from flash_qsa.ops.fp8 import as_bytes, is_fp8
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.prepare.tiles import Tiles, choose_tiles
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import device_target


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


class Operands(NamedTuple):
    """Everything the kernel reads and writes. A scale is None, a number, or a device tensor."""

    qkv: Heads
    index: Heads
    keys: Heads
    positions: Positions
    table: Table
    weights: Weights
    plan: Plan
    main: Cells
    compressed: Cells
    ring: Ring
    query: Output
    gate: Output
    index_query: Output
    k_scale: Any
    v_scale: Any


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
def _rotated_heads(io, source, offset, row, live, weight_ptr, DIM, BLOCK, ROPE: tl.constexpr):
    """Normed and rotated heads [U, BLOCK] of rows `row` [U], at elements `offset` [U] of source."""
    d = tl.arange(0, BLOCK)
    partner, _, _, rotates = rotary_channels(BLOCK, ROPE)
    at = source.ptr + offset[:, None]
    x = tl.load(at + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    partner_x = tl.load(at + partner[None, :], mask=live[:, None] & rotates[None, :], other=0.0)
    existing = tl.where(live, row, 0)
    real = tl.load(io.plan.request_ids + existing) >= 0
    pos_t, pos_h, pos_w = step_positions(io.positions, existing, real)
    x, partner_x = x.to(tl.float32), partner_x.to(tl.float32)
    dtype: tl.constexpr = source.ptr.dtype.element_ty
    return norm_and_rotate(
        x, partner_x, weight_ptr, io.weights.eps, io.table, pos_t, pos_h, pos_w, DIM, ROPE, dtype
    )


@triton.jit
def _store_groups(
    io, group, live, pos, cache_slot, SIZES: tl.constexpr, ROPE: tl.constexpr, GROUPS: tl.constexpr
):
    """Pools the `live` groups, norms and rotates them at their first positions, and stores them."""
    DIM: tl.constexpr = SIZES.index_dim
    dtype: tl.constexpr = io.keys.ptr.dtype.element_ty
    d = tl.arange(0, SIZES.index_block)
    partner, _, _, rotates = rotary_channels(SIZES.index_block, ROPE)
    pooled = pool_groups(io.keys, io.ring, group, live, d, d < DIM, GROUPS)
    # pooled again from L1: the partners' registers belong to other lanes
    partner_pooled = pool_groups(io.keys, io.ring, group, live, partner, rotates, GROUPS)
    pos_t, pos_h, pos_w = pos
    weight_ptr = io.weights.index_key
    eps = io.weights.eps
    key = norm_and_rotate(
        pooled, partner_pooled, weight_ptr, eps, io.table, pos_t, pos_h, pos_w, DIM, ROPE, dtype
    )
    page = cache_slot // SIZES.page_groups * io.compressed.stride_page
    cell = page + cache_slot % SIZES.page_groups * io.compressed.stride_row
    at = io.compressed.ptr + cell[:, None] + d[None, :]
    mask = live[:, None] & (d < DIM)[None, :]
    tl.store(at, to_cache(key, SIZES.index_is_fp8, dtype), mask=mask)


@triton.jit
def _finish_open_group(
    io,
    request,
    start,
    end,
    first_here,
    SIZES: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Stores the group that earlier steps left open, if this step closes it."""
    one = tl.arange(0, 1)
    slot = (tl.load(io.plan.ring_table + request * io.plan.ring_table_stride) + one).to(tl.int64)
    first_position = (first_here // GROUPS.ratio * GROUPS.ratio + one).to(tl.int64)
    last_position = first_position + (GROUPS.ratio - 1)
    last_row = start + last_position - first_here
    closes = (first_here > 0) & (first_here % GROUPS.ratio != 0)
    live = (one < closes.to(tl.int32)) & (last_row < end)
    cache_slot = tl.load(io.plan.compressed_slots + last_row, mask=live, other=-1)
    live = live & (cache_slot >= 0) & (cache_slot < io.compressed.count)
    live = live & (slot >= 0) & (slot < io.ring.slots)
    pos = (first_position, first_position, first_position)
    if GROUPS.has_positions:
        pos_t = ring_position(io.ring, slot, first_position, live, 0, GROUPS)
        pos_h = ring_position(io.ring, slot, first_position, live, 1, GROUPS)
        pos_w = ring_position(io.ring, slot, first_position, live, 2, GROUPS)
        pos = (pos_t, pos_h, pos_w)
    group = (last_row, last_position, (first_here + one).to(tl.int64), slot)
    _store_groups(io, group, live, pos, cache_slot, SIZES, ROPE, GROUPS)


@triton.jit
def _commit_ring(io, start, end, GROUPS: tl.constexpr):
    """Copies the raw keys, and exact positions, of a request's last rows to its ring."""
    CAPACITY: tl.constexpr = GROUPS.capacity
    element: tl.constexpr = io.ring.ptr.dtype.element_ty
    BITS: tl.constexpr = element.primitive_bitwidth
    PIECES: tl.constexpr = 64 // BITS
    d = tl.arange(0, GROUPS.block)
    piece = tl.arange(0, 16)
    for base in range(tl.maximum(start, end - CAPACITY), end, 8):
        row = (base + tl.arange(0, 8)).to(tl.int64)
        slot = tl.load(io.plan.ring_slots + row, mask=row < end, other=-1)
        live = (slot >= 0) & (slot // CAPACITY < io.ring.slots)
        cell = slot // CAPACITY * io.ring.stride_slot + slot % CAPACITY * io.ring.stride_row
        at = io.ring.ptr + cell[:, None]
        source = io.keys.ptr + (row * io.keys.stride)[:, None] + d[None, :]
        key = tl.load(source, mask=live[:, None] & (d < GROUPS.dim)[None, :], other=0.0)
        mask = live[:, None] & (d < GROUPS.position_at)[None, :]
        tl.store(at + d[None, :], key.to(element, bitcast=True), mask=mask)
        if GROUPS.has_positions:
            mask = live[:, None] & (piece < 3 * PIECES)[None, :]
            axis = piece // PIECES * io.positions.stride_axis
            source = io.positions.ptr + (row * io.positions.stride_row)[:, None] + axis[None, :]
            value = tl.load(source, mask=mask, other=0)
            part = value >> (piece % PIECES * BITS).to(tl.int64)[None, :]
            tl.store(at + (GROUPS.position_at + piece)[None, :], part.to(element), mask=mask)


@triton.jit
def _store_closed_groups(
    io,
    tile,
    rows,
    requests,
    ROWS: tl.constexpr,
    SIZES: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Stores the groups that end in a tile of rows and lie wholly inside the step."""
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    position = tl.load(io.plan.positions + row, mask=row < rows, other=-1)
    request = tl.load(io.plan.request_ids + row, mask=row < rows, other=-1)
    cache_slot = tl.load(io.plan.compressed_slots + row, mask=row < rows, other=-1)
    closes = (position >= 0) & ((position + 1) % GROUPS.ratio == 0)
    closes = closes & (request >= 0) & (request < requests)
    start = tl.load(io.plan.query_start + request, mask=closes, other=0)
    end = tl.load(io.plan.query_start + request + 1, mask=closes, other=0)
    length = tl.load(io.plan.seq_lens + request, mask=closes, other=0)
    first_here = (length - (end - start)).to(tl.int64)
    live = closes & (cache_slot >= 0) & (cache_slot < io.compressed.count)
    live = live & (position - (GROUPS.ratio - 1) >= first_here)
    if tl.max(live.to(tl.int32), axis=0) > 0:
        first_row = tl.where(live, row - (GROUPS.ratio - 1), 0)
        pos = step_positions(io.positions, first_row, live)
        group = (row, position, first_here, tl.zeros((ROWS,), dtype=tl.int64))
        _store_groups(io, group, live, pos, cache_slot, SIZES, ROPE, GROUPS)


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
    """Pointers [U, 1] to heads of an output."""
    return out.ptr + (row * out.stride_row + head * out.stride_head)[:, None]


@triton.jit(do_not_specialize=["rows", "requests", "group_end", "index_end", "kv_end"])
def _prepare_kernel(
    io,
    rows,
    requests,
    group_end,
    index_end,
    kv_end,
    SIZES: tl.constexpr,
    ROPE: tl.constexpr,
    STEP_ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
):
    pid = tl.program_id(0)
    DIM: tl.constexpr = SIZES.dim
    BLOCK: tl.constexpr = SIZES.block
    dtype: tl.constexpr = io.qkv.ptr.dtype.element_ty
    d = tl.arange(0, BLOCK)
    if pid < requests:
        start = tl.load(io.plan.query_start + pid)
        end = tl.load(io.plan.query_start + pid + 1)
        first_here = tl.load(io.plan.seq_lens + pid) - (end - start)
        end = tl.minimum(end, rows)
        request = pid.to(tl.int64)
        _finish_open_group(io, request, start, end, first_here, SIZES, ROPE, GROUPS)
        # every lane has read its ring rows before any lane overwrites them
        tl.debug_barrier()
        _commit_ring(io, start, end, GROUPS)
    elif pid < group_end:
        tile = pid - requests
        ROWS: tl.constexpr = TILES.group_rows
        _store_closed_groups(io, tile, rows, requests, ROWS, SIZES, STEP_ROPE, GROUPS)
    elif pid < index_end:
        INDEX_DIM: tl.constexpr = SIZES.index_dim
        unit = (pid - group_end) * TILES.index_units + tl.arange(0, TILES.index_units)
        row = (unit // SIZES.index_heads).to(tl.int64)
        head = unit % SIZES.index_heads
        live = row < rows
        offset = row * io.index.stride + head * INDEX_DIM
        weight_ptr = io.weights.index_query
        query = _rotated_heads(
            io, io.index, offset, row, live, weight_ptr, INDEX_DIM, SIZES.index_block, STEP_ROPE
        )
        di = tl.arange(0, SIZES.index_block)
        query = to_cache(query, SIZES.index_is_fp8, dtype)
        mask = live[:, None] & (di < INDEX_DIM)[None, :]
        tl.store(_at(io.index_query, row, head) + di[None, :], query, mask=mask)
    elif pid < kv_end:
        unit = (pid - index_end) * TILES.kv_units + tl.arange(0, TILES.kv_units)
        row = (unit // SIZES.kv_heads).to(tl.int64)
        head = unit % SIZES.kv_heads
        slot = tl.load(io.plan.main_slots + row, mask=row < rows, other=-1)
        live = (slot >= 0) & (slot < io.main.count)
        mask = live[:, None] & (d < DIM)[None, :]
        offset = row * io.qkv.stride + (2 * SIZES.heads + head) * DIM
        value_at = io.qkv.ptr + offset[:, None] + (SIZES.kv_heads * DIM + d)[None, :]
        value = tl.load(value_at, mask=mask, other=0.0).to(tl.float32)
        weight_ptr = io.weights.key
        key = _rotated_heads(io, io.qkv, offset, row, live, weight_ptr, DIM, BLOCK, STEP_ROPE)
        key = to_cache(_unscaled(key, io.k_scale, SIZES.k_scale), SIZES.main_is_fp8, dtype)
        value = to_cache(_unscaled(value, io.v_scale, SIZES.v_scale), SIZES.main_is_fp8, dtype)
        page = slot // SIZES.page * io.main.stride_page
        cell = page + slot % SIZES.page * io.main.stride_row + head * io.main.stride_head
        at = io.main.ptr + cell[:, None] + d[None, :]
        tl.store(at, key, mask=mask)
        tl.store(at + DIM, value, mask=mask)
    else:
        unit = (pid - kv_end) * TILES.query_units + tl.arange(0, TILES.query_units)
        row = (unit // SIZES.heads).to(tl.int64)
        head = unit % SIZES.heads
        live = row < rows
        mask = live[:, None] & (d < DIM)[None, :]
        offset = row * io.qkv.stride + head * (2 * DIM)
        gate = tl.load(io.qkv.ptr + offset[:, None] + (DIM + d)[None, :], mask=mask, other=0.0)
        weight_ptr = io.weights.query
        query = _rotated_heads(io, io.qkv, offset, row, live, weight_ptr, DIM, BLOCK, STEP_ROPE)
        tl.store(_at(io.gate, row, head) + d[None, :], gate, mask=mask)
        tl.store(_at(io.query, row, head) + d[None, :], query.to(dtype), mask=mask)


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
    if tiles is None:
        processors = device_target(qkv.device).processors
        tiles = choose_tiles(rows, heads, kv_heads, index_heads, block, index_block, processors)
    has_positions = stores_positions(caches.ring.shape[3], index_dim, qkv.dtype)
    position_at = position_offset(index_dim, qkv.dtype) if has_positions else index_dim
    capacity = caches.ring.shape[1]
    section = rope.mrope_section
    axes = "one" if section is None else "interleaved" if rope.mrope_interleaved else "runs"
    turn = Rope(rope.rotary_dim // 2, rope.neox_style, axes, *(section or (0, 0, 0)))
    # positions [T] and [1, T] were expanded: one axis then stands for all three
    step_turn = turn._replace(axes="one") if positions.stride(2) == 0 else turn
    group_end = requests + triton.cdiv(rows, tiles.group_rows)
    index_end = group_end + triton.cdiv(rows * index_heads, tiles.index_units)
    kv_end = index_end + triton.cdiv(rows * kv_heads, tiles.kv_units)
    total = kv_end + triton.cdiv(rows * heads, tiles.query_units)
    _prepare_kernel[(total,)](
        _operands(qkv, index_qk, positions, rope, norms, caches, plan, k_scale, v_scale, out),
        rows,
        requests,
        group_end,
        index_end,
        kv_end,
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
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    out: Prepared,
) -> Operands:
    main, compressed = as_bytes(caches.main), as_bytes(caches.compressed)
    index_query = as_bytes(out.index_query)
    ring = caches.ring.view(torch.int32 if qkv.element_size() == 4 else torch.int16)
    keys = index_qk[:, index_query.shape[1] * index_query.shape[2] :]
    table = rope.cos_sin
    return Operands(
        Heads(qkv, qkv.stride(0)),
        Heads(index_qk, index_qk.stride(0)),
        Heads(keys, keys.stride(0)),
        Positions(positions, positions.stride(0), positions.stride(2)),
        Table(table, table.stride(0), table.shape[0]),
        Weights(norms.index_query, norms.index_key, norms.query, norms.key, norms.eps),
        Plan(
            plan.query_start.contiguous(),
            plan.seq_lens.contiguous(),
            plan.ring_table,
            plan.ring_table.stride(0),
            plan.request_ids.contiguous(),
            plan.positions.contiguous(),
            plan.main_slots.contiguous(),
            plan.compressed_slots.contiguous(),
            plan.ring_slots.contiguous(),
        ),
        Cells(main, main.stride(0), main.stride(2), main.stride(1), main.shape[0] * main.shape[2]),
        Cells(
            compressed,
            compressed.stride(0),
            compressed.stride(1),
            0,
            compressed.shape[0] * compressed.shape[1],
        ),
        Ring(ring, ring.stride(0), ring.stride(1), ring.shape[0]),
        Output(out.query, out.query.stride(0), out.query.stride(1)),
        Output(out.gate, out.gate.stride(0), out.gate.stride(1)),
        Output(index_query, index_query.stride(0), index_query.stride(1)),
        k_scale,
        v_scale,
    )
