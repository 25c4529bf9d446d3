"""prepare in Triton: one launch over rows and requests. Mirrors `reference.py`.

The programs of a row norm and rotate its query heads and copy their gates, some heads each; one
more takes its keys and values, and one its index queries and the group that it closes if all
members are in this step. A program a request pools the group that was open before the step, if the
step closes it, and then commits the step's raw keys to the ring. That group is the only one that
needs ring rows, so whoever overwrites them has read them.

Reads and writes about 2 · (qkv + index_qk) bytes and nothing else of size: pairs that turn, cosines
and weights come from L1. Everything about a row is a scalar, a program is one warp, and every tile
is loaded in the lanes that use it: nothing has to change lanes but sums of squares. The loads of
heads go out together, before anything waits for the row's position.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_qsa.dispatch import interpreting
from flash_qsa.ops.compress_keys.ring_rows import position_offset, stores_positions
from flash_qsa.ops.device import (
    Groups,
    Heads,
    Positions,
    Ring,
    step_position,
)
from flash_qsa.ops.direct import direct
from flash_qsa.ops.fp8 import as_bytes, is_fp8
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.prepare.kernel_groups import (
    closed_group,
    commit_ring,
    ring_rows,
    store_closed_group,
    store_open_group,
)
from flash_qsa.ops.prepare.kernel_heads import index_queries, keys_values, queries_gates
from flash_qsa.ops.prepare.kernel_rotary import Rope, Table
from flash_qsa.ops.prepare.tiles import Tiles, choose_tiles
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import Target, device_target


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


@direct
@triton.jit(do_not_specialize=["rows", "requests", "axis_stride"])
def _prepare_kernel(
    qkv,
    index,
    positions,
    table,
    weights,
    plan,
    main,
    compressed,
    ring,
    query_out,
    gate_out,
    index_out,
    scales,
    axis_stride,
    rows,
    requests,
    SIZES: tl.constexpr,
    ROPE: tl.constexpr,
    STEP_ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    # the raw key lies behind the index query heads
    keys = Heads(index.ptr + SIZES.index_heads * SIZES.index_dim, index.stride)
    if pid < requests:
        start = tl.load(plan.query_start + pid)
        end = tl.load(plan.query_start + pid + 1)
        first_here = tl.load(plan.seq_lens + pid) - (end - start)
        end = tl.minimum(end, rows)
        base = tl.maximum(start, end - GROUPS.capacity)
        # under way while the group is pooled
        ahead = ring_rows(keys, ring, positions, axis_stride, plan, base, end, GROUPS)
        store_open_group(
            keys,
            ring,
            table,
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
        commit_ring(ring, ahead, GROUPS)
        for more in range(base + 2, end, 2):
            others = ring_rows(keys, ring, positions, axis_stride, plan, more, end, GROUPS)
            commit_ring(ring, others, GROUPS)
    else:
        QUERIES: tl.constexpr = TILES.query_heads
        KEYS: tl.constexpr = TILES.kv_heads
        INDEX: tl.constexpr = TILES.index_heads
        KV_HEADS: tl.constexpr = SIZES.kv_heads
        INDEX_HEADS: tl.constexpr = SIZES.index_heads
        PARTS: tl.constexpr = tl.cdiv(SIZES.heads, QUERIES) + 2
        row = ((pid - requests) // PARTS).to(tl.int64)
        part = (pid - requests) % PARTS
        real = tl.load(plan.request_ids + row) >= 0
        at = step_position(positions, axis_stride, row, real)
        if part > 1:
            first = (part - 2) * QUERIES
            queries_gates(
                qkv,
                table,
                weights,
                query_out,
                gate_out,
                row,
                at,
                first,
                QUERIES,
                SIZES,
                STEP_ROPE,
            )
        elif part == 1:
            for head in tl.static_range(0, KV_HEADS, KEYS):
                keys_values(
                    qkv, table, weights, plan, main, scales, row, at, head, KEYS, SIZES, STEP_ROPE
                )
        else:
            closes, group, cache_slot = closed_group(plan, compressed, row, requests, GROUPS)
            for head in tl.static_range(0, INDEX_HEADS, INDEX):
                index_queries(
                    index, table, weights, index_out, row, at, head, INDEX, SIZES, STEP_ROPE
                )
            if closes:
                store_closed_group(
                    keys,
                    ring,
                    positions,
                    axis_stride,
                    table,
                    weights,
                    compressed,
                    group,
                    cache_slot,
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
    rows, requests = qkv.shape[0], plan.seq_lens.shape[0]
    sizes, turn, groups, chosen = _constants(
        out.query.shape[1:],
        out.index_query.shape[1:],
        caches.main.shape[1:3],
        caches.ring.shape[1::2],
        qkv.dtype,
        caches.main.dtype,
        caches.compressed.dtype,
        plan.compress_ratio,
        _scale_kind(k_scale),
        _scale_kind(v_scale),
        rope.rotary_dim,
        rope.neox_style,
        rope.mrope_section,
        rope.mrope_interleaved,
        _rounds_pairs(qkv),
    )
    tiles = tiles or chosen
    axis_stride = positions.stride(2)
    parts = -(-sizes.heads // tiles.query_heads) + 2
    device = device_target(qkv.device)
    early = _early_launch(device)
    _prepare_kernel[(requests + rows * parts,)](
        *_operands(qkv, index_qk, positions, rope, norms, caches, plan, out),
        Scales(k_scale, v_scale),
        axis_stride,
        rows,
        requests,
        SIZES=sizes,
        ROPE=turn,
        # positions [T] and [1, T] were expanded: one axis then stands for all three
        STEP_ROPE=turn if axis_stride else turn._replace(axes="one"),
        GROUPS=groups,
        TILES=tiles,
        PDL=early,
        num_warps=tiles.num_warps,
        **_launch_options(device, qkv.element_size(), early),
    )


def _early_launch(target: Target) -> bool:
    """Whether its launch may overlap its predecessor's end (programmatic dependent launch)."""
    return target.backend == "cuda" and target.capability >= (9, 0) and not interpreting()


