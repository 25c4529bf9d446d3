"""The per-row schedule: one program attends for one row, one KV head and one split of the blocks.

A program first lists the cells of its ids: a cell is WIDTH consecutive tokens of one page, a whole
block or a single token where blocks may straddle pages; ids that are holes, not visible or without
a page are left out, and the open group's cells follow in the last split. Then it attends the cells'
tokens as one sequence. Keys and values of BLOCK_N tokens are gathered at a time and shared by the G
query heads of the KV head, padded to 16 rows for the matrix units. No load needs a mask, because a
list names readable cells only.

The list has room for the last ROOM tokens of an open part that the caller makes longer. What comes
before them, or all of it where its start is none of a cell, is attended ahead of the list.

With one split the program writes the gated output; otherwise FP32 partials for `kernel_merge`.
Reads K and V of each attended token once a row: 2 · D elements a token and KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.direct import direct
from flash_qsa.ops.sparse_attention.kernel_list import find_tokens, list_cells
from flash_qsa.ops.sparse_attention.kernel_rows_step import attend_step
from flash_qsa.ops.sparse_attention.primitives import (
    HEADROOM,
    LOG2E,
    LOWEST,
    fit_query,
    read_scale,
    store_result,
)


@direct
@triton.jit(
    do_not_specialize=[
        "first_row",
        "end_row",
        "rows_per_program",
        "num_requests",
        "num_columns",
        "num_pages",
        "page_size",
    ]
)
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
    lists_ptr,
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
    rows_per_program,
    num_ids,
    ids_per_split,
    list_size,
    num_requests,
    num_columns,
    num_pages,
    scale,
    page_size,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    MANY: tl.constexpr,
    SPLIT: tl.constexpr,
    SAME: tl.constexpr,
    ALIGN: tl.constexpr,
    COMPUTE: tl.constexpr,
    NARROW: tl.constexpr,
    FP8_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    ROOM: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [ceil(rows / rows_per_program), Hkv, splits]. MANY: more than one row a program; SPLIT:
    more than one split. With SHARED_ROWS, tiles of so many rows (a multiple of rows_per_program)
    whose shared_ptr entry is not zero were attended by the row-union schedule already.

    lists: int32 or int64 scratch, list_size cells a program; twice that unless K and V share
    offsets (SAME). Offsets are in units of ALIGN elements, which divides every stride. PAGE: tokens
    of a page, or 0 where page_size says it at run time.

    NARROW: BF16 activations meet an FP8 cache in FP16, see `fit_query`. WORDS: FP8 values are read
    as int32, four channels each, whose accumulators stay apart: a matrix operand of single bytes
    would be loaded byte by byte.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        if SPLIT:
            # The merge may be launched now; it waits for this grid's stores, as this one does here.
            tl.extra.cuda.gdc_launch_dependents()
    begin = first_row + tl.program_id(0) * rows_per_program
    # A chain of loads leads to the first key: it starts before all that can be computed meanwhile.
    position = tl.load(positions_ptr + begin).to(tl.int32)
    request = tl.load(requests_ptr + begin)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2) if SPLIT else 1
    size = PAGE if PAGE > 0 else page_size
    # what probabilities are rounded to
    PROBABILITY: tl.constexpr = COMPUTE if NARROW else q_ptr.dtype.element_ty
    MARGIN: tl.constexpr = HEADROOM if NARROW else 0.0
    SHIFT: tl.constexpr = WIDTH // 2 - WIDTH // 8  # log2, for 1, 2, 4 and 8
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + offs_m
    mask_m = offs_m < GROUP
    mask_d = offs_d < DIM
    # Channels behind D are read from the row's last ones and zeroed afterwards.
    read_d = offs_d if DIM == BLOCK_D else tl.minimum(offs_d, DIM - 1)

    log2_scale = scale * LOG2E
    if K_SCALE > 0:
        log2_scale = log2_scale * read_scale(k_scale_ptr, K_SCALE == 2)
    v_scale = 1.0
    if V_SCALE > 0:
        v_scale = read_scale(v_scale_ptr, V_SCALE == 2)
    k_head = k_ptr + kv_head * stride_k_h + read_d[None, :]
    v_head = v_ptr + kv_head * stride_v_h
    if not WORDS:
        v_head += read_d[None, :]
    program = (split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    program = program * tl.num_programs(0) + tl.program_id(0)
    k_list = lists_ptr + program * list_size * (1 if SAME else 2)
    v_list = k_list if SAME else k_list + list_size

    end = tl.minimum(begin + rows_per_program, end_row)
    if SHARED_ROWS > 0:
        tile = tl.program_id(0) * rows_per_program // SHARED_ROWS
        end = tl.where(tl.load(shared_ptr + tile) != 0, begin, end)
    for row32 in range(begin, end):
        row = tl.cast(row32, tl.int64)
        if MANY:
            position = tl.load(positions_ptr + row).to(tl.int32)
            request = tl.load(requests_ptr + row)
        if HAS_TAIL:
            tail_start = tl.maximum(tl.load(tail_ptr + row).to(tl.int32), 0)
        else:
            tail_start = (position + 1) // RATIO * RATIO
        base = 0
        if HAS_BASE:
            base = tl.load(base_ptr + row).to(tl.int32)
        # An unknown row attends nothing: no ids, and no token at or before position -1.
        known = (request >= 0) & (request < num_requests) & (position >= 0)
        position = tl.where(known, position, -1)
        tail_start = tl.where(known, tail_start, 0)
        page_row = table_ptr + tl.where(known, request, 0).to(tl.int64) * stride_table_r

        q_at = row * stride_q_t + heads[:, None] * stride_q_h + offs_d[None, :]
        q = tl.load(q_ptr + q_at, mask=mask_m[:, None] & mask_d[None, :], other=0.0)

        tail = tl.maximum(position + 1 - tail_start, 0)
        tail = tl.where(split == splits - 1, tail, 0)
        loose = 0
        if HAS_TAIL:
            loose = (tl.maximum(tail - ROOM, 0) + WIDTH - 1) // WIDTH * WIDTH
            loose = tl.where(tail_start % WIDTH == 0, loose, tail)
        tail_cells = (tail - loose + WIDTH - 1) // WIDTH
        # The last cell holds this row's own token, and perhaps unwritten ones behind it.
        unused = tail_cells * WIDTH - (tail - loose)
        _, _, listed = find_tokens(
            page_row, position + base, tail_cells > 0, num_columns, num_pages, size
        )
        first_id = split * ids_per_split
        if MANY:
            tl.debug_barrier()
        cells = list_cells(
            k_list,
            v_list,
            ids_ptr + row * stride_ids_t + first_id,
            page_row,
            stride_k_p,
            stride_k_s,
            stride_v_p,
            stride_v_s,
            tl.maximum(tl.minimum(first_id + ids_per_split, num_ids) - first_id, 0),
            tl.minimum(tail_start, position + 1) // RATIO,
            tail_start + loose,
            tail_cells,
            base,
            num_columns,
            num_pages,
            size,
            RATIO,
            WIDTH,
            CHUNK,
            SAME,
            ALIGN,
        )
        tl.debug_barrier()
        # Always true: the query is waited for here, and not before the list is begun.
        q, row_scale = fit_query(tl.where(cells >= 0, q, 0.0), log2_scale, COMPUTE, NARROW)

        if WORDS:
            quarter = tl.zeros([BLOCK_M, BLOCK_D // 4], tl.float32)
            acc = (quarter, quarter, quarter, quarter)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        # Sums stay apart by token lane until the end: no reduction in the loop.
        lanes = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        peak = tl.full([BLOCK_M], LOWEST, tl.float32)
        if HAS_TAIL:
            for start in tl.range(0, loose, BLOCK_N, num_stages=1):
                at = start + offs_n
                page, token, found = find_tokens(
                    page_row, tail_start + at + base, at < loose, num_columns, num_pages, size
                )
                k_at = page * stride_k_p + token * stride_k_s
                v_at = page * stride_v_p + token * stride_v_s
                acc, lanes, peak = attend_step(
                    q, k_head + k_at[:, None], v_head + v_at[:, None], found, acc, lanes, peak,
                    row_scale, DIM, BLOCK_D, COMPUTE, PROBABILITY, FP8_BYTES, WORDS, MARGIN, True,
                )  # fmt: skip
        total_tokens = cells * WIDTH - tl.where(listed, unused, 0)
        last_token = tl.maximum(total_tokens - 1, 0)
        for start in range(0, total_tokens, BLOCK_N):
            # Lanes behind the end read its last token again.
            at = tl.minimum(start + offs_n, last_token)
            k_cell = tl.load(k_list + (at >> SHIFT)).to(tl.int64) * ALIGN
            v_cell = k_cell if SAME else tl.load(v_list + (at >> SHIFT)).to(tl.int64) * ALIGN
            k_at = k_cell + (at & (WIDTH - 1)) * stride_k_s
            v_at = v_cell + (at & (WIDTH - 1)) * stride_v_s
            acc, lanes, peak = attend_step(
                q, k_head + k_at[:, None], v_head + v_at[:, None], start + offs_n < total_tokens,
                acc, lanes, peak, row_scale, DIM, BLOCK_D, COMPUTE, PROBABILITY, FP8_BYTES, WORDS,
                MARGIN, False,
            )  # fmt: skip

        total = tl.sum(lanes, 1)
        if MARGIN > 0:
            peak -= MARGIN
        if WORDS:
            acc = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
            acc = tl.reshape(acc, (BLOCK_M, BLOCK_D))
        if V_SCALE > 0:
            acc = acc * v_scale
        if not SPLIT:
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
            cell = ((row - first_row) * num_heads + heads) * splits + split
            tl.store(
                acc_ptr + cell[:, None] * DIM + offs_d[None, :],
                acc,
                mask=mask_m[:, None] & mask_d[None, :],
            )
            tl.store(stats_ptr + cell * 2, peak, mask=mask_m)
            tl.store(stats_ptr + cell * 2 + 1, total, mask=mask_m)
