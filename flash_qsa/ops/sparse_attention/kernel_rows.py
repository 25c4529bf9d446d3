"""The per-row schedule: one program attends for one row, one KV head and one split of the blocks.

A row's cells are its selected blocks, then its open group. A cell is WIDTH consecutive tokens of
one page: a whole block, or a single token where blocks may straddle pages. Keys and values of a
tile of cells are gathered and shared by the G query heads of the KV head, padded to 16 rows for the
matrix units. The loop is bounded by the last valid id of the split; holes before it are masked.

With one split the program writes the gated output; otherwise FP32 partials for `kernel_merge`.
Reads K and V of each attended token once a row: 2 · D elements a token and KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.sparse_attention.primitives import (
    LOG2E,
    LOWEST,
    as_compute,
    online_update,
    product,
    read_scale,
    store_result,
)


@triton.jit
def last_valid(ids_ptr, start, stop, limit, CHUNK: tl.constexpr):
    """How many ids from `start` on reach up to the last one in 0 … limit - 1, before `stop`."""
    count = 0
    for chunk in range(start, stop, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, mask=at < stop, other=-1)
        reach = tl.where((ids >= 0) & (ids < limit), at + 1 - start, 0)
        count = tl.maximum(count, tl.max(reach, 0))
    return count


@triton.jit
def _attend_row(
    q,
    k_ptr,
    v_ptr,
    ids_ptr,
    page_row_ptr,
    stride_k_p,
    stride_k_s,
    stride_v_p,
    stride_v_s,
    first_id,
    last_id,
    num_columns,
    num_pages,
    position,
    tail_start,
    base,
    log2_scale,
    takes_tail,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FP8_BYTES: tl.constexpr,
):
    """Unnormalised output, sum and peak of ids first_id … last_id - 1 and, maybe, the tail."""
    CELLS: tl.constexpr = BLOCK_N // WIDTH
    PER_BLOCK: tl.constexpr = RATIO // WIDTH
    offs_w = tl.arange(0, WIDTH)
    offs_d = tl.arange(0, BLOCK_D)

    limit = tl.minimum(tail_start, position + 1) // RATIO
    id_cells = last_valid(ids_ptr, first_id, last_id, limit, CHUNK) * PER_BLOCK
    tail_cell = tail_start // WIDTH
    tail_cells = tl.maximum(tl.cdiv(position + 1, WIDTH) - tail_cell, 0) * takes_tail
    num_cells = id_cells + tail_cells

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    for start in range(0, num_cells, CELLS):
        cells = start + tl.arange(0, CELLS)
        in_tail = cells >= id_cells
        ids = tl.load(ids_ptr + first_id + cells // PER_BLOCK, mask=cells < id_cells, other=-1)
        chosen = (ids >= 0) & (ids < limit)
        token = tl.where(
            in_tail,
            (tail_cell + cells - id_cells) * WIDTH,
            ids * RATIO + cells % PER_BLOCK * WIDTH,
        )
        present = tl.where(in_tail, cells < num_cells, chosen)
        place = token + base
        column = place // PAGE
        inside = present & (place >= 0) & (column < num_columns)
        page = tl.load(page_row_ptr + column, mask=inside, other=-1)
        found = (page >= 0) & (page < num_pages)
        page = tl.where(found, page, 0).to(tl.int64)
        offset = tl.where(found, place - column * PAGE, 0)

        # Masks [CELLS, WIDTH]: a tail cell may begin before the tail and end behind the row.
        tokens = token[:, None] + offs_w[None, :]
        lowest = tl.where(in_tail, tail_start, 0)
        keep = found[:, None] & (tokens >= lowest[:, None]) & (tokens <= position)
        if DIM == BLOCK_D:
            keep_d = keep[:, :, None]
        else:
            keep_d = keep[:, :, None] & (offs_d < DIM)[None, None, :]
        step = offs_w[None, :, None]
        # [CELLS, WIDTH, BLOCK_D]
        k_at = (page * stride_k_p + offset * stride_k_s)[:, None, None] + step * stride_k_s
        k = tl.load(k_ptr + k_at + offs_d[None, None, :], mask=keep_d, other=0)
        v_at = (page * stride_v_p + offset * stride_v_s)[:, None, None] + step * stride_v_s
        v = tl.load(v_ptr + v_at + offs_d[None, None, :], mask=keep_d, other=0)
        k = as_compute(tl.reshape(k, [BLOCK_N, BLOCK_D]), COMPUTE, FP8_BYTES)
        v = as_compute(tl.reshape(v, [BLOCK_N, BLOCK_D]), COMPUTE, FP8_BYTES)
        scores = product(q, tl.trans(k), COMPUTE) * log2_scale
        scores = tl.where(tl.reshape(keep, [BLOCK_N])[None, :], scores, float("-inf"))
        acc, total, peak = online_update(acc, total, peak, scores, v, COMPUTE, ACTIVATION)
    return acc, total, peak


@triton.jit
def rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    ids_ptr,
    positions_ptr,
    table_ptr,
    requests_ptr,
    tail_ptr,
    base_ptr,
    gate_ptr,
    k_scale_ptr,
    v_scale_ptr,
    shared_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    stats_ptr,
    stride_q_t,
    stride_q_h,
    stride_k_p,
    stride_k_h,
    stride_k_s,
    stride_v_p,
    stride_v_h,
    stride_v_s,
    stride_ids_t,
    stride_table_r,
    stride_gate_t,
    stride_gate_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    first_row,
    end_row,
    num_ids,
    ids_per_split,
    num_requests,
    num_columns,
    num_pages,
    scale,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    FP8_BYTES: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    SKIP_SHARED: tl.constexpr,
):
    """Grid [ceil(rows / ROWS), Hkv, SPLITS]. With SKIP_SHARED, rows of a tile whose shared_ptr
    entry is not zero were attended by the row-union schedule already."""
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    ACTIVATION: tl.constexpr = q_ptr.dtype.element_ty
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + offs_m
    mask_m = offs_m < GROUP
    mask_d = offs_d < DIM

    log2_scale = scale * LOG2E
    if K_SCALE > 0:
        log2_scale = log2_scale * read_scale(k_scale_ptr, K_SCALE == 2)

    begin = first_row + tl.program_id(0) * ROWS
    end = tl.minimum(begin + ROWS, end_row)
    if SKIP_SHARED:
        end = tl.where(tl.load(shared_ptr + tl.program_id(0)) != 0, begin, end)
    for row32 in range(begin, end):
        row = tl.cast(row32, tl.int64)
        position = tl.load(positions_ptr + row).to(tl.int32)
        request = tl.load(requests_ptr + row).to(tl.int64)
        if HAS_TAIL:
            tail_start = tl.maximum(tl.load(tail_ptr + row).to(tl.int32), 0)
        else:
            tail_start = (position + 1) // RATIO * RATIO
        base = 0
        if HAS_BASE:
            base = tl.load(base_ptr + row).to(tl.int32)
        # An unknown row attends nothing: no ids, and no token at or before position -1.
        known = (request >= 0) & (request < num_requests) & (position >= 0)
        request = tl.where(known, request, 0)
        position = tl.where(known, position, -1)
        tail_start = tl.where(known, tail_start, 0)

        q_at = row * stride_q_t + heads[:, None] * stride_q_h + offs_d[None, :]
        q = tl.load(q_ptr + q_at, mask=mask_m[:, None] & mask_d[None, :], other=0.0).to(COMPUTE)
        first_id = split * ids_per_split
        acc, total, peak = _attend_row(
            q,
            k_ptr + kv_head * stride_k_h,
            v_ptr + kv_head * stride_v_h,
            ids_ptr + row * stride_ids_t,
            table_ptr + request * stride_table_r,
            stride_k_p,
            stride_k_s,
            stride_v_p,
            stride_v_s,
            first_id,
            tl.minimum(first_id + ids_per_split, num_ids),
            num_columns,
            num_pages,
            position,
            tail_start,
            base,
            log2_scale,
            tl.where(split == SPLITS - 1, 1, 0),
            RATIO,
            WIDTH,
            PAGE,
            DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            CHUNK,
            COMPUTE,
            ACTIVATION,
            FP8_BYTES,
        )
        if V_SCALE > 0:
            acc = acc * read_scale(v_scale_ptr, V_SCALE == 2)
        if SPLITS == 1:
            out_at = row * stride_out_t + heads[:, None] * stride_out_h + offs_d[None, :]
            gate_at = row * stride_gate_t + heads[:, None] * stride_gate_h + offs_d[None, :]
            store_result(
                acc,
                total,
                peak,
                out_ptr + out_at,
                lse_ptr + row * stride_lse_t + heads * stride_lse_h,
                gate_ptr + gate_at,
                mask_m,
                mask_d,
                HAS_LSE,
                HAS_GATE,
            )
        else:
            num_heads = tl.num_programs(1) * GROUP
            cell = ((row - first_row) * num_heads + heads) * SPLITS + split
            tl.store(
                acc_ptr + cell[:, None] * DIM + offs_d[None, :],
                acc,
                mask=mask_m[:, None] & mask_d[None, :],
            )
            tl.store(stats_ptr + cell * 2, peak, mask=mask_m)
            tl.store(stats_ptr + cell * 2 + 1, total, mask=mask_m)
