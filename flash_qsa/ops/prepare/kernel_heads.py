"""Device functions of prepare for the heads of one row: query, gate, index query, key and value.

Everything about a row is a scalar, and every tile [heads, channels] is loaded by the lanes that use
it: nothing passes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.device import e4m3_from_fp32, to_cache
from flash_qsa.ops.prepare.kernel_rotary import norm_and_rotate, rotary_pairs


@triton.jit
def _prepared(table, position, src_ptr, head, HEADS, STRIDE, weight_ptr, eps, DIM, BLOCK, ROPE):
    """Normed heads [len(head), BLOCK] of one row, `head` of HEADS, STRIDE apart, and their turned
    pairs, [len(head), PAIRS] twice."""
    d = tl.arange(0, BLOCK)
    first, second, paired = rotary_pairs(ROPE.pairs, ROPE)
    at = src_ptr + (head * STRIDE)[:, None]
    live = (head < HEADS)[:, None]
    mask = live & paired[None, :]
    x = tl.load(at + d[None, :], mask=live & (d < DIM)[None, :], other=0.0)
    a = tl.load(at + first[None, :], mask=mask, other=0.0)
    b = tl.load(at + second[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = src_ptr.dtype.element_ty
    return norm_and_rotate(x, a, b, weight_ptr, eps, table, position, DIM, ROPE, dtype)


@triton.jit
def store_heads(at, live, y, a, b, DIM: tl.constexpr, ROPE: tl.constexpr):
    """Stores normed heads y and their turned pairs a, b at pointers [len(head), 1]."""
    d = tl.arange(0, y.shape[1])
    first, second, paired = rotary_pairs(ROPE.pairs, ROPE)
    mask = live & paired[None, :]
    tl.store(at + first[None, :], a, mask=mask)
    tl.store(at + second[None, :], b, mask=mask)
    tl.store(at + d[None, :], y, mask=live & ((d >= 2 * ROPE.half) & (d < DIM))[None, :])


@triton.jit
def queries_gates(
    qkv,
    table,
    weights,
    queries,
    gates,
    row,
    position,
    first,
    TILE: tl.constexpr,
    SIZES: tl.constexpr,
    ROPE,
):
    """Normed and rotated query heads of a row, and their gates as they are."""
    DIM: tl.constexpr = SIZES.dim
    BLOCK: tl.constexpr = SIZES.block
    HEADS: tl.constexpr = SIZES.heads
    head = first + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK)
    mask = (head < HEADS)[:, None] & (d < DIM)[None, :]
    src_ptr = qkv.ptr + row * qkv.stride
    gate_at = src_ptr + (head * (2 * DIM) + DIM)[:, None] + d[None, :]
    gate = tl.load(gate_at, mask=mask, other=0.0)
    weight_ptr = weights.query
    y, a, b = _prepared(
        table, position, src_ptr, head, HEADS, 2 * DIM, weight_ptr, weights.eps, DIM, BLOCK, ROPE
    )
    tl.store(_at(gates, row, head) + d[None, :], gate, mask=mask)
    store_heads(_at(queries, row, head), (head < HEADS)[:, None], y, a, b, DIM, ROPE)


@triton.jit
def index_queries(
    index,
    table,
    weights,
    queries,
    row,
    position,
    first,
    TILE: tl.constexpr,
    SIZES: tl.constexpr,
    ROPE,
):
    """Normed and rotated index query heads of a row, in the compressed cache's dtype."""
    DIM: tl.constexpr = SIZES.index_dim
    BLOCK: tl.constexpr = SIZES.index_block
    HEADS: tl.constexpr = SIZES.index_heads
    head = first + tl.arange(0, TILE)
    src_ptr = index.ptr + row * index.stride
    weight_ptr = weights.index_query
    y, a, b = _prepared(
        table, position, src_ptr, head, HEADS, DIM, weight_ptr, weights.eps, DIM, BLOCK, ROPE
    )
    FP8: tl.constexpr = SIZES.index_is_fp8
    dtype: tl.constexpr = src_ptr.dtype.element_ty
    y, a, b = to_cache(y, FP8, dtype), to_cache(a, FP8, dtype), to_cache(b, FP8, dtype)
    store_heads(_at(queries, row, head), (head < HEADS)[:, None], y, a, b, DIM, ROPE)


@triton.jit
def keys_values(
    qkv, table, weights, plan, main, scales, row, position, first, TILE: tl.constexpr, SIZES, ROPE
):
    """Normed and rotated key heads of a row, and its value heads, to the main cache."""
    DIM: tl.constexpr = SIZES.dim
    BLOCK: tl.constexpr = SIZES.block
    HEADS: tl.constexpr = SIZES.kv_heads
    slot = tl.load(plan.main_slots + row)
    inside = (slot >= 0) & (slot < main.count)
    head = first + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK)
    src_ptr = qkv.ptr + row * qkv.stride + 2 * SIZES.heads * DIM
    value_at = src_ptr + (HEADS * DIM + head * DIM)[:, None] + d[None, :]
    value = tl.load(value_at, mask=(head < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
    y, a, b = _prepared(
        table, position, src_ptr, head, HEADS, DIM, weights.key, weights.eps, DIM, BLOCK, ROPE
    )
    if SIZES.main_is_fp8:
        # names of their own: older compilers pass a field of SIZES as plain text
        K_SCALE: tl.constexpr = SIZES.k_scale
        V_SCALE: tl.constexpr = SIZES.v_scale
        y = _divided(y, scales.k, K_SCALE)
        a = _divided(a, scales.k, K_SCALE)
        b = _divided(b, scales.k, K_SCALE)
        value = _divided(value, scales.v, V_SCALE)
    cell = slot // SIZES.page * main.stride_page + slot % SIZES.page * main.stride_row
    at = main.ptr + cell + (head * main.stride_head)[:, None]
    live = (head < tl.where(inside, HEADS, 0))[:, None]
    tl.store(at + (DIM + d)[None, :], value, mask=live & (d < DIM)[None, :])
    store_heads(at, live, y, a, b, DIM, ROPE)


@triton.jit
def _divided(x, scale, KIND: tl.constexpr):
    """e4m3 bytes of x / scale, rounded as a division is. KIND: the scale is "none", a "number", or
    on the "device", where a captured graph reads its later values."""
    x = x.to(tl.float32)
    if KIND != "none":
        divisor = tl.load(scale) if KIND == "device" else scale
        x = tl.math.div_rn(x, tl.zeros(x.shape, tl.float32) + divisor)
    return e4m3_from_fp32(x)


@triton.jit
def _at(out, row, head):
    """Pointers [len(head), 1] to heads of a row of an output."""
    return out.ptr + row * out.stride_row + (head * out.stride_head)[:, None]
