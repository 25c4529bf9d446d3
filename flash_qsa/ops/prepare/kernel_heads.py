"""Device functions of prepare for the heads of one row: query, gate, index query, key and value.

Everything about a row is a scalar, and every tile [heads, channels] is loaded by the lanes that use
it: nothing passes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.device import e4m3_from_fp32, norm_and_rotate, rotary_channels, to_cache


@triton.jit
def _rotated(table, position, src_ptr, head, HEADS, STRIDE, weight_ptr, eps, DIM, BLOCK, ROPE):
    """Normed and rotated heads [len(head), BLOCK] of one row: `head` of HEADS, STRIDE apart."""
    d = tl.arange(0, BLOCK)
    partner, _, _, rotates = rotary_channels(BLOCK, ROPE)
    at = src_ptr + (head * STRIDE)[:, None]
    live = (head < HEADS)[:, None]
    x = tl.load(at + d[None, :], mask=live & (d < DIM)[None, :], other=0.0)
    partner_x = tl.load(at + partner[None, :], mask=live & rotates[None, :], other=0.0)
    dtype: tl.constexpr = src_ptr.dtype.element_ty
    x, partner_x = x.to(tl.float32), partner_x.to(tl.float32)
    return norm_and_rotate(x, partner_x, weight_ptr, eps, table, position, DIM, ROPE, dtype)


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
    query = _rotated(
        table, position, src_ptr, head, HEADS, 2 * DIM, weight_ptr, weights.eps, DIM, BLOCK, ROPE
    )
    tl.store(_at(gates, row, head) + d[None, :], gate, mask=mask)
    tl.store(_at(queries, row, head) + d[None, :], query, mask=mask)


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
    query = _rotated(
        table, position, src_ptr, head, HEADS, DIM, weight_ptr, weights.eps, DIM, BLOCK, ROPE
    )
    d = tl.arange(0, BLOCK)
    mask = (head < HEADS)[:, None] & (d < DIM)[None, :]
    query = to_cache(query, SIZES.index_is_fp8, src_ptr.dtype.element_ty)
    tl.store(_at(queries, row, head) + d[None, :], query, mask=mask)


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
    mask = (head < tl.where(inside, HEADS, 0))[:, None] & (d < DIM)[None, :]
    src_ptr = qkv.ptr + row * qkv.stride + 2 * SIZES.heads * DIM
    value_at = src_ptr + (HEADS * DIM + head * DIM)[:, None] + d[None, :]
    value = tl.load(value_at, mask=mask, other=0.0)
    key = _rotated(
        table, position, src_ptr, head, HEADS, DIM, weights.key, weights.eps, DIM, BLOCK, ROPE
    )
    if SIZES.main_is_fp8:
        K_SCALE: tl.constexpr = SIZES.k_scale
        V_SCALE: tl.constexpr = SIZES.v_scale
        key = e4m3_from_fp32(_unscaled(key.to(tl.float32), scales.k, K_SCALE))
        value = e4m3_from_fp32(_unscaled(value.to(tl.float32), scales.v, V_SCALE))
    cell = slot // SIZES.page * main.stride_page + slot % SIZES.page * main.stride_row
    at = main.ptr + cell + (head * main.stride_head)[:, None] + d[None, :]
    tl.store(at, key, mask=mask)
    tl.store(at + DIM, value, mask=mask)


@triton.jit
def _unscaled(x, scale, KIND: tl.constexpr):
    """x / scale, rounded as a division is. KIND: the scale is "none", a "number", or on the
    "device", where a captured graph reads its later values."""
    if KIND == "none":
        return x
    else:
        divisor = tl.load(scale) if KIND == "device" else scale
        return tl.math.div_rn(x, tl.zeros(x.shape, tl.float32) + divisor)


@triton.jit
def _at(out, row, head):
    """Pointers [len(head), 1] to heads of a row of an output."""
    return out.ptr + row * out.stride_row + (head * out.stride_head)[:, None]
