"""torch.library operators: what torch.compile and torch.export see instead of an op's insides.

Every op is registered as `torch.ops.flash_qsa.<op>` with a schema that declares what it writes and
a fake that computes nothing. While a program is traced `dispatch.implementation` hands out `traced`
instead of an implementation; eager calls never pass through here, so decoding pays no dispatcher.
Plans, norms, caches and rotary tables are flattened to tensors and integers for the schema. Both
backends stay opaque: the choice between them is made when the operator runs.

`sparse_attention` alone is differentiable, and therefore functional; `sparse_attention_out` is the
same op writing into a given buffer. No other operator records gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flash_qsa import dispatch
from flash_qsa.checks import Scale
from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.ops.sparse_attention import backward
from flash_qsa.plan import flatten_plan, unflatten_plan

_LIBRARY = torch.library.Library("flash_qsa", "DEF")
# Inductor may otherwise hand an operator a tensor whose last axis it has made non-contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_PLAN = "Tensor[] plan_tensors, SymInt[] plan_sizes"
_TRACED: dict[str, Callable] = {}


def traced(op: str, backend: str) -> Callable:
    """A function with the arguments of `reference.<op>` that calls the op's operator."""

    def call(*args):
        with torch.no_grad():
            _TRACED[op](backend, *args)

    return call


def _returns_nothing(*args, **kwargs) -> None:
    """Fake of an operator that only writes."""


def _operator(
    name: str, arguments: str, returns: str = "()", fake: Callable = _returns_nothing
) -> Callable:
    """Registers the decorated function as `torch.ops.flash_qsa.<name>`."""

    def register(run: Callable) -> Callable:
        _LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=_TAGS)
        _LIBRARY.impl(name, torch.no_grad()(run), "CompositeExplicitAutograd")
        torch.library.register_fake(f"flash_qsa::{name}", fake, lib=_LIBRARY)
        return run

    return register


def _traces(op: str) -> Callable:
    """Registers the decorated function as the traced form of `dispatch`'s op."""

    def register(call: Callable) -> Callable:
        _TRACED[op] = call
        return call

    return register


def _flat_scale(scale: Scale | None) -> tuple[torch.Tensor | None, float | None]:
    return (scale, None) if isinstance(scale, torch.Tensor) else (None, scale)


def _scale(tensor: torch.Tensor | None, value: float | None) -> Scale | None:
    return value if tensor is None else tensor


@_operator("store_rows", "Tensor(a!) cache, Tensor slots, Tensor rows, str backend")
def _store_rows(cache, slots, rows, backend):
    if slots.shape[0]:
        dispatch.implementation("store_rows", backend, cache.device)(cache, slots, rows)


@_traces("store_rows")
def _trace_store_rows(backend, cache, slots, rows):
    torch.ops.flash_qsa.store_rows(cache, slots, rows, backend)


@_operator(
    "plan_rows",
    "Tensor query_start, Tensor seq_lens, Tensor page_table, Tensor ring_table, "
    "SymInt compress_ratio, SymInt page_size, SymInt ring_capacity, Tensor(a!) request_ids, "
    "Tensor(b!) positions, Tensor(c!) visible_blocks, Tensor(d!) main_slots, "
    "Tensor(e!) compressed_slots, Tensor(f!) ring_slots, str backend",
)
def _plan_rows(query_start, seq_lens, page_table, ring_table, ratio, page_size, capacity, *rest):
    out, backend = PlanRows(*rest[:-1]), rest[-1]
    if out.request_ids.shape[0]:
        dispatch.implementation("batch_plan", backend, seq_lens.device)(
            query_start, seq_lens, page_table, ring_table, ratio, page_size, capacity, out
        )


@_traces("batch_plan")
def _trace_plan_rows(backend, *args):
    torch.ops.flash_qsa.plan_rows(*args[:-1], *args[-1], backend)


@_operator(
    "compress_keys",
    f"Tensor raw_keys, Tensor positions, Tensor ring, Tensor ring_table, {_PLAN}, "
    "SymInt compress_ratio, Tensor(a!) out, Tensor(b!) first_positions_out, str backend",
)
def _compress_keys(
    raw_keys, positions, ring, ring_table, plan_tensors, plan_sizes, ratio, out, first, backend
):
    plan = unflatten_plan(plan_tensors, plan_sizes)
    if raw_keys.shape[0]:
        dispatch.implementation("compress_keys", backend, raw_keys.device)(
            raw_keys, positions, ring, ring_table, plan, ratio, out, first
        )


@_traces("compress_keys")
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


@_operator(
    "prepare",
    "Tensor qkv, Tensor index_qk, Tensor positions, Tensor cos_sin, int[]? mrope_section, "
    "bool mrope_interleaved, bool neox_style, Tensor index_query_norm, Tensor index_key_norm, "
    "Tensor query_norm, Tensor key_norm, float eps, Tensor(a!) main, Tensor(b!) compressed, "
    f"Tensor(c!) ring, {_PLAN}, Tensor? k_scale, float? k_scale_value, Tensor? v_scale, "
    "float? v_scale_value, Tensor(d!) query_out, Tensor(e!) gate_out, "
    "Tensor(f!) index_query_out, str backend",
)
def _prepare(qkv, index_qk, positions, *rest):
    rope = RopeTable(rest[0], None if rest[1] is None else tuple(rest[1]), *rest[2:4])
    norms, caches, plan = Norms(*rest[4:9]), Caches(*rest[9:12]), unflatten_plan(*rest[12:14])
    k_scale, v_scale, out = _scale(*rest[14:16]), _scale(*rest[16:18]), Prepared(*rest[18:21])
    if qkv.shape[0]:
        dispatch.implementation("prepare", rest[21], qkv.device)(
            qkv, index_qk, positions, rope, norms, caches, plan, k_scale, v_scale, out
        )


