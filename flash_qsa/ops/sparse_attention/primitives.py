"""Device functions that the attention kernels share: tiles of cache, products, epilogues.

Scores live in units of log2(e), so that probabilities are powers of two. Running maxima start at a
finite sentinel: a row without a token keeps l = 0 and acc = 0 and never meets inf - inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.device import e4m3_to_fp16

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e38)


HEADROOM = tl.constexpr(15.0)
"""FP16 probabilities of FP8 caches are 2^HEADROOM times larger: from 2^-29 on they are normal."""


@triton.jit
def as_compute(tile, COMPUTE: tl.constexpr, FP8_BYTES: tl.constexpr):
    """A cache tile in the dtype of the products; exact for FP8."""
    if FP8_BYTES:
        return e4m3_to_fp16(tile).to(COMPUTE)
    else:
        return tile.to(COMPUTE)


@triton.jit
def byte_as_compute(words, AT: tl.constexpr, COMPUTE: tl.constexpr, FP8_BYTES: tl.constexpr):
    """The AT-th FP8 number of each int32 of a cache tile, in the dtype of the products; exact."""
    code = (words >> (8 * AT)).to(tl.uint8)
    if FP8_BYTES:
        return e4m3_to_fp16(code).to(COMPUTE)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(COMPUTE)


@triton.jit
def fit_query(q, log2_scale, COMPUTE: tl.constexpr, NARROW: tl.constexpr):
    """Queries [M, D] in the dtype of the products, and what their scores [M] are multiplied by.

    NARROW: FP8 caches are multiplied in FP16, which holds each of their numbers and not each BF16
    number: a row is scaled by the power of two that brings its largest element to 2^14 ... 2^15.
    What then falls short of FP16's 2^-24 is below the rounding of FP32 sums.
    """
    row_scale = tl.zeros([q.shape[0]], tl.float32) + log2_scale
    if NARROW:
        wide = q.to(tl.float32)
        exponent = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.maximum(exponent, 15)
        q = wide * ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        row_scale *= ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return q.to(COMPUTE), row_scale


@triton.jit
def product(a, b, COMPUTE: tl.constexpr):
    """a · b in FP32; FP32 operands are not reduced to TF32."""
    if a.dtype.is_fp32():
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def store_result(
    acc,
    total,
    peak,
    out_ptrs,
    lse_ptrs,
    gate_ptrs,
    mask_m,
    mask_d,
    HAS_LSE: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Normalises acc [M, D], rounds, gates and stores it, and the natural log-sum-exp [M]."""
    some = total != 0  # NaN is not nothing
    result = acc / tl.where(some, total, 1.0)[:, None]
    result = result.to(out_ptrs.dtype.element_ty)
    keep = mask_m[:, None] & mask_d[None, :]
    if HAS_GATE:
        gate = tl.load(gate_ptrs, mask=keep, other=0.0).to(tl.float32)
        gated = result.to(tl.float32) / (1.0 + tl.exp2(-gate * LOG2E))
        # An empty row stays zero whatever its gate holds.
        result = tl.where(some[:, None], gated, 0.0).to(out_ptrs.dtype.element_ty)
    tl.store(out_ptrs, result, mask=keep)
    if HAS_LSE:
        lse = tl.where(some, (peak + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
        tl.store(lse_ptrs, lse, mask=mask_m)


@triton.jit
def read_scale(scale_ptr, IS_TENSOR: tl.constexpr):
    """A per-tensor scale that is a float argument or a one-element tensor."""
    if IS_TENSOR:
        return tl.load(scale_ptr).to(tl.float32)
    else:
        return scale_ptr
