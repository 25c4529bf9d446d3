"""One step of the per-row schedule: online softmax over a few gathered tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.sparse_attention.primitives import as_compute, byte_as_compute, product


@triton.jit
def _weighted(acc, shrink, weights, v, at: tl.constexpr, COMPUTE: tl.constexpr, FP8_BYTES):
    """acc · shrink + weights · (every fourth channel of V, from `at` on)."""
    return acc * shrink + product(weights, byte_as_compute(v, at, COMPUTE, FP8_BYTES), COMPUTE)


@triton.jit
def attend_step(
    q,
    k_ptrs,
    v_ptrs,
    keep,
    acc,
    lanes,
    peak,
    row_scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
    PROBABILITY: tl.constexpr,
    FP8_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    MARGIN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over BLOCK_N tokens; only those in `keep` [N] are read (with MASKED) and
    attended. Probabilities are 2^MARGIN times larger."""
    if WORDS:
        v_ptrs = v_ptrs.to(tl.pointer_type(tl.int32))
        v_ptrs = tl.multiple_of(v_ptrs, [16, 16]) + tl.arange(0, BLOCK_D // 4)[None, :]
    if MASKED:
        k = tl.load(k_ptrs, mask=keep[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=keep[:, None], other=0 if WORDS else 0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    if DIM != BLOCK_D:
        inside = (tl.arange(0, BLOCK_D) < DIM)[None, :]
        k = tl.where(inside, k, tl.zeros_like(k))
        v = tl.where(inside, v, tl.zeros_like(v))
    k = as_compute(k, COMPUTE, FP8_BYTES)
    scores = product(q, tl.trans(k), COMPUTE) * row_scale[:, None]
    scores = tl.where(keep[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    reference = new_peak - MARGIN if MARGIN > 0 else new_peak
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(peak - new_peak)[:, None]
    rounded = weights.to(PROBABILITY).to(COMPUTE)
    if WORDS:
        acc = (
            _weighted(acc[0], shrink, rounded, v, 0, COMPUTE, FP8_BYTES),
            _weighted(acc[1], shrink, rounded, v, 1, COMPUTE, FP8_BYTES),
            _weighted(acc[2], shrink, rounded, v, 2, COMPUTE, FP8_BYTES),
            _weighted(acc[3], shrink, rounded, v, 3, COMPUTE, FP8_BYTES),
        )
    else:
        acc = acc * shrink + product(rounded, as_compute(v, COMPUTE, FP8_BYTES), COMPUTE)
    return acc, lanes * shrink + weights, new_peak
