"""sparse_attention: grouped-query attention over selected blocks and the open group."""

from __future__ import annotations

import math

import torch

from flash_qsa import dispatch
from flash_qsa.checks import (
    E4M3_DTYPES,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    INT32,
    Axes,
    Scale,
    UnsupportedError,
    expect_contiguous_last,
    expect_device,
    expect_dtype,
    expect_out,
    expect_placed,
    expect_positive,
    expect_scale,
)
from flash_qsa.ops.norm import wide
from flash_qsa.plan import BatchPlan, flatten_plan


def sparse_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_ids: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    *,
    compress_ratio: int,
    scale: float | None = None,
    gate: torch.Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    tail_start: torch.Tensor | None = None,
    token_base: torch.Tensor | None = None,
    plan: BatchPlan | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q · Kᵀ) · V over each row's tokens, optionally times sigmoid(gate).

    Row t attends the tokens of its blocks, b · C … b · C + C - 1, and its open group,
    tail_start[t] … positions[t]. Blocks that reach tail_start or beyond contribute nothing, so a
    row never attends a token after its own position, nor one token twice. Neither do -1, ids and
    tokens without a page, and rows whose request or position is negative. A row that attends
    nothing gives zeros and a log-sum-exp of -inf.

    Args:
        query: [T, Hq, D] in BF16, FP16 or FP32; normed and rotated.
        kv_cache: [P, Hkv, S, 2·D], keys in the first D channels and values behind them, in query's
            dtype or FP8 (float8_e4m3fn, or its bytes in uint8); or a pair (keys, values), each
            [P, Hkv, S, D]. Any strides with a contiguous last axis. S is a multiple of C unless
            token_base is given.
        block_ids: int32 [T, K], in any order, with holes or not, each block at most once.
        positions: int32 or int64 [T], logical position of each row.
        page_table: int32 [R, n]. request_ids: int32 [T].
        compress_ratio: C, tokens a block.
        scale: softmax scale, D ** -0.5 by default.
        gate: [T, Hq, D]; the output is rounded to query's dtype, then multiplied by sigmoid(gate)
            in FP32 and rounded again.
        k_scale, v_scale: per-tensor FP8 scales, a float or a one-element FP32 tensor (which is
            read on the device, so that a captured graph sees later values). Refused for caches
            that are not FP8.
        tail_start: int32 or int64 [T], first token of the open group; by default
            (positions + 1) // C · C. Draft steps that reuse an older selection pass the tail start
            of the step that made it.
        token_base: int32 or int64 [T], added to logical tokens before the page lookup; for keys
            that do not start at their page table's first cell. 0 by default.
        plan: the step's batch, whose host integers choose a schedule; never changes what is
            attended.
        return_lse: also return the natural log-sum-exp of the scaled scores, FP32 [T, Hq].
        deterministic: the result of a row does not depend on the rest of the batch, bit for bit.
            Without it, repeating a call still gives the same bits.
        out: [T, Hq, D] to fill.

    Returns:
        [T, Hq, D] in query's dtype (and the log-sum-exp). Where gradients are enabled and query,
        kv_cache or gate require them the result is differentiable, once; block ids never are.

    Raises:
        ValueError: shapes, strides, devices or sizes that do not fit; `out` with gradients.
        UnsupportedError: a dtype that is not listed; an FP8 cache with gradients.
    """
    keys, values = _split_cache(kv_cache)
    axes = Axes()
    axes.shape("query", query, ("T", "Hq", "D"))
    axes.shape("kv_cache", keys, ("P", "Hkv", "S", "D"))
    axes.shape("kv_cache", values, ("P", "Hkv", "S", "D"))
    axes.shape("block_ids", block_ids, ("T", "K"))
    axes.shape("positions", positions, ("T",))
    axes.shape("page_table", page_table, ("R", "n"))
    axes.shape("request_ids", request_ids, ("T",))
    if gate is not None:
        axes.shape("gate", gate, ("T", "Hq", "D"))
        expect_dtype("gate", gate, (query.dtype,))
    expect_dtype("query", query, FLOAT_DTYPES)
    expect_dtype("kv_cache", keys, (query.dtype, *E4M3_DTYPES))
    expect_dtype("kv_cache", values, (keys.dtype,))
    expect_dtype("block_ids", block_ids, INT32)
    expect_dtype("page_table", page_table, INT32)
    expect_dtype("request_ids", request_ids, INT32)
    expect_dtype("positions", positions, INDEX_DTYPES)
    device = query.device
    for name, tensor in (("tail_start", tail_start), ("token_base", token_base)):
        if tensor is not None:
            axes.shape(name, tensor, ("T",))
            expect_dtype(name, tensor, INDEX_DTYPES)
            expect_device(name, tensor, device)
    expect_contiguous_last("query", query)
    expect_placed("kv_cache", keys, device)
    expect_placed("kv_cache", values, device)
    expect_device("block_ids", block_ids, device)
    expect_device("positions", positions, device)
    expect_device("page_table", page_table, device)
    expect_device("request_ids", request_ids, device)
    if gate is not None:
        expect_device("gate", gate, device)
    expect_positive("compress_ratio", compress_ratio)
    _, heads, dim = query.shape
    _, kv_heads, page_size, _ = keys.shape
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query: {heads} heads are not a multiple of kv_cache's {kv_heads}")
    if token_base is None and page_size % compress_ratio:
        raise ValueError(
            f"kv_cache: a page of {page_size} tokens is not a multiple of compress_ratio "
            f"{compress_ratio}"
        )
    scale = dim**-0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    expect_scale("k_scale", k_scale, keys.dtype, device)
    expect_scale("v_scale", v_scale, keys.dtype, device)

    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, keys, values, gate)
    ):
        if keys.dtype != query.dtype:
            raise UnsupportedError(
                f"kv_cache: dtype {keys.dtype} is not differentiable; expected {query.dtype}"
            )
        if out is not None:
            raise ValueError("out: a result that requires grad cannot be written to a buffer")
        attn, lse = torch.ops.flash_qsa.sparse_attention(
            query,
            keys,
            values,
            block_ids,
            positions,
            page_table,
            request_ids,
            compress_ratio,
            scale,
            tail_start,
            token_base,
            *flatten_plan(plan),
            deterministic,
            backend,
        )
        attn = attn if gate is None else _gated(attn, gate, lse)
        return (attn, lse) if return_lse else attn

    if out is None:
        out = query.new_empty(query.shape)
    else:
        expect_out(out, query.shape, query.dtype, device)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    if query.shape[0]:
        dispatch.implementation("sparse_attention", backend, device)(
            query,
            keys,
            values,
            block_ids,
            positions,
            page_table,
            request_ids,
            compress_ratio,
            scale,
            gate,
            k_scale,
            v_scale,
            tail_start,
            token_base,
            plan,
            deterministic,
            out,
            lse,
        )
    return (out, lse) if return_lse else out


def _gated(attn: torch.Tensor, gate: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """attn · sigmoid(gate), differentiable; an empty row stays zero whatever its gate holds."""
    gate = gate.masked_fill((lse == float("-inf"))[..., None], 0)
    return (wide(attn) * torch.sigmoid(wide(gate))).to(attn.dtype)


def _split_cache(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(kv_cache, torch.Tensor):
        keys, values = kv_cache
        return keys, values
    if kv_cache.dim() != 4 or kv_cache.shape[-1] % 2:
        raise ValueError(f"kv_cache: expected shape [P, Hkv, S, 2·D], got {list(kv_cache.shape)}")
    return kv_cache.chunk(2, dim=-1)
