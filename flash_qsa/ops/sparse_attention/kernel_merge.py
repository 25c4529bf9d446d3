"""Merges FP32 partials of several splits by log-sum-exp, then rounds, gates and stores.

One program merges one row, one query head and BLOCK_D channels; splits are summed in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.direct import direct
from flash_qsa.ops.sparse_attention.primitives import LN2, LOG2E, LOWEST


@direct
@triton.jit(do_not_specialize=["first_row", "splits"])
def merge_kernel(
    acc_ptr,
    stats_ptr,
    gate_ptr,
    out_ptr,
    lse_ptr,
    stride_gate_t,
    stride_gate_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    first_row,
    splits,
    num_heads,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows, Hq, ceil(D / BLOCK_D)]. acc [rows, Hq, splits, D], stats [..., 2]; BLOCK_S is a
    power of two, at least the splits."""
    index = tl.program_id(0).to(tl.int64)
    row = first_row + index
    head = tl.program_id(1)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_s = tl.arange(0, BLOCK_S)
    mask_s = offs_s < splits
    mask_d = offs_d < DIM
    cell = (index * num_heads + head) * splits + offs_s
    if HAS_GATE:
        # The per-row kernel lets this one in after its own wait: what it does not write is there.
        gate_at = row * stride_gate_t + head * stride_gate_h + offs_d
        gate = tl.load(gate_ptr + gate_at, mask=mask_d, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    peaks = tl.load(stats_ptr + cell * 2, mask=mask_s, other=LOWEST)
    totals = tl.load(stats_ptr + cell * 2 + 1, mask=mask_s, other=0.0)
    # [BLOCK_S, BLOCK_D]
    partial = tl.load(
        acc_ptr + cell[:, None] * DIM + offs_d[None, :],
        mask=mask_s[:, None] & mask_d[None, :],
        other=0.0,
    )
    peak = tl.max(peaks, 0)
    weights = tl.exp2(peaks - peak)
    total = tl.sum(totals * weights, 0)
    some = total != 0  # NaN is not nothing
    result = tl.sum(partial * weights[:, None], 0) / tl.where(some, total, 1.0)
    result = result.to(out_ptr.dtype.element_ty)
    if HAS_GATE:
        gated = result.to(tl.float32) / (1.0 + tl.exp2(-gate * LOG2E))
        result = tl.where(some, gated, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out_t + head * stride_out_h + offs_d, result, mask=mask_d)
    if HAS_LSE:
        lse = (peak + tl.log2(tl.where(some, total, 1.0))) * LN2
        lse = tl.where(some, lse, float("-inf"))
        only = tl.where(tl.program_id(2) == 0, 1, 0)
        at = lse_ptr + row * stride_lse_t + head * stride_lse_h + tl.arange(0, 1)
        tl.store(at, tl.zeros([1], tl.float32) + lse, mask=tl.arange(0, 1) < only)
