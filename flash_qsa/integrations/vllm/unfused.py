"""Preparation by separate ops: what the one fused launch is compared with.

It keeps the order that the ring needs: pool first, commit the step's raw keys second.
"""

from __future__ import annotations

import torch

from flash_qsa import ops
from flash_qsa.checks import Scale
from flash_qsa.ops.compress_keys.ring_rows import pack_rows
from flash_qsa.ops.fp8 import as_bytes, to_storage
from flash_qsa.ops.norm import rms_norm
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.rotary import RopeTable, canonical_positions
from flash_qsa.plan import BatchPlan


def prepare_unfused(
    qkv: torch.Tensor,
    index_qk: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    caches: Caches,
    plan: BatchPlan,
    *,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    backend: str = "auto",
) -> Prepared:
    """`ops.prepare` without its single launch: same arguments, same results, same caches.

    Works under graph capture: nothing is read back to the host.
    """
    rows, head_dim = qkv.shape[0], caches.main.shape[3] // 2
    kv_heads, index_dim = caches.main.shape[1], caches.compressed.shape[3]
    index_dtype = caches.compressed.dtype
    at = canonical_positions(positions)
    # padded rows may carry anything as rotary positions
    at = torch.where((plan.request_ids >= 0)[:, None, None], at, 0)

    raw_query, raw_key = index_qk.split((index_qk.shape[1] - index_dim, index_dim), -1)
    index_query = rms_norm(raw_query.reshape(rows, -1, index_dim), norms.index_query, norms.eps)
    index_query = to_storage(rope.apply(index_query, at), index_dtype)

    pooled, first = ops.compress_keys(
        raw_key.contiguous(), at, caches.ring, plan.ring_table, plan, backend=backend
    )
    complete = first[:, 0, 0] >= 0
    keys = rope.apply(rms_norm(pooled, norms.index_key, norms.eps), first.clamp(min=0))
    slots = torch.where(complete, plan.compressed_slots, -1)
    ops.store_rows(caches.compressed, slots, keys, backend=backend)
    ring_rows = pack_rows(raw_key, at, caches.ring.shape[3])
    ops.store_rows(caches.ring, plan.ring_slots, ring_rows, backend=backend)

    kv_width = kv_heads * head_dim
    query_and_gate, key, value = qkv.split((qkv.shape[1] - 2 * kv_width, kv_width, kv_width), -1)
    query, gate = query_and_gate.reshape(rows, -1, 2 * head_dim).chunk(2, -1)
    query = rope.apply(rms_norm(query, norms.query, norms.eps), at)
    key = rms_norm(key.reshape(rows, kv_heads, head_dim), norms.key, norms.eps)
    store_keys_values(
        caches.main,
        plan.main_slots,
        rope.apply(key, at),
        value.reshape(rows, kv_heads, head_dim),
        k_scale,
        v_scale,
        backend,
    )
    return Prepared(query, gate.contiguous(), index_query)


def store_keys_values(
    cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    backend: str = "auto",
) -> None:
    """Writes keys and values [T, Hkv, D] to the main cache [P, Hkv, S, 2·D], skipping slots < 0.

    FP8 stores x / scale, saturated; the bytes are those of the fused launch.
    """
    parts = to_storage(keys, cache.dtype, k_scale), to_storage(values, cache.dtype, v_scale)
    both = torch.cat([as_bytes(part) for part in parts], -1)
    for head in range(cache.shape[1]):
        ops.store_rows(cache[:, head].unsqueeze(2), slots, both[:, head], backend=backend)
