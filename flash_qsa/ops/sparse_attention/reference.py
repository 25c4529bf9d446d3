"""sparse_attention in PyTorch: the specification.

Consecutive rows of one request are taken together: the union of their tokens is gathered once and
a mask says which row attends which token. With `deterministic` a tile is one row, so that a row's
arithmetic never depends on its neighbours.
"""

from __future__ import annotations

import torch

from flash_qsa.ops.fp8 import from_storage
from flash_qsa.ops.norm import wide
from flash_qsa.ops.paging import lookup_pages
from flash_qsa.plan import BatchPlan

ROWS_PER_TILE = 128


def sparse_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_ids: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    ratio: int,
    scale: float,
    gate: torch.Tensor | None,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    tail_start: torch.Tensor | None,
    token_base: torch.Tensor | None,
    plan: BatchPlan | None,
    deterministic: bool,
    out: torch.Tensor,
    lse_out: torch.Tensor | None,
) -> None:
    positions = positions.long()
    if tail_start is None:
        tail_start = (positions + 1) // ratio * ratio
    scale = scale if k_scale is None else scale * k_scale
    attending = torch.zeros_like(positions, dtype=torch.bool)
    out.zero_()
    if lse_out is not None:
        lse_out.fill_(float("-inf"))

    base = torch.zeros_like(positions) if token_base is None else token_base.long()
    known = (request_ids >= 0) & (request_ids < page_table.shape[0]) & (positions >= 0)
    span = int(base.max()) + 1
    sequence = torch.where(known, request_ids.long() * span + base, -1)
    for number in sequence.unique().tolist():
        if number < 0:
            continue
        request, start = divmod(number, span)
        rows = (sequence == number).nonzero().flatten()
        tiles = list(rows.split(1 if deterministic else ROWS_PER_TILE))
        while tiles:
            tile = tiles.pop()
            tokens, attends = attended_tokens(
                block_ids[tile], positions[tile], tail_start[tile].long(), ratio
            )
            k, v, pages, _ = gather_cells(keys, values, page_table[request], tokens + start)
            attends &= pages >= 0
            attending[tile] = attends.any(1)
            attn, lse = attend(query[tile], k, v, attends, scale, lse_out is not None)
            if len(tile) > 1 and not attn.isfinite().all():
                tiles += tile.split(1)  # zero times NaN reached rows that do not attend it
                continue
            attn = attn if v_scale is None else attn * v_scale
            out[tile] = attn.to(out.dtype)
            if lse is not None:
                lse_out[tile] = lse.to(lse_out.dtype)
    if gate is not None:  # an empty row stays zero whatever its gate holds
        gated = (wide(out) * torch.sigmoid(wide(gate))).to(out.dtype)
        out.copy_(gated.where(attending[:, None, None], 0))


def attended_tokens(
    block_ids: torch.Tensor, positions: torch.Tensor, tail_start: torch.Tensor, ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Union of the rows' tokens, ascending int64 [M], and who attends what, bool [rows, M]."""
    rows, end = block_ids.shape[0], int(positions.max()) + 1
    block_ids = block_ids.long()  # an id of 2^30 must not wrap around to a small token
    blocks = -(-end // ratio)
    chosen = torch.zeros(rows, blocks + 1, dtype=torch.bool, device=block_ids.device)
    allowed = (block_ids >= 0) & ((block_ids + 1) * ratio <= tail_start[:, None])
    allowed &= (block_ids + 1) * ratio <= positions[:, None] + 1
    chosen.scatter_(1, block_ids.where(allowed, blocks), True)
    attends = chosen[:, :blocks].repeat_interleave(ratio, 1)[:, :end]
    token = torch.arange(end, device=block_ids.device)
    attends |= (token >= tail_start[:, None]) & (token <= positions[:, None])
    tokens = attends.any(0).nonzero().flatten()
    return tokens, attends.index_select(1, tokens)


def attend(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | torch.Tensor,
    want_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Masked attention of query [rows, Hq, D] over k, v [Hkv, M, D] with mask [rows, M].

    Returns the unrounded output [rows, Hq, D] and log-sum-exp [rows, Hq]. Probabilities, relative
    to the row's largest, are rounded to query's dtype before the second product, as matrix units
    take them.
    """
    rows, heads, dim = query.shape
    kv_heads, count = k.shape[:2]
    group = heads // kv_heads
    q = (wide(query) * scale).view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    scores = q.reshape(kv_heads, group * rows, dim) @ k.transpose(1, 2)
    scores = scores.view(kv_heads, group, rows, count)
    empty = ~mask.any(1)  # their softmax would be NaN; they keep their scores and lose them below
    scores.masked_fill_(~(mask | empty[:, None]), float("-inf"))
    lse = None
    if want_lse:
        lse = scores.logsumexp(-1).masked_fill(empty, float("-inf"))
        lse = lse.permute(2, 0, 1).reshape(rows, heads)
    weights = scores.softmax(-1)
    if query.dtype != weights.dtype and count:
        largest = weights.amax(-1, keepdim=True)
        weights = wide((weights / largest).to(query.dtype)) * largest
    attn = (weights.view(kv_heads, group * rows, count) @ v).view(kv_heads, group, rows, dim)
    attn = attn.masked_fill(empty[:, None], 0).permute(2, 0, 1, 3).reshape(rows, heads, dim)
    return attn, lse


def gather_cells(
    keys: torch.Tensor, values: torch.Tensor, page_row: torch.Tensor, cells: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP32 keys and values [Hkv, M, D] of logical cells [M], then their pages and offsets [M].

    Cells without a page (-1) come back as zeros: their memory is not to be trusted.
    """
    pages = lookup_pages(page_row, cells // keys.shape[2], keys.shape[0])
    offsets = cells % keys.shape[2]
    where = (pages.clamp(min=0), slice(None), offsets)
    k, v = (wide(from_storage(cache[where], _compute_dtype(cache))) for cache in (keys, values))
    keep = (pages >= 0)[:, None, None]
    return k.where(keep, 0).transpose(0, 1), v.where(keep, 0).transpose(0, 1), pages, offsets


def _compute_dtype(cache: torch.Tensor) -> torch.dtype:
    return cache.dtype if cache.dtype == torch.float64 else torch.float32