def _launch_options(target: Target, itemsize: int, early: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    if target.backend == "cuda" and itemsize == 2:
        # As many one-warp programs as a processor takes; those of requests want more registers,
        # but they are few.
        options["maxnreg"] = 64
    return options


def _rounds_pairs(x: torch.Tensor) -> bool:
    """Whether the device, and not an interpreter, rounds two numbers to x's 16 bits at once."""
    if x.element_size() != 2 or interpreting():
        return False
    return device_target(x.device).capability >= (8, 0)


@functools.lru_cache(maxsize=64)
def _constants(
    query_shape: torch.Size,
    index_shape: torch.Size,
    main_shape: torch.Size,
    ring_shape: torch.Size,
    dtype: torch.dtype,
    main_dtype: torch.dtype,
    index_dtype: torch.dtype,
    ratio: int,
    k_scale: str,
    v_scale: str,
    rotary_dim: int,
    neox: bool,
    section: tuple[int, int, int] | None,
    interleaved: bool,
    packed: bool,
) -> tuple[Sizes, Rope, Groups, Tiles]:
    """What a layer's launches have in common, remembered: it costs the host more than a launch."""
    (heads, dim), (index_heads, index_dim) = query_shape, index_shape
    (kv_heads, page), (capacity, width) = main_shape, ring_shape
    block = triton.next_power_of_2(dim)
    index_block = max(4, triton.next_power_of_2(index_dim))  # covers a ring key's alignment gap
    has_positions = stores_positions(width, index_dim, dtype)
    position_at = position_offset(index_dim, dtype) if has_positions else index_dim
    half = rotary_dim // 2
    pairs = triton.next_power_of_2(half)
    axes = "one" if section is None else "interleaved" if interleaved else "runs"
    sizes = Sizes(
        heads,
        kv_heads,
        index_heads,
        dim,
        block,
        index_dim,
        index_block,
        page,
        page // ratio,
        is_fp8(main_dtype),
        is_fp8(index_dtype),
        k_scale,
        v_scale,
    )
    return (
        sizes,
        Rope(half, pairs, neox, axes, *(section or (0, 0, 0)), packed),
        Groups(ratio, capacity, index_dim, index_block, position_at, has_positions),
        choose_tiles(heads, kv_heads, index_heads, block, index_block),
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
    table = rope.cos_sin
    (pages, _, page, _), (key_pages, page_groups, _, _) = main.shape, compressed.shape
    page_stride, head_stride, row_stride, _ = main.stride()
    key_page_stride, key_stride = compressed.stride()[:2]
    return (
        Heads(qkv, qkv.stride(0)),
        Heads(index_qk, index_qk.stride(0)),
        Positions(positions, positions.stride(0)),
        Table(table, table.stride(0), table.shape[0]),
        Weights(*norms),
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
        Cells(main, page_stride, row_stride, head_stride, pages * page),
        Cells(compressed, key_page_stride, key_stride, 0, key_pages * page_groups),
        Ring(ring, *ring.stride()[:2], ring.shape[0]),
        Output(out.query, *out.query.stride()[:2]),
        Output(out.gate, *out.gate.stride()[:2]),
        Output(index_query, *index_query.stride()[:2]),
    )
