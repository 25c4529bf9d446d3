"""Gradients of sparse_attention in PyTorch, tile by tile, from the saved log-sum-exp.

A tile is a run of one request's rows with the union of their tokens, as in `reference.py`. Its
probabilities are computed again rather than stored, so that memory stays within `TILE_ELEMENTS`
probabilities whatever the number of rows. Each tile adds to distinct cells, and tiles follow one
another: the sums are the same in every run.

With P the probabilities, dP = dO · Vᵀ and δ the row sum of P ∘ dP (Dao et al. 2022, appendix B.4):
dV = Pᵀ · dO, dS = P ∘ (dP - δ + d lse), dQ = scale · dS · K, dK = scale · dSᵀ · Q.
"""

from __future__ import annotations

import math

import torch

from flash_qsa.ops.norm import wide
from flash_qsa.ops.sparse_attention.reference import ROWS_PER_TILE, attended_tokens, gather_cells

TILE_ELEMENTS = 1 << 24
"""Probabilities of a tile; a handful of arrays of this size live at a time."""


def sparse_attention_backward(
    out_grad: torch.Tensor,
    lse_grad: torch.Tensor | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_ids: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    compress_ratio: int,
    scale: float,
    lse: torch.Tensor,
    tail_start: torch.Tensor | None,
    token_base: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, keys and values, in their dtypes; sums in FP32 (float64 for float64).

    Args:
        out_grad: [T, Hq, D]. lse_grad: [T, Hq], or None where the log-sum-exp went unused.
        lse: [T, Hq], of the forward pass. The others as in `reference.sparse_attention`.
    """
    positions = positions.long()
    if tail_start is None:
        tail_start = (positions + 1) // compress_ratio * compress_ratio
    base = torch.zeros_like(positions) if token_base is None else token_base.long()
    query_grad = torch.zeros_like(query, memory_format=torch.contiguous_format)
    cells_k, cells_v = (wide(keys.new_zeros(keys.shape)) for _ in range(2))

    known = (request_ids >= 0) & (request_ids < page_table.shape[0]) & (positions >= 0)
    sequences = torch.stack((request_ids[known].long(), base[known])).unique(dim=1)
    for request, start in sequences.t().tolist():
        rows = (known & (request_ids == request) & (base == start)).nonzero().flatten()
        limit = rows_per_tile(
            query.shape[1],
            (block_ids.shape[1] + 1) * compress_ratio,
            int(positions[rows].max()) + 1,
        )
        for tile in rows.split(limit):
            tokens, attends = attended_tokens(
                block_ids[tile], positions[tile], tail_start[tile].long(), compress_ratio
            )
            k, v, pages, offsets = gather_cells(keys, values, page_table[request], tokens + start)
            found = pages >= 0
            grads = tile_gradients(
                wide(out_grad[tile]),
                None if lse_grad is None else lse_grad[tile],
                wide(query[tile]),
                k,
                v,
                attends & found,
                lse[tile],
                scale,
            )
            query_grad[tile] = grads[0].to(query.dtype)
            where = (pages[found], offsets[found])
            for cells, grad in ((cells_k, grads[1]), (cells_v, grads[2])):
                cells.transpose(1, 2).index_put_(
                    where, grad[:, found].transpose(0, 1), accumulate=True
                )
    return query_grad, cells_k.to(keys.dtype), cells_v.to(values.dtype)


def rows_per_tile(heads: int, row_tokens: int, sequence_tokens: int) -> int:
    """Rows whose union of tokens certainly keeps a tile within TILE_ELEMENTS; at least one."""
    if_disjoint = math.isqrt(TILE_ELEMENTS // (heads * row_tokens))
    if_everything = TILE_ELEMENTS // (heads * sequence_tokens)
    return min(max(1, if_disjoint, if_everything), ROWS_PER_TILE)


def tile_gradients(
    out_grad: torch.Tensor,
    lse_grad: torch.Tensor | None,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query [rows, Hq, D] and of k, v [Hkv, M, D] with mask [rows, M]."""
    rows, heads, dim = query.shape
    kv_heads, count = k.shape[:2]
    group = heads // kv_heads

    def by_kv_head(x: torch.Tensor) -> torch.Tensor:
        split = x.view(rows, kv_heads, group, -1).transpose(0, 1)
        return split.reshape(kv_heads, rows * group, -1)

    q, d_out = by_kv_head(query), by_kv_head(out_grad)
    peak = by_kv_head(lse.masked_fill(lse == float("-inf"), 0))  # rows that attend nothing
    hidden = ~mask.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill_(hidden, float("-inf"))
    weights = (scores - peak).exp_()
    v_grad = weights.transpose(1, 2) @ d_out
    d_weights = d_out @ v.transpose(1, 2)
    delta = (weights * d_weights).sum(-1, keepdim=True)
    if lse_grad is not None:
        delta -= by_kv_head(lse_grad)
    d_scores = weights.mul_(d_weights.sub_(delta)).mul_(scale)
    q_grad = (d_scores @ k).view(kv_heads, rows, group, dim).transpose(0, 1)
    return q_grad.reshape(rows, heads, dim), d_scores.transpose(1, 2) @ q, v_grad
