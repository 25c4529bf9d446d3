"""Operators that write a request's state: rows, pooled keys, a whole step, and its plan."""

from __future__ import annotations

import torch

from flash_qsa import dispatch
from flash_qsa.library.registry import PLAN, flatten_scale, operator, traces, unflatten_scale
from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import flatten_plan, unflatten_plan


@operator("store_rows", "Tensor(a!) cache, Tensor slots, Tensor rows, str backend")
def _store_rows(a):
    if a.slots.shape[0]:
        dispatch.implementation("store_rows", a.backend, a.cache.device)(a.cache, a.slots, a.rows)


@traces("store_rows")
def _trace_store_rows(backend, cache, slots, rows):
    torch.ops.flash_qsa.store_rows(cache, slots, rows, backend)


@operator(
    "plan_rows",
    "Tensor query_start, Tensor seq_lens, Tensor page_table, Tensor ring_table, "
    "SymInt compress_ratio, SymInt page_size, SymInt ring_capacity, Tensor(a!) request_ids, "
    "Tensor(b!) positions, Tensor(c!) visible_blocks, Tensor(d!) main_slots, "
    "Tensor(e!) compressed_slots, Tensor(f!) ring_slots, str backend",
)
def _plan_rows(a):
    out = PlanRows(
        a.request_ids,
        a.positions,
        a.visible_blocks,
        a.main_slots,
        a.compressed_slots,
        a.ring_slots,
    )
    if a.request_ids.shape[0]:
        dispatch.implementation("batch_plan", a.backend, a.seq_lens.device)(
            a.query_start,
            a.seq_lens,
            a.page_table,
            a.ring_table,
            a.compress_ratio,
            a.page_size,
            a.ring_capacity,
            out,
        )


@traces("batch_plan")
def _trace_plan_rows(backend, *lengths_and_sizes_and_out):
    *given, out = lengths_and_sizes_and_out
    torch.ops.flash_qsa.plan_rows(*given, *out, backend)


@operator(
    "compress_keys",
    f"Tensor raw_keys, Tensor positions, Tensor ring, Tensor ring_table, {PLAN}, "
    "SymInt compress_ratio, Tensor(a!) out, Tensor(b!) first_positions_out, str backend",
)
def _compress_keys(a):
    if a.raw_keys.shape[0]:
        dispatch.implementation("compress_keys", a.backend, a.raw_keys.device)(
            a.raw_keys,
            a.positions,
            a.ring,
            a.ring_table,
            unflatten_plan(a.plan_tensors, a.plan_sizes),
            a.compress_ratio,
            a.out,
            a.first_positions_out,
        )


@traces("compress_keys")
def _trace_compress_keys(
    backend, raw_keys, positions, ring, ring_table, plan, ratio, out, first_positions_out
):
    torch.ops.flash_qsa.compress_keys(
        raw_keys,
        positions,
        ring,
        ring_table,
        *flatten_plan(plan),
        ratio,
        out,
        first_positions_out,
        backend,
    )


@operator(
    "prepare",
    "Tensor qkv, Tensor index_qk, Tensor positions, Tensor cos_sin, int[]? mrope_section, "
    "bool mrope_interleaved, bool neox_style, Tensor index_query_norm, Tensor index_key_norm, "
    "Tensor query_norm, Tensor key_norm, float eps, Tensor(a!) main, Tensor(b!) compressed, "
    f"Tensor(c!) ring, {PLAN}, Tensor? k_scale, float? k_scale_value, Tensor? v_scale, "
    "float? v_scale_value, Tensor(d!) query_out, Tensor(e!) gate_out, "
    "Tensor(f!) index_query_out, str backend",
)
def _prepare(a):
    section = None if a.mrope_section is None else tuple(a.mrope_section)
    if a.qkv.shape[0]:
        dispatch.implementation("prepare", a.backend, a.qkv.device)(
            a.qkv,
            a.index_qk,
            a.positions,
            RopeTable(a.cos_sin, section, a.mrope_interleaved, a.neox_style),
            Norms(a.index_query_norm, a.index_key_norm, a.query_norm, a.key_norm, a.eps),
            Caches(a.main, a.compressed, a.ring),
            unflatten_plan(a.plan_tensors, a.plan_sizes),
            unflatten_scale(a.k_scale, a.k_scale_value),
            unflatten_scale(a.v_scale, a.v_scale_value),
            Prepared(a.query_out, a.gate_out, a.index_query_out),
        )


@traces("prepare")
def _trace_prepare(
    backend, qkv, index_qk, positions, rope, norms, caches, plan, k_scale, v_scale, out
):
    torch.ops.flash_qsa.prepare(
        qkv,
        index_qk,
        positions,
        rope.cos_sin,
        rope.mrope_section,
        rope.mrope_interleaved,
        rope.neox_style,
        *norms,
        *caches,
        *flatten_plan(plan),
        *flatten_scale(k_scale),
        *flatten_scale(v_scale),
        *out,
        backend,
    )
