"""select_blocks in PyTorch: the specification.

Scores are computed in float64 and rounded once to FP32, so that they do not depend on how many
rows are scored together.
"""

from __future__ import annotations

import torch

from flash_qsa.ops.fp8 import from_storage
from flash_qsa.ops.paging import lookup_pages
from flash_qsa.plan import BatchPlan


def score_blocks(index_query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """FP32 scores [T, N] of compressed keys [N, Di] for index queries [T, Hi, Di] (float64)."""
    rows, heads, dim = index_query.shape
    dots = index_query.reshape(rows * heads, dim) @ keys.t()
    return dots.relu_().view(rows, heads, -1).sum(1).float()


def rank_keys(scores: torch.Tensor) -> torch.Tensor:
    """int64 [T, N]: larger means better under (score descending, id ascending), all distinct.

    Scores are never negative, so their bits order as integers; NaN becomes -1, below them all.
    """
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    bits = torch.where(scores.isnan(), -1, bits)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return (bits << 32) | (0xFFFFFFFF - ids)


def select_from_scores(
    scores: torch.Tensor,
    visible: torch.Tensor,
    top_k: int,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [T, K] ascending ids of the best candidates; -1 behind them.

    Args:
        scores: FP32 [T, N], not negative, or NaN.
        visible: [T], candidates are the ids below it (and from `first` on).
    """
    rows, count = scores.shape
    ids = torch.arange(count, device=scores.device)
    hidden = ids >= visible[:, None]
    if first is not None:
        hidden |= ids < first[:, None]
    ranks = rank_keys(scores).masked_fill(hidden, torch.iinfo(torch.int64).min)
    best, chosen = ranks.topk(min(top_k, count), dim=-1)
    chosen = chosen.masked_fill(best == torch.iinfo(torch.int64).min, count).sort(-1).values
    out = scores.new_full((rows, top_k), -1, dtype=torch.int32)
    out[:, : chosen.shape[1]] = chosen.masked_fill(chosen == count, -1)
    return out


def select_blocks(
    index_query: torch.Tensor,
    key_cache: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    visible_blocks: torch.Tensor,
    first_block: torch.Tensor | None,
    plan: BatchPlan | None,
    workspace: int | torch.Tensor,
    out: torch.Tensor,
) -> None:
    top_k, heads = out.shape[1], index_query.shape[1]
    first_block = torch.zeros_like(visible_blocks) if first_block is None else first_block.clamp(0)
    limit = workspace.numel() if isinstance(workspace, torch.Tensor) else workspace
    out.fill_(-1)

    candidates = visible_blocks - first_block
    everything = candidates <= top_k
    ids = torch.arange(top_k, dtype=torch.int32, device=out.device)
    out.copy_(torch.where(ids < candidates[:, None], first_block[:, None] + ids, -1))
    out.masked_fill_(~everything[:, None], -1)

    known = (request_ids >= 0) & (request_ids < page_table.shape[0])
    out.masked_fill_(~known[:, None], -1)
    for request in request_ids[known & ~everything].unique().tolist():
        rows = (known & ~everything & (request_ids == request)).nonzero().flatten()
        count = int(visible_blocks[rows].max())
        keys, missing = _gather_keys(key_cache, page_table[request], count)
        # FP64 dots of all heads, FP32 scores, and the ranks with their sorted copies
        chunk = max(1, limit // (count * (8 * heads + 4 + 4 * 8)))
        for part in rows.split(chunk):
            scores = score_blocks(from_storage(index_query[part], torch.float64), keys)
            scores[:, missing] = float("nan")
            out[part] = select_from_scores(scores, visible_blocks[part], top_k, first_block[part])


def _gather_keys(
    key_cache: torch.Tensor, page_row: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 keys [count, Di] of one request, and which blocks have no page."""
    page_blocks = key_cache.shape[1]
    blocks = torch.arange(count, device=key_cache.device)
    pages = lookup_pages(page_row, blocks // page_blocks, key_cache.shape[0])
    keys = from_storage(key_cache)[pages.clamp(min=0), blocks % page_blocks, 0].double()
    return keys, pages < 0
