"""The prefill scorer: many rows of a request against its keys, gathered into contiguous memory.

`gather_kernel` copies the compressed keys of each request once, so that the product loads whole
tiles without a page lookup; a missing page becomes NaN keys, whose scores are NaN.

`dense_score_kernel` takes ROWS rows × all heads as columns (256 of them where they fit) and walks
64 keys at a time. Keys of two neighbouring tiles are interleaved such that, in the matrix units'
accumulator layouts, a thread ends up with four neighbouring keys of a row: it writes them with one
16-byte store, and the maximum of a group of four costs nothing. `PTX` writes from that layout
directly; a plain store would first exchange the tile through shared memory.

Scores are bit for bit those of `kernel_score`: same products, same head tree. A negative word means
NaN. Behind a row's visible blocks the words mean nothing; group maxima leave those keys out. Rows
that are not scored write to the spare row behind the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.direct import direct
from flash_qsa.ops.select_blocks.kernel_score import HIDDEN, hide, operand, sum_heads


@direct
@triton.jit(
    do_not_specialize=[
        "request_begin",
        "width",
        "num_pages",
        "table_pages",
        "tiles",
        "page_blocks",
    ]
)
def gather_kernel(
    cache_ptr,
    page_table_ptr,
    lengths_ptr,
    keys_ptr,
    stride_k_page,
    stride_k_block,
    stride_table,
    stride_keys,
    request_begin,
    width,
    num_pages,
    table_pages,
    tiles,
    page_blocks,
    RATIO: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    E4M3: tl.constexpr,
):
    """keys[request, block] = cache[page of block], FP8 as FP16. PAGE_BLOCKS: keys of a page, or 0
    where page_blocks says it at run time."""
    size = PAGE_BLOCKS if PAGE_BLOCKS > 0 else page_blocks
    which = (tl.program_id(0) // tiles).to(tl.int64)
    request = request_begin + which
    count = width
    if HAS_LENGTHS:
        count = tl.minimum(count, tl.load(lengths_ptr + request) // RATIO)
    offs_n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, DIM_PAD)
    logical = offs_n // size
    page = tl.load(
        page_table_ptr + request * stride_table + logical,
        mask=(offs_n < count) & (logical < table_pages),
        other=-1,
    )
    present = (page >= 0) & (page < num_pages)
    offsets = (offs_n % size).to(tl.int64) * stride_k_block
    cells = page.to(tl.int64) * stride_k_page + offsets
    # [BLOCK_N, DIM_PAD]
    keys = tl.load(
        cache_ptr + cells[:, None] + offs_d[None, :],
        mask=present[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    keys = operand(keys, E4M3, False)
    keys = tl.where(present[:, None], keys, float("nan")).to(keys_ptr.dtype.element_ty)
    tl.store(
        keys_ptr + which * stride_keys + offs_n[:, None].to(tl.int64) * DIM_PAD + offs_d[None, :],
        keys,
        mask=(offs_n < count)[:, None],
    )


@triton.jit
def _store_four(pointers, a, b, c, d, PTX: tl.constexpr):
    """Four int32 to consecutive words at 16-byte aligned pointers."""
    if PTX:
        tl.inline_asm_elementwise(
            "st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
            "=r,l,r,r,r,r",
            [pointers.to(tl.int64), a, b, c, d],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, a)
        tl.store(pointers + 1, b)
        tl.store(pointers + 2, c)
        tl.store(pointers + 3, d)


@triton.jit
def _store_one(pointers, values, PTX: tl.constexpr):
    if PTX:
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [pointers.to(tl.int64), values],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, values)


@triton.jit
def _halves(x, ROWS: tl.constexpr):
    """[64, ROWS] → accumulator rows 0–7 and 8–15 of every 16, [32, ROWS] each."""
    parts = tl.reshape(x, (4, 2, 8, ROWS))
    which = tl.arange(0, 2)[None, :, None, None]
    low = tl.max(tl.where(which == 0, parts, HIDDEN), 1)
    high = tl.max(tl.where(which == 1, parts, HIDDEN), 1)
    return tl.reshape(low, (32, ROWS)), tl.reshape(high, (32, ROWS))


@direct
@triton.jit(
    do_not_specialize=[
        "row_begin",
        "row_end",
        "spare_row",
        "width",
        "request_begin",
        "num_requests",
        "splits",
    ]
)
def dense_score_kernel(
    query_ptr,
    keys_ptr,
    request_ids_ptr,
    visible_ptr,
    first_ptr,
    scores_ptr,
    maxima_ptr,
    stride_q_t,
    stride_q_h,
    stride_keys,
    stride_scores,
    stride_maxima,
    row_begin,
    row_end,
    spare_row,
    width,
    request_begin,
    num_requests,
    splits,
    pairs,
    TOP_K: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    E4M3: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(0) % splits
    tile_row = (tl.program_id(0) // splits) * ROWS

    offs_r = tl.arange(0, ROWS)
    rows = row_begin + tile_row + offs_r
    row_ok = rows < row_end
    requests = tl.load(request_ids_ptr + rows, mask=row_ok, other=-1)
    visible = tl.minimum(tl.load(visible_ptr + rows, mask=row_ok, other=0), width)
    first = tl.zeros_like(visible)
    if HAS_FIRST:
        first = tl.maximum(tl.load(first_ptr + rows, mask=row_ok, other=0), 0)
    known = (requests >= request_begin) & (requests < num_requests)
    limit = tl.where(known & (visible - first > TOP_K), visible, 0)

    columns = tl.arange(0, ROWS * HEADS_PAD)
    column_row = columns // (4 * HEADS_PAD) * 4 + columns // 2 % 4
    column_head = columns // 8 % (HEADS_PAD // 2) * 2 + columns % 2
    query_rows = (row_begin + tile_row + column_row).to(tl.int64)
    offs_d = tl.arange(0, DIM_PAD)
    # [ROWS · HEADS_PAD, DIM_PAD]
    queries = tl.load(
        query_ptr
        + (query_rows * stride_q_t + column_head.to(tl.int64) * stride_q_h)[:, None]
        + offs_d[None, :],
        mask=((query_rows < row_end) & (column_head < HEADS))[:, None]
        & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    queries = tl.trans(operand(queries, E4M3, False))

    offs_m = tl.arange(0, 64)
    quads = tl.arange(0, 32)
    # accumulator row m of the even tile holds key 4 · quad + (m / 8) % 2, of the odd tile 2 more
    key_of_row = 4 * (offs_m // 16 * 8 + offs_m % 8) + offs_m // 8 % 2
    key_tile = key_of_row[:, None] * DIM_PAD + offs_d[None, :]

    left = tl.max(limit, 0)
    while left > 0:
        request = tl.max(tl.where(limit > 0, requests, -1), 0)
        mine = (requests == request) & (limit > 0)
        top = tl.where(mine, limit, 0)
        bottom = tl.where(mine, first, width)
        last = tl.max(top, 0)
        # pairs of tiles in which some key is hidden from some row of this request
        ragged_from = tl.min(tl.where(mine, top, width), 0) // 128
        ragged_to = (tl.max(tl.where(mine, first, 0), 0) + 127) // 128
        keys_row = keys_ptr + (request - request_begin).to(tl.int64) * stride_keys
        # int32 is enough inside the workspace, which holds fewer than 2^31 words
        target = tl.where(mine, tile_row + offs_r, spare_row)
        score_row = (target * stride_scores)[None, :] + 4 * quads[:, None]
        maxima_row = target * stride_maxima
        begin = tl.min(bottom, 0) // 128 + split * pairs
        end = tl.minimum(begin + pairs, (last + 127) // 128)
        even_low = tl.zeros((32, ROWS), tl.int32)
        even_high = tl.zeros((32, ROWS), tl.int32)
        for tile in tl.range(2 * begin, 2 * end, num_stages=STAGES):
            pair = tile // 2
            keys = tl.load(keys_row + (pair * 128 + tile % 2 * 2) * DIM_PAD + key_tile)
            dots = tl.dot(keys, queries, input_precision="ieee")
            scores = tl.maximum(sum_heads(dots, 64, ROWS, HEADS_PAD), -1.0)
            low, high = _halves(scores.to(tl.int32, bitcast=True), ROWS)
            if tile % 2 == 1:
                _store_four(
                    scores_ptr + (score_row + pair * 128), even_low, even_high, low, high, PTX
                )
                if GROUP > 1:
                    if (pair >= ragged_from) | (pair < ragged_to):
                        keys_n = pair * 128 + 4 * quads[:, None]
                        even_low = hide(even_low, keys_n, top, first, HAS_FIRST)
                        even_high = hide(even_high, keys_n + 1, top, first, HAS_FIRST)
                        low = hide(low, keys_n + 2, top, first, HAS_FIRST)
                        high = hide(high, keys_n + 3, top, first, HAS_FIRST)
                    largest = tl.maximum(tl.maximum(even_low, even_high), tl.maximum(low, high))
                    groups: tl.constexpr = 128 // GROUP
                    if GROUP > 4:
                        largest = tl.max(tl.reshape(largest, (groups, GROUP // 4, ROWS)), 1)
                    offs_g = pair * groups + tl.arange(0, groups)
                    _store_one(maxima_ptr + (maxima_row[None, :] + offs_g[:, None]), largest, PTX)
            even_low = low
            even_high = high
        limit = tl.where(mine, 0, limit)
        left = tl.max(limit, 0)
