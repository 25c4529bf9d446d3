"""Preparation by separate ops: the unfused path, equal to `ops.prepare`.

The order is what the ring needs: pool first, commit the step's raw keys second.
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
    """`ops.prepare` without its single launch: same arguments, same results, same caches."""
    kv_heads, head_dim = caches.main.shape[1], caches.main.shape[3] // 2
    at = real_positions(positions, plan)
    index_query = prepare_index(
        index_qk, at, rope, norms, caches.compressed, caches.ring, plan, backend=backend
    )
    query, gate, keys, values = split_heads(qkv, kv_heads, head_dim)
    query = rope.apply(rms_norm(query, norms.query, norms.eps), at)
    keys = rope.apply(rms_norm(keys, norms.key, norms.eps), at)
    store_keys_values(caches.main, plan.main_slots, keys, values, k_scale, v_scale, backend=backend)
    return Prepared(query, gate.contiguous(), index_query)


def prepare_index(
    index_qk: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    compressed: torch.Tensor,
    ring: torch.Tensor,
    plan: BatchPlan,
    *,
    commit: bool = True,
    backend: str = "auto",
) -> torch.Tensor:
    """The index side alone: updates compressed keys and ring, returns index queries [T, Hi, Di].

    Args:
        positions: canonical, in range also in padding rows (`real_positions`).
        commit: write the step's raw keys to the ring; a step that no other follows need not.
    """
    dim = compressed.shape[3]
    raw_query, raw_key = index_qk.split((index_qk.shape[1] - dim, dim), -1)
    query = rms_norm(raw_query.unflatten(-1, (-1, dim)), norms.index_query, norms.eps)
    query = to_storage(rope.apply(query, positions), compressed.dtype)

    pooled, first = ops.compress_keys(
        raw_key, positions, ring, plan.ring_table, plan, backend=backend
    )
    keys = rope.apply(rms_norm(pooled, norms.index_key, norms.eps), first.clamp(min=0))
    slots = torch.where(first[:, 0, 0] >= 0, plan.compressed_slots, -1)
    ops.store_rows(compressed, slots, keys, backend=backend)
    if commit:
        ring_rows = pack_rows(raw_key, positions, ring.shape[3])
        ops.store_rows(ring, plan.ring_slots, ring_rows, backend=backend)
    return query


def store_keys_values(
    cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    *,
    backend: str = "auto",
) -> None:
    """Writes keys and values [T, Hkv, D] to the main cache [P, Hkv, S, 2·D].

    Slots outside the cache are skipped. FP8 stores x / scale, saturated.
    """
    parts = to_storage(keys, cache.dtype, k_scale), to_storage(values, cache.dtype, v_scale)
    both = torch.cat([as_bytes(part) for part in parts], -1)
    for head in range(cache.shape[1]):
        ops.store_rows(as_bytes(cache)[:, head, :, None], slots, both[:, head], backend=backend)


def split_heads(
    qkv: torch.Tensor, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, gate [T, Hq, D], keys and values [T, Hkv, D] of a joint projection."""
    kv_width = kv_heads * head_dim
    query_and_gate, keys, values = qkv.split((qkv.shape[1] - 2 * kv_width, kv_width, kv_width), -1)
    query, gate = query_and_gate.unflatten(-1, (-1, 2 * head_dim)).chunk(2, -1)
    by_head = (kv_heads, head_dim)
    return query, gate, keys.unflatten(-1, by_head), values.unflatten(-1, by_head)


def real_positions(positions: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
    """Canonical positions, 0 in padding rows, which may carry anything."""
    canonical = canonical_positions(positions)
    return torch.where((plan.request_ids >= 0)[:, None, None], canonical, 0)
