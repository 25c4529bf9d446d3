"""The row-union schedule: one program attends for a tile of rows and one KV head.

ROWS consecutive rows of one request, G query heads each, fill BLOCK_M rows of the matrix units.
Every cell of the tile's list (see `kernel_build`) is loaded once for all of them; a mask says which
rows attend which token. Nothing is read that no row of the tile attends.

With FIXED, probabilities are relative to the largest score of the first tile of tokens instead of a
running maximum, which saves the rescaling. BF16 and FP32 probabilities keep their relative
precision at any magnitude; the largest is no longer 1, which rounds to itself, so they are divided
by the sum of the rounded ones: what a row attends almost alone it then returns exactly. (The
log-sum-exp is of the exact ones.) The answer is as good as with a running maximum while the sum
stays within 2^±60 (2^±30 where splits are merged). A tile where it does not, or where an answer is
not finite, is handed to the per-row schedule, which is launched next: `shared` becomes 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.direct import direct
from flash_qsa.ops.sparse_attention.primitives import (
    HEADROOM,
    LOG2E,
    LOWEST,
    as_compute,
    fit_query,
    product,
    read_scale,
    store_result,
)

SAFE_SUM = tl.constexpr(1.152921504606847e18)
"""2^60."""
SAFE_PARTIAL_SUM = tl.constexpr(1.073741824e9)
"""2^30."""


@triton.jit
def _load_cells(
    cache_ptr,
    cells,
    stride_p,
    stride_s,
    live,
    page_size,
    UNIT: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
    FP8_BYTES: tl.constexpr,
):
    """Keys or values of whole blocks, [BLOCK_N, DIM]; zeros where not `live` [CELLS, RATIO].

    Cells count UNIT elements, or tokens of pages where UNIT is 0.
    """
    if UNIT > 0:
        base = cells.to(tl.int64) * UNIT
    else:
        page = cells // page_size
        base = page.to(tl.int64) * stride_p + (cells - page * page_size) * stride_s
    step = tl.arange(0, RATIO)[None, :, None] * stride_s
    # [BLOCK_N / C, C, DIM]
    ptrs = cache_ptr + base[:, None, None] + step + tl.arange(0, DIM)[None, None, :]
    tile = tl.load(ptrs, mask=live[:, :, None], other=0.0)
    return as_compute(tl.reshape(tile, [BLOCK_N, DIM]), COMPUTE, FP8_BYTES)


@triton.jit
def _either(a, b):
    return a | b


@direct
@triton.jit(do_not_specialize=["first_row", "end_row", "page_size"])
def union_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cells_ptr,
    masks_ptr,
    counts_ptr,
    shared_ptr,
    gate_ptr,
    k_scale_ptr,
    v_scale_ptr,
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
    stride_gate_t,
    stride_gate_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    first_row,
    end_row,
    capacity,
    scale,
    page_size,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    FIXED: tl.constexpr,
    COMPUTE: tl.constexpr,
    NARROW: tl.constexpr,
    FP8_BYTES: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
):
    """Grid [tiles, Hkv, splits]; SPLIT: more than one split. DIM and RATIO are powers of two,
    BLOCK_N a multiple of RATIO. PAGE: tokens of a page, or 0 where page_size says it at run time.
    """
    tile = tl.program_id(0)
    if tl.load(shared_ptr + tile) == 0:
        return
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2) if SPLIT else 1
    size = PAGE if PAGE > 0 else page_size
    tl.static_assert(not (FIXED and NARROW), "FP16 probabilities need the running maximum")
    # what probabilities are rounded to
    PROBABILITY: tl.constexpr = COMPUTE if NARROW else q_ptr.dtype.element_ty
    MARGIN: tl.constexpr = HEADROOM if NARROW else 0.0
    CELLS: tl.constexpr = BLOCK_N // RATIO
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_c = tl.arange(0, CELLS)
    offs_d = tl.arange(0, DIM)
    tile_row = offs_m // GROUP
    rows = (first_row + tile * ROWS + tile_row).to(tl.int64)
    heads = kv_head * GROUP + offs_m % GROUP
    mask_m = (tile_row < ROWS) & (rows < end_row)
    mask_d = offs_d < DIM
    bits = 1 << tl.minimum(tile_row, 15)

    log2_scale = scale * LOG2E
    if K_SCALE > 0:
        log2_scale = log2_scale * read_scale(k_scale_ptr, K_SCALE == 2)
    q_at = rows[:, None] * stride_q_t + heads[:, None] * stride_q_h + offs_d[None, :]
    q = tl.load(q_ptr + q_at, mask=mask_m[:, None], other=0.0)
    q, row_scale = fit_query(q, log2_scale, COMPUTE, NARROW)

    cells_ptr += tile.to(tl.int64) * capacity
    masks_ptr += tile.to(tl.int64) * capacity * RATIO
    k_ptr += kv_head * stride_k_h
    v_ptr += kv_head * stride_v_h
    steps = tl.load(counts_ptr + tile) // CELLS
    per_split = tl.cdiv(steps, splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, steps)

    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    # Sums stay apart by token lane until the end: no shuffles in the loop.
    lanes = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    exact = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    offs_w = tl.arange(0, RATIO)[None, :]
    seen = tl.zeros([BLOCK_N], tl.int32)
    block_masks = masks_ptr + offs_c[:, None] * RATIO + offs_w
    if FIXED:
        # The first step's keys are read twice. Attending to it here, apart from the loop, would
        # make the compiler wait for each wgmma.
        some = tl.where(begin < end, BLOCK_N, 0)
        live = tl.load(
            block_masks + begin * BLOCK_N, mask=offs_c[:, None] * RATIO + offs_w < some, other=0
        )
        live = live != 0
        listed = tl.load(masks_ptr + begin * BLOCK_N + offs_n, mask=offs_n < some, other=0) != 0
        cells = tl.load(cells_ptr + begin * CELLS + offs_c)
        k = _load_cells(
            k_ptr, cells, stride_k_p, stride_k_s, live,
            size, UNIT, RATIO, BLOCK_N, DIM, COMPUTE, FP8_BYTES,
        )  # fmt: skip
        scores = product(q, tl.trans(k), COMPUTE) * row_scale[:, None]
        # A row without a token here still takes a real score for its reference.
        scores = tl.where(listed[None, :], scores, LOWEST)
        peak = tl.max(scores, 1)
    for step in range(begin, end):
        cells = tl.load(cells_ptr + step * CELLS + offs_c)
        live = tl.load(block_masks + step * BLOCK_N) != 0
        member = tl.load(masks_ptr + step * BLOCK_N + offs_n).to(tl.int32)
        k = _load_cells(
            k_ptr, cells, stride_k_p, stride_k_s, live,
            size, UNIT, RATIO, BLOCK_N, DIM, COMPUTE, FP8_BYTES,
        )  # fmt: skip
        v = _load_cells(
            v_ptr, cells, stride_v_p, stride_v_s, live,
            size, UNIT, RATIO, BLOCK_N, DIM, COMPUTE, FP8_BYTES,
        )  # fmt: skip
        scores = product(q, tl.trans(k), COMPUTE) * row_scale[:, None]
        keep = (member[None, :] & bits[:, None]) != 0
        if FIXED:
            weights = tl.where(keep, tl.exp2(scores - peak[:, None]), 0.0)
            rounded = weights
            if PROBABILITY.is_bf16():
                # Cut off instead, which keeps NaN: converting to BF16 and back is much slower.
                # Errors spread as much, and what is lost on average the sum has lost as well.
                rounded = weights.to(tl.int32, bitcast=True) & -0x10000
                rounded = rounded.to(tl.float32, bitcast=True)
            elif PROBABILITY.is_fp16():
                rounded = weights.to(tl.float16).to(tl.float32)
            lanes += rounded
            if HAS_LSE:
                exact += tl.sum(weights, 1)
            seen |= member
        else:
            scores = tl.where(keep, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            reference = new_peak - MARGIN if MARGIN > 0 else new_peak
            weights = tl.exp2(scores - reference[:, None])
            rounded = weights
            shrink = tl.exp2(peak - new_peak)[:, None]
            lanes = lanes * shrink + weights
            acc = acc * shrink
            peak = new_peak
        acc += product(rounded.to(PROBABILITY).to(COMPUTE), v, COMPUTE)

    total = tl.sum(lanes, 1)
    if MARGIN > 0:
        peak -= MARGIN
    # A value that is not finite, of a token that some row attends, reaches all rows of a product.
    unsafe = tl.sum(acc - acc, 1) != 0
    if FIXED:
        # Partials of peaks 2^126 apart lose one another: narrower bounds keep that harmless.
        LIMIT: tl.constexpr = SAFE_PARTIAL_SUM if SPLIT else SAFE_SUM
        safe = (total > 1.0 / LIMIT) & (total < LIMIT)
        # A row that attends nothing here has no sum that could be wrong.
        some = (tl.reduce(seen, 0, _either) & bits) != 0
        unsafe = unsafe | ((safe == 0) & (some | (total != 0)))
        if HAS_LSE:
            acc *= tl.where(total > 0, exact / total, 1.0)[:, None]
            total = exact
    left_out = tl.max(tl.where(mask_m & unsafe, 1, 0), 0)
    tl.store(
        shared_ptr + tile + tl.arange(0, 1),
        tl.zeros([1], tl.int32),
        mask=tl.arange(0, 1) < left_out,
    )
    if V_SCALE > 0:
        acc = acc * read_scale(v_scale_ptr, V_SCALE == 2)
    if not SPLIT:
        out_at = rows[:, None] * stride_out_t + heads[:, None] * stride_out_h + offs_d[None, :]
        gate_at = rows[:, None] * stride_gate_t + heads[:, None] * stride_gate_h + offs_d[None, :]
        store_result(
            acc,
            total,
            peak,
            out_ptr + out_at,
            lse_ptr + rows * stride_lse_t + heads * stride_lse_h,
            gate_ptr + gate_at,
            mask_m,
            mask_d,
            HAS_LSE,
            HAS_GATE,
        )
    else:
        num_heads = tl.num_programs(1) * GROUP
        cell = ((rows - first_row) * num_heads + heads) * splits + split
        tl.store(acc_ptr + cell[:, None] * DIM + offs_d[None, :], acc, mask=mask_m[:, None])
        tl.store(stats_ptr + cell * 2, tl.where(total > 0, peak, LOWEST), mask=mask_m)
        tl.store(stats_ptr + cell * 2 + 1, total, mask=mask_m)
