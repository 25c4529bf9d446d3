"""prepare: everything between the projections and block selection, in one call.

Norm and rotate the index queries; pool, norm, rotate and store the keys of every group that the
step closes; commit the step's raw keys to the ring; norm and rotate the main queries and keys;
store keys and values in the main cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_qsa import dispatch
from flash_qsa.checks import (
    E4M3_DTYPES,
    FLOAT_DTYPES,
    Axes,
    Scale,
    expect_contiguous_last,
    expect_device,
    expect_dtype,
    expect_out,
    expect_placed,
    expect_scale,
)
from flash_qsa.ops.compress_keys.ring_rows import stores_positions
from flash_qsa.ops.rotary import RopeTable, canonical_positions
from flash_qsa.plan import BatchPlan


class Norms(NamedTuple):
    """Weights of the four zero-centred norms: [Di], [Di], [D], [D], and their shared epsilon."""

    index_query: torch.Tensor
    index_key: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Caches(NamedTuple):
    """One layer's state: main [P, Hkv, S, 2·D], compressed [P, S / C, 1, Di], ring
    [slots, capacity, 1, Di or wider]."""

    main: torch.Tensor
    compressed: torch.Tensor
    ring: torch.Tensor


class Prepared(NamedTuple):
    """What selection and attention take: query and gate [T, Hq, D], index_query [T, Hi, Di]."""

    query: torch.Tensor
    gate: torch.Tensor
    index_query: torch.Tensor


def prepare(
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
    out: Prepared | None = None,
    backend: str = "auto",
) -> Prepared:
    """Writes the step into all three caches and returns what selection and attention need.

    Every norm is FP32 and rounded to the activation dtype, every rotation FP32 and rounded once
    more. Padding rows (request -1) write nothing; their outputs are unspecified but finite where
    their inputs are.

    Args:
        qkv: [T, Hq·2·D + 2·Hkv·D]: each query head followed by its gate, the key heads, the value
            heads. BF16, FP16 or FP32: the activation dtype.
        index_qk: [T, (Hi + 1)·Di]: the index query heads, then the one raw key.
        positions: rotary positions, [T], [1, T], [3, T] or [T, 1, 3].
        rope: the table shared by index and main heads, in the activation dtype.
        norms: norm weights and epsilon.
        caches: the layer's state, written in place. The ring is in the activation dtype; the
            compressed cache in it or FP8 without scales; the main cache in it or FP8 with
            k_scale and v_scale.
        plan: the step's batch.
        k_scale, v_scale: as in `sparse_attention`.
        out: buffers to fill.

    Returns:
        Prepared; index_query is in the compressed cache's dtype.

    Raises:
        ValueError: shapes, strides, devices or sizes that do not fit.
        UnsupportedError: a dtype that is not listed.
    """
    axes = Axes()
    axes.shape("qkv", qkv, ("T", "qkv width"))
    axes.shape("index_qk", index_qk, ("T", "index width"))
    main, compressed, ring = caches
    axes.shape("caches.main", main, ("P", "Hkv", "S", "2·D"))
    axes.shape("caches.compressed", compressed, ("P'", "S/C", 1, "Di"))
    axes.shape("caches.ring", ring, ("slots", "capacity", 1, "width"))
    dtype, device, cos_sin = qkv.dtype, qkv.device, rope.cos_sin
    expect_dtype("qkv", qkv, FLOAT_DTYPES)
    activation, stored = (dtype,), (dtype, *E4M3_DTYPES)
    expect_dtype("index_qk", index_qk, activation)
    expect_dtype("rope.cos_sin", cos_sin, activation)
    expect_dtype("caches.main", main, stored)
    expect_dtype("caches.compressed", compressed, stored)
    expect_dtype("caches.ring", ring, activation)
    head_dim, index_dim = main.shape[3] // 2, axes["Di"]
    axes.shape("norms.index_query", norms.index_query, (index_dim,))
    axes.shape("norms.index_key", norms.index_key, (index_dim,))
    axes.shape("norms.query", norms.query, (head_dim,))
    axes.shape("norms.key", norms.key, (head_dim,))
    expect_device("positions", positions, device)
    expect_contiguous_last("qkv", qkv)
    expect_placed("index_qk", index_qk, device)
    expect_placed("rope.cos_sin", cos_sin, device)
    expect_placed("caches.main", main, device)
    expect_placed("caches.compressed", compressed, device)
    expect_placed("caches.ring", ring, device)
    heads = _head_count("qkv", axes["qkv width"] - 2 * axes["Hkv"] * head_dim, 2 * head_dim)
    if heads % axes["Hkv"]:
        raise ValueError(f"qkv: {heads} query heads are not a multiple of {axes['Hkv']} KV heads")
    index_heads = _head_count("index_qk", axes["index width"] - index_dim, index_dim)
    if rope.rotary_dim > min(head_dim, index_dim):
        raise ValueError(
            f"rope: {rope.rotary_dim} rotary dims exceed a head of {min(head_dim, index_dim)}"
        )
    rows, ratio = axes["T"], plan.compress_ratio
    canonical = canonical_positions(positions)
    if canonical.shape[0] != rows:
        raise ValueError(f"positions: expected {rows} rows, got {canonical.shape[0]}")
    if plan.num_rows != rows:
        raise ValueError(f"plan: built for {plan.num_rows} rows, qkv has {rows}")
    if axes["S"] != plan.page_size or axes["S/C"] * ratio != axes["S"]:
        raise ValueError(
            f"caches: pages of {axes['S']} tokens and {axes['S/C']} compressed keys do not fit "
            f"the plan's page_size {plan.page_size} and compress_ratio {ratio}"
        )
    if axes["capacity"] != plan.ring_capacity:
        raise ValueError(
            f"caches.ring: capacity {axes['capacity']}, the plan was built for {plan.ring_capacity}"
        )
    stores_positions(axes["width"], index_dim, dtype)
    expect_scale("k_scale", k_scale, main.dtype, device)
    expect_scale("v_scale", v_scale, main.dtype, device)

    main_shape, index_shape = (rows, heads, head_dim), (rows, index_heads, index_dim)
    index_dtype = compressed.dtype
    if out is None:
        out = Prepared(
            qkv.new_empty(main_shape),
            qkv.new_empty(main_shape),
            qkv.new_empty(index_shape, dtype=index_dtype),
        )
    else:
        expect_out(out.query, main_shape, dtype, device)
        expect_out(out.gate, main_shape, dtype, device)
        expect_out(out.index_query, index_shape, index_dtype, device)
    if rows:
        dispatch.implementation("prepare", backend, device)(
            qkv, index_qk, canonical, rope, norms, caches, plan, k_scale, v_scale, out
        )
    return out


def _head_count(argument: str, width: int, per_head: int) -> int:
    if width <= 0 or width % per_head:
        raise ValueError(
            f"{argument}: {width} query columns are not a positive multiple of {per_head}"
        )
    return width // per_head
