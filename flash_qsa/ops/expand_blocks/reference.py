"""expand_blocks in PyTorch: the specification."""

from __future__ import annotations

import torch


def expand_blocks(
    block_ids: torch.Tensor,
    positions: torch.Tensor,
    visible_blocks: torch.Tensor,
    ratio: int,
    out: torch.Tensor,
) -> None:
    within = torch.arange(ratio, device=block_ids.device)
    live = (positions >= 0)[:, None]
    blocks_ok = live & (block_ids >= 0) & (block_ids < visible_blocks[:, None])
    block_tokens = block_ids.long()[..., None] * ratio + within
    tail_tokens = visible_blocks.long()[:, None] * ratio + within[: ratio - 1]
    tail_ok = live & (visible_blocks >= 0)[:, None] & (tail_tokens <= positions[:, None])

    tokens = torch.cat((block_tokens.flatten(1), tail_tokens), 1)
    valid = torch.cat((blocks_ok.repeat_interleave(ratio, 1), tail_ok), 1)
    order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)  # valid first, order kept
    out[:, :-1] = tokens.masked_fill(~valid, -1).gather(1, order)
    out[:, -1] = valid.sum(1)
