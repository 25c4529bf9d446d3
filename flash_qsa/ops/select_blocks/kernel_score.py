"""The scorer: s(t, b) = Σ_h relu(q[t, h] · k[b]) for a range of rows, as ordered integers.

One program takes a tile of rows and every `splits`-th tile of 64 keys. Per row and key it writes
one int32: the bits of the FP32 score, which order as integers because ReLU sums are never negative,
or -1 for NaN and for a missing page. With groups it also writes each group's largest.

Every schedule computes a score in the same order: channels ascending inside the product, heads in
a balanced tree. So a score's bits depend on its row and its key alone.

Rows that see at most K blocks are skipped, and a program whose keys lie behind every row's visible
blocks does nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.device import e4m3_to_fp16
from flash_qsa.ops.direct import direct

HIDDEN = tl.constexpr(-(2**31))
"""Below every score, NaN included: not a candidate."""


@triton.jit
def sum_heads(dots, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """[KEYS, ROWS · HEADS] products → [KEYS, ROWS] sums of their ReLUs.

    Columns are ordered (row / 4, head / 2, row % 4, head % 2): in the matrix units' accumulator
    layouts a thread then holds all heads of a row, and no value is exchanged. The sum is a tree
    over head bits, from the lowest.
    """
    dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    part = tl.sum(tl.reshape(dots, (KEYS, ROWS // 4, HEADS // 2, 4, 2)), 4)
    if HEADS > 2:
        part = tl.sum(tl.reshape(part, (KEYS, ROWS // 4, HEADS // 4, 2, 4)), 3)
    if HEADS > 4:
        part = tl.sum(tl.reshape(part, (KEYS, ROWS // 4, HEADS // 8, 2, 4)), 3)
    if HEADS > 8:
        part = tl.sum(tl.reshape(part, (KEYS, ROWS // 4, HEADS // 16, 2, 4)), 3)
    if HEADS > 16:
        part = tl.sum(tl.reshape(part, (KEYS, ROWS // 4, HEADS // 32, 2, 4)), 3)
    return tl.reshape(part, (KEYS, ROWS))


@triton.jit
def ordered(scores):
    """FP32 scores → int32 keys: -0.0 equals 0.0, NaN becomes -1."""
    bits = scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > 0x7F800000, -1, bits)


@triton.jit
def operand(values, E4M3: tl.constexpr, WIDEN: tl.constexpr):
    """Operands of the product. E4M3: 0 for other types, 1 typed, 2 as bytes.

    FP8 becomes FP16, which holds every e4m3 number: Hopper's FP8 matrix units keep about 14 bits
    of a sum, FP16 ones all of FP32's.
    """
    if E4M3 == 2:
        exact = e4m3_to_fp16(values)
    elif E4M3 == 1:
        exact = values.to(tl.float16)
    else:
        exact = values
    if WIDEN:
        exact = exact.to(tl.float32)
    return exact


STORE = tl.constexpr(
    "{ .reg .pred %p; setp.ne.s32 %p, $3, 0; @%p st.global.b32 [$1], $2; mov.u32 $0, 0; }"
)
STORE_AND_KEEP = tl.constexpr(
    "{ .reg .pred %p; .reg .b64 %keep; setp.ne.s32 %p, $3, 0;"
    " createpolicy.fractional.L2::evict_last.b64 %keep, 1.0;"
    " @%p st.global.L2::cache_hint.b32 [$1], $2, %keep; mov.u32 $0, 0; }"
)


@triton.jit
def scatter(pointers, values, wanted, PTX: tl.constexpr, KEEP: tl.constexpr = False):
    """Stores int32 values where `wanted` is not 0. PTX stores from the layout that values have;
    a plain store would first exchange them through shared memory. KEEP: the device's last cache
    should hold them against what streams through it."""
    if PTX:
        tl.inline_asm_elementwise(
            STORE_AND_KEEP if KEEP else STORE,
            "=r,l,r,r",
            [pointers.to(tl.int64), values, wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, values, mask=wanted > 0)


@triton.jit
def hide(keys, ids, top, first, HAS_FIRST: tl.constexpr):
    """HIDDEN where a row (column) may not see a key. One comparison at a time keeps the layout."""
    keys = tl.where(ids < top[None, :], keys, HIDDEN)
    if HAS_FIRST:
        keys = tl.where(ids >= first[None, :], keys, HIDDEN)
    return keys


@triton.jit
def _pages(page_row, offs_run, limit, page_blocks):
    """Physical page of each run of keys; -1 where it lies behind the last visible key or behind the
    table."""
    logical = offs_run // page_blocks
    return tl.load(page_row + logical, mask=offs_run < limit, other=-1)


@triton.jit
def _spread(runs, inside):
    """[runs] values, one for each key of a run: [runs · keys of a run]."""
    return tl.reshape(runs[:, None] + inside[None, :], (runs.shape[0] * inside.shape[0],))


@triton.jit
def _queries(query_ptr, columns_at, column_ok, offs_d, HEAD_DIM, E4M3, WIDEN):
    """[BLOCK_D, columns] operand."""
    # [columns, BLOCK_D]
    values = tl.load(
        query_ptr + columns_at[:, None] + offs_d[None, :],
        mask=column_ok[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    return tl.trans(operand(values, E4M3, WIDEN))


@direct
@triton.jit(
    do_not_specialize=[
        "row_begin",
        "row_end",
        "width",
        "num_requests",
        "num_pages",
        "table_pages",
        "splits",
        "page_blocks",
    ]
)
def score_kernel(
    query_ptr,
    cache_ptr,
    page_table_ptr,
    request_ids_ptr,
    visible_ptr,
    first_ptr,
    scores_ptr,
    maxima_ptr,
    stride_q_t,
    stride_q_h,
    stride_k_page,
    stride_k_block,
    stride_table,
    stride_scores,
    stride_maxima,
    row_begin,
    row_end,
    width,
    num_requests,
    num_pages,
    table_pages,
    splits,
    page_blocks,
    TOP_K: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    E4M3: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
    KEEP: tl.constexpr,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Strides of the cache are in units of ALIGN elements; cells are counted in them, as CELL.
    PAGE_BLOCKS: keys of a page, or 0 where page_blocks says it at run time. RUN keys, a power of
    two that divides it and BLOCK_N, lie in one page, which is looked up once for them.
    """
    if PDL:
        # the selection may start; it waits for this grid's end before it reads scores
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    size = PAGE_BLOCKS if PAGE_BLOCKS > 0 else page_blocks
    split = tl.program_id(0) % splits
    tile_row = (tl.program_id(0) // splits).to(tl.int64) * ROWS

    offs_r = tl.arange(0, ROWS_PAD)
    rows = row_begin + tile_row + offs_r
    row_ok = (rows < row_end) & (offs_r < ROWS)
    requests = tl.load(request_ids_ptr + rows, mask=row_ok, other=-1)
    visible = tl.load(visible_ptr + rows, mask=row_ok, other=0)
    visible = tl.minimum(visible, width)
    first = tl.zeros_like(visible)
    if HAS_FIRST:
        first = tl.maximum(tl.load(first_ptr + rows, mask=row_ok, other=0), 0)
    known = (requests >= 0) & (requests < num_requests)
    # candidates of a row are first … limit - 1; limit 0 where nothing is to be scored
    limit = tl.where(known & (visible - first > TOP_K), visible, 0)

    columns = tl.arange(0, ROWS_PAD * HEADS_PAD)
    column_row = columns // (4 * HEADS_PAD) * 4 + columns // 2 % 4
    column_head = (columns // 8 % (HEADS_PAD // 2) * 2 + columns % 2).to(tl.int64)
    query_rows = row_begin + tile_row + column_row
    column_ok = (query_rows < row_end) & (column_row < ROWS) & (column_head < HEADS)
    columns_at = query_rows * stride_q_t + column_head * stride_q_h
    offs_d = tl.arange(0, BLOCK_D)
    queries = _queries(query_ptr, columns_at, column_ok, offs_d, HEAD_DIM, E4M3, WIDEN)
    offs_tile = tl.arange(0, BLOCK_N)
    offs_group = tl.arange(0, BLOCK_N // GROUP)
    offs_run = tl.arange(0, BLOCK_N // RUN) * RUN

    # rows of one request are scored together; a tile seldom has more than one
    left = tl.max(limit, 0)
    while left > 0:
        request = tl.max(tl.where(limit > 0, requests, -1), 0)
        mine = requests == request
        top = tl.where(mine, limit, 0)
        bottom = tl.where(top > 0, first, width)
        last = tl.max(top, 0)
        mapped = tl.minimum(last, table_pages * size)
        active = (top > 0).to(tl.int32)
        score_row = scores_ptr + (tile_row + offs_r) * stride_scores
        maxima_row = maxima_ptr + (tile_row + offs_r) * stride_maxima
        page_row = page_table_ptr + request.to(tl.int64) * stride_table
        begin = tl.min(bottom, 0) // BLOCK_N + split
        # the next tile's pages are looked up a step ahead, so that no load waits for another
        page = _pages(page_row, begin * BLOCK_N + offs_run, mapped, size)
        for tile in tl.range(begin, (last + BLOCK_N - 1) // BLOCK_N, splits, num_stages=STAGES):
            offs_n = tile * BLOCK_N + offs_tile
            run_at = tile * BLOCK_N + offs_run
            ahead = _pages(page_row, run_at + splits * BLOCK_N, mapped, size)
            there = tl.where((page >= 0) & (page < num_pages), 1, 0)
            present = _spread(there, tl.zeros([RUN], tl.int32)) > 0
            cells = page.to(CELL) * stride_k_page + run_at % size * stride_k_block
            cells = _spread(cells, tl.arange(0, RUN) * stride_k_block)
            # [BLOCK_N, 1]
            key_rows = (cache_ptr + cells.to(tl.int64) * ALIGN)[:, None]
            dots = tl.zeros((BLOCK_N, ROWS_PAD * HEADS_PAD), tl.float32)
            for start in tl.static_range(0, DIM_PAD, BLOCK_D):
                # [BLOCK_N, BLOCK_D]
                keys = tl.load(
                    key_rows + (start + offs_d)[None, :],
                    mask=present[:, None] & (start + offs_d < HEAD_DIM)[None, :],
                    other=0.0,
                )
                if start > 0:
                    queries = _queries(
                        query_ptr, columns_at, column_ok, start + offs_d, HEAD_DIM, E4M3, WIDEN
                    )
                elif BLOCK_D < DIM_PAD:
                    queries = _queries(
                        query_ptr, columns_at, column_ok, offs_d, HEAD_DIM, E4M3, WIDEN
                    )
                dots = tl.dot(operand(keys, E4M3, WIDEN), queries, dots, input_precision="ieee")
            scores = ordered(sum_heads(dots, BLOCK_N, ROWS_PAD, HEADS_PAD))
            scores = tl.where(present[:, None], scores, -1)
            scatter(score_row[None, :] + offs_n[:, None], scores, active[None, :], PTX, KEEP)
            if GROUP > 1:
                scores = hide(scores, offs_n[:, None], top, first, HAS_FIRST)
                largest = tl.max(tl.reshape(scores, (BLOCK_N // GROUP, GROUP, ROWS_PAD)), 1)
                offs_g = tile * (BLOCK_N // GROUP) + offs_group
                scatter(maxima_row[None, :] + offs_g[:, None], largest, active[None, :], PTX, KEEP)
            page = ahead
        limit = tl.where(mine, 0, limit)
        left = tl.max(limit, 0)
