"""prepare in PyTorch: the specification, composed of the separate ops (the unfused path)."""

from __future__ import annotations

import torch

from flash_qsa.ops.compress_keys.reference import compress_keys
from flash_qsa.ops.compress_keys.ring_rows import pack_rows
from flash_qsa.ops.fp8 import as_bytes, to_storage
from flash_qsa.ops.norm import rms_norm
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.ops.store_rows.reference import store_rows
from flash_qsa.plan import BatchPlan


def prepare(
    qkv: torch.Tensor,
    index_qk: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    caches: Caches,
    plan: BatchPlan,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    out: Prepared,
) -> None:
    rows = qkv.shape[0]
    heads, head_dim = out.query.shape[1:]
    index_heads, index_dim = out.index_query.shape[1:]
    kv_heads = caches.main.shape[1]
    # padding rows may carry anything as positions; their results are not used
    real = plan.request_ids >= 0
    at = torch.where(real[:, None, None], positions, 0)

    raw_query, raw_key = index_qk.split((index_heads * index_dim, index_dim), -1)
    index_query = rms_norm(
        raw_query.reshape(rows, index_heads, index_dim), norms.index_query, norms.eps
    )
    out.index_query.copy_(to_storage(rope.apply(index_query, at), out.index_query.dtype))

    store_compressed_keys(raw_key, at, rope, norms, caches, plan)
    store_rows(caches.ring, plan.ring_slots, pack_rows(raw_key, at, caches.ring.shape[3]))

    q_and_gate, k, v = qkv.split(
        (heads * 2 * head_dim, kv_heads * head_dim, kv_heads * head_dim), -1
    )
    q, gate = q_and_gate.reshape(rows, heads, 2 * head_dim).chunk(2, -1)
    out.gate.copy_(gate)
    out.query.copy_(rope.apply(rms_norm(q, norms.query, norms.eps), at))
    k = rms_norm(k.reshape(rows, kv_heads, head_dim), norms.key, norms.eps)
    store_keys_values(
        caches.main,
        plan.main_slots,
        rope.apply(k, at),
        v.reshape(rows, kv_heads, head_dim),
        k_scale,
        v_scale,
    )


def store_compressed_keys(
    raw_keys: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    caches: Caches,
    plan: BatchPlan,
) -> None:
    """Pools, norms, rotates and stores the groups that the step closes; reads the ring."""
    pooled = raw_keys.new_zeros(raw_keys.shape)
    first = positions.new_full(positions.shape, -1)
    compress_keys(
        raw_keys, positions, caches.ring, plan.ring_table, plan, plan.compress_ratio, pooled, first
    )
    complete = first[:, 0, 0] >= 0
    slots = plan.compressed_slots.where(complete, -1)
    keys = rms_norm(pooled, norms.index_key, norms.eps)
    store_rows(caches.compressed, slots, rope.apply(keys, first.clamp(min=0)))


def store_keys_values(
    cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
) -> None:
    """Writes keys and values [T, Hkv, D] to the main cache [P, Hkv, S, 2·D]."""
    size = cache.shape[2]
    kept = (slots >= 0) & (slots < cache.shape[0] * size)
    cells = slots[kept]
    stored = torch.cat(
        (
            as_bytes(to_storage(keys[kept], cache.dtype, k_scale)),
            as_bytes(to_storage(values[kept], cache.dtype, v_scale)),
        ),
        -1,
    )
    as_bytes(cache)[cells // size, :, cells % size] = stored