@_traces("prepare")
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
        *_flat_scale(k_scale),
        *_flat_scale(v_scale),
        *out,
        backend,
    )


@_operator(
    "select_blocks",
    "Tensor index_query, Tensor key_cache, Tensor page_table, Tensor request_ids, "
    f"Tensor visible_blocks, Tensor? first_block, {_PLAN}, Tensor(b!)? workspace, "
    "SymInt workspace_bytes, Tensor(a!) out, str backend",
)
def _select_blocks(
    index_query,
    key_cache,
    page_table,
    request_ids,
    visible_blocks,
    first_block,
    plan_tensors,
    plan_sizes,
    workspace,
    workspace_bytes,
    out,
    backend,
):
    if out.shape[0]:
        dispatch.implementation("select_blocks", backend, index_query.device)(
            index_query,
            key_cache,
            page_table,
            request_ids,
            visible_blocks,
            first_block,
            unflatten_plan(plan_tensors, plan_sizes),
            workspace_bytes if workspace is None else workspace,
            out,
        )


@_traces("select_blocks")
def _trace_select_blocks(backend, *args):
    *tensors, plan, workspace, out = args
    buffer = workspace if isinstance(workspace, torch.Tensor) else None
    torch.ops.flash_qsa.select_blocks(
        *tensors,
        *flatten_plan(plan),
        buffer,
        0 if buffer is not None else workspace,
        out,
        backend,
    )


@_operator(
    "expand_blocks",
    "Tensor block_ids, Tensor positions, Tensor visible_blocks, SymInt compress_ratio, "
    "Tensor(a!) out, str backend",
)
def _expand_blocks(block_ids, positions, visible_blocks, ratio, out, backend):
    if out.shape[0]:
        dispatch.implementation("expand_blocks", backend, block_ids.device)(
            block_ids, positions, visible_blocks, ratio, out
        )


@_traces("expand_blocks")
def _trace_expand_blocks(backend, *args):
    torch.ops.flash_qsa.expand_blocks(*args, backend)


_ATTENDED = (
    "Tensor query, Tensor keys, Tensor values, Tensor block_ids, Tensor positions, "
    "Tensor page_table, Tensor request_ids, SymInt compress_ratio, float scale"
)


@_operator(
    "sparse_attention_out",
    f"{_ATTENDED}, Tensor? gate, Tensor? k_scale, float? k_scale_value, Tensor? v_scale, "
    f"float? v_scale_value, Tensor? tail_start, Tensor? token_base, {_PLAN}, bool deterministic, "
    "Tensor(a!) out, Tensor(b!)? lse, str backend",
)
def _sparse_attention_out(query, *rest):
    k_scale, v_scale, plan = _scale(*rest[9:11]), _scale(*rest[11:13]), unflatten_plan(*rest[15:17])
    deterministic, out, lse, backend = rest[17:]
    if query.shape[0]:
        dispatch.implementation("sparse_attention", backend, query.device)(
            query, *rest[:9], k_scale, v_scale, *rest[13:15], plan, deterministic, out, lse
        )


@_traces("sparse_attention")
def _trace_sparse_attention(backend, *args):
    scales = (*_flat_scale(args[10]), *_flat_scale(args[11]))
    torch.ops.flash_qsa.sparse_attention_out(
        *args[:10], *scales, *args[12:14], *flatten_plan(args[14]), *args[15:], backend
    )


def _like_attention(query, *args):
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), torch.empty(
        query.shape[:2], dtype=lse_dtype, device=query.device
    )


@_operator(
    "sparse_attention",
    f"{_ATTENDED}, Tensor? tail_start, Tensor? token_base, {_PLAN}, bool deterministic, "
    "str backend",
    "(Tensor, Tensor)",
    _like_attention,
)
def _sparse_attention(query, *rest):
    tail_start, token_base, tensors, sizes, deterministic, backend = rest[8:]
    out, lse = _like_attention(query)
    if query.shape[0]:
        dispatch.implementation("sparse_attention", backend, query.device)(
            query,
            *rest[:8],
            None,
            None,
            None,
            tail_start,
            token_base,
            unflatten_plan(tensors, sizes),
            deterministic,
            out,
            lse,
        )
    return out, lse


def _like_inputs(out_grad, lse_grad, query, keys, values, *args):
    return tuple(
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, keys, values)
    )


@_operator(
    "sparse_attention_backward",
    f"Tensor out_grad, Tensor? lse_grad, {_ATTENDED}, Tensor lse, Tensor? tail_start, "
    "Tensor? token_base",
    "(Tensor, Tensor, Tensor)",
    _like_inputs,
)
def _sparse_attention_backward(*args):
    return backward.sparse_attention_backward(*args)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7], output[1], *inputs[9:11])
    ctx.ratio, ctx.scale = inputs[7:9]
    # An empty list counts as a list of tensors, one of integers as a single argument.
    ctx.plan_grads = [None] * len(inputs[11]), None if inputs[12] else []


def _differentiate(ctx, out_grad, lse_grad):
    *attended, lse, tail_start, token_base = ctx.saved_tensors
    grads = torch.ops.flash_qsa.sparse_attention_backward(
        out_grad, lse_grad, *attended, ctx.ratio, ctx.scale, lse, tail_start, token_base
    )
    return (*grads, *[None] * 8, *ctx.plan_grads, None, None)


def _refuse_second(ctx, *grads):
    raise NotImplementedError("sparse_attention: second derivatives are not supported")


torch.library.register_autograd(
    "flash_qsa::sparse_attention", _differentiate, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd(
    "flash_qsa::sparse_attention_backward", _refuse_second, lib=_LIBRARY
)
