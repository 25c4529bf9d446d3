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

from typing import Any

import torch
import triton
import triton.language as tl

from flash_qsa.ops.device import Heads, step_position
from flash_qsa.ops.direct import direct, launches_early
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.prepare.kernel_groups import (
    RING_ROWS,
    closed_group,
    commit_ring,
    ring_rows,
    store_closed_group,
    store_open_group,
)
from flash_qsa.ops.prepare.kernel_heads import index_queries, keys_values, queries_gates
from flash_qsa.ops.prepare.operands import Scales, constants, operands, rounds_pairs, scale_kind
from flash_qsa.ops.prepare.tiles import Tiles
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import Target, device_target


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
        for more in range(base + RING_ROWS, end, RING_ROWS):
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
    sizes, turn, groups, chosen = constants(
        out.query.shape[1:],
        out.index_query.shape[1:],
        caches.main.shape[1:3],
        caches.ring.shape[1::2],
        qkv.dtype,
        caches.main.dtype,
        caches.compressed.dtype,
        plan.compress_ratio,
        scale_kind(k_scale),
        scale_kind(v_scale),
        rope.rotary_dim,
        rope.neox_style,
        rope.mrope_section,
        rope.mrope_interleaved,
        rounds_pairs(qkv),
    )
    tiles = tiles or chosen
    axis_stride = positions.stride(2)
    parts = -(-sizes.heads // tiles.query_heads) + 2
    device = device_target(qkv.device)
    early = launches_early(device)
    _prepare_kernel[(requests + rows * parts,)](
        *operands(qkv, index_qk, positions, rope, norms, caches, plan, out),
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


def _launch_options(target: Target, itemsize: int, early: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    if target.backend == "cuda" and itemsize == 2:
        # As many one-warp programs as a processor takes; those of requests want more registers,
        # but they are few.
        options["maxnreg"] = 64
    return options
