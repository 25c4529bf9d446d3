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
from flash_qsa.ops.device import Groups, Heads, Ring, Rope, Turns
from flash_qsa.ops.fp8 import as_bytes, is_fp8
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.prepare.kernel_groups import commit_ring, store_closed_group, store_open_group
from flash_qsa.ops.prepare.kernel_heads import index_queries, keys_values, queries_gates
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
        store_open_group(
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
        commit_ring(keys, ring, turns, plan, start, end, GROUPS)
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
            queries_gates(
                qkv, turns, weights, query_out, gate_out, row, first, QUERIES, SIZES, STEP_ROPE
            )
        else:
            for head in tl.static_range(0, KV_HEADS, KEYS):
                keys_values(
                    qkv, turns, weights, plan, main, scales, row, head, KEYS, SIZES, STEP_ROPE
                )
            for head in tl.static_range(0, INDEX_HEADS, INDEX):
                index_queries(index, turns, weights, index_out, row, head, INDEX, SIZES, STEP_ROPE)
            store_closed_group(
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
    tiles = tiles or choose_tiles(heads, kv_heads, index_heads, block, index_block)
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
