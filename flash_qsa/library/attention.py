"""Operators that read the state: selection, expansion and attention, with its gradients.

`sparse_attention` is differentiable, and therefore functional; `sparse_attention_out` is the same
op writing into a given buffer, with gate and FP8 scales.
"""

from __future__ import annotations

import torch

from flash_qsa import dispatch
from flash_qsa.library.registry import (
    LIBRARY,
    PLAN,
    flatten_scale,
    operator,
    traces,
    unflatten_scale,
)
from flash_qsa.ops.sparse_attention import backward
from flash_qsa.plan import flatten_plan, unflatten_plan


@operator(
    "select_blocks",
    "Tensor index_query, Tensor key_cache, Tensor page_table, Tensor request_ids, "
    f"Tensor visible_blocks, Tensor? first_block, {PLAN}, Tensor(b!)? workspace, "
    "SymInt workspace_bytes, Tensor(a!) out, str backend",
)
def _select_blocks(a):
    if a.out.shape[0]:
        dispatch.implementation("select_blocks", a.backend, a.index_query.device)(
            a.index_query,
            a.key_cache,
            a.page_table,
            a.request_ids,
            a.visible_blocks,
            a.first_block,
            unflatten_plan(a.plan_tensors, a.plan_sizes),
            a.workspace_bytes if a.workspace is None else a.workspace,
            a.out,
        )


@traces("select_blocks")
def _trace_select_blocks(backend, *given):
    *tensors, plan, workspace, out = given
    buffer = workspace if isinstance(workspace, torch.Tensor) else None
    torch.ops.flash_qsa.select_blocks(
        *tensors,
        *flatten_plan(plan),
        buffer,
        0 if buffer is not None else workspace,
        out,
        backend,
    )


@operator(
    "expand_blocks",
    "Tensor block_ids, Tensor positions, Tensor visible_blocks, SymInt compress_ratio, "
    "Tensor(a!) out, str backend",
)
def _expand_blocks(a):
    if a.out.shape[0]:
        dispatch.implementation("expand_blocks", a.backend, a.block_ids.device)(
            a.block_ids, a.positions, a.visible_blocks, a.compress_ratio, a.out
        )


@traces("expand_blocks")
def _trace_expand_blocks(backend, *given):
    torch.ops.flash_qsa.expand_blocks(*given, backend)


_ATTENDED = (
    "Tensor query, Tensor keys, Tensor values, Tensor block_ids, Tensor positions, "
    "Tensor page_table, Tensor request_ids, SymInt compress_ratio, float scale"
)


@operator(
    "sparse_attention_out",
    f"{_ATTENDED}, Tensor? gate, Tensor? k_scale, float? k_scale_value, Tensor? v_scale, "
    f"float? v_scale_value, Tensor? tail_start, Tensor? token_base, {PLAN}, bool deterministic, "
    "Tensor(a!) out, Tensor(b!)? lse, str backend",
)
def _sparse_attention_out(a):
    if a.query.shape[0]:
        _attend(a, a.gate, a.k_scale, a.k_scale_value, a.v_scale, a.v_scale_value, a.out, a.lse)


def _attend(a, gate, k_scale, k_scale_value, v_scale, v_scale_value, out, lse):
    dispatch.implementation("sparse_attention", a.backend, a.query.device)(
        a.query,
        a.keys,
        a.values,
        a.block_ids,
        a.positions,
        a.page_table,
        a.request_ids,
        a.compress_ratio,
        a.scale,
        gate,
        unflatten_scale(k_scale, k_scale_value),
        unflatten_scale(v_scale, v_scale_value),
        a.tail_start,
        a.token_base,
        unflatten_plan(a.plan_tensors, a.plan_sizes),
        a.deterministic,
        out,
        lse,
    )


@traces("sparse_attention")
def _trace_sparse_attention(backend, *given):
    *attended, k_scale, v_scale, tail_start, token_base, plan, deterministic, out, lse = given
    torch.ops.flash_qsa.sparse_attention_out(
        *attended,
        *flatten_scale(k_scale),
        *flatten_scale(v_scale),
        tail_start,
        token_base,
        *flatten_plan(plan),
        deterministic,
        out,
        lse,
        backend,
    )


def _like_attention(query, *args):
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), torch.empty(
        query.shape[:2], dtype=lse_dtype, device=query.device
    )


@operator(
    "sparse_attention",
    f"{_ATTENDED}, Tensor? tail_start, Tensor? token_base, {PLAN}, bool deterministic, str backend",
    "(Tensor, Tensor)",
    _like_attention,
)
def _sparse_attention(a):
    out, lse = _like_attention(a.query)
    if a.query.shape[0]:
        _attend(a, None, None, None, None, None, out, lse)
    return out, lse


def _like_inputs(out_grad, lse_grad, query, keys, values, *args):
    return tuple(
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, keys, values)
    )


@operator(
    "sparse_attention_backward",
    f"Tensor out_grad, Tensor? lse_grad, {_ATTENDED}, Tensor lse, Tensor? tail_start, "
    "Tensor? token_base",
    "(Tensor, Tensor, Tensor)",
    _like_inputs,
)
def _sparse_attention_backward(a):
    return backward.sparse_attention_backward(**vars(a))


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
    "flash_qsa::sparse_attention", _differentiate, setup_context=_save, lib=LIBRARY
)
torch.library.register_autograd("flash_qsa::sparse_attention_backward", _refuse_second, lib=LIBRARY)
