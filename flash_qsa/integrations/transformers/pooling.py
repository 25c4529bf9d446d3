"""Compressed keys of cached tokens, and the rotary embedding as Qwen4-Exp's modules compute it."""

from __future__ import annotations

import torch

from flash_qsa.integrations.transformers.layout import TokenLayout


def pool_keys(
    indexer: torch.nn.Module,
    raw_keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: TokenLayout,
) -> torch.Tensor:
    """Compressed keys [B, N, Di] of every slot; slots without a complete block hold anything.

    Args:
        raw_keys: [B, L, Di], all cached tokens.
    """
    ratio, (batch, tokens, dim) = layout.compress_ratio, raw_keys.shape
    if layout.block_start is None:
        count = tokens // ratio
        groups = raw_keys[:, : count * ratio].unflatten(1, (count, ratio))
        first = torch.arange(count, device=raw_keys.device).expand(batch, -1) * ratio
    else:
        member = torch.arange(ratio, device=raw_keys.device)
        cells = (layout.block_start[..., None] + member).clamp(max=tokens - 1).flatten(1)
        cells = cells if layout.order is None else layout.order.gather(1, cells)
        groups = raw_keys.gather(1, cells[..., None].expand(-1, -1, dim))
        groups = groups.unflatten(1, (-1, ratio))
        first = cells[:, ::ratio]
    pooled = indexer.k_layernorm(groups.float().mean(2).to(raw_keys.dtype))
    # A static cache has cells that no position has reached yet.
    first = first.clamp(max=cos.shape[1] - 1)[..., None].expand(-1, -1, cos.shape[2])
    return rotate(pooled, cos.gather(1, first), sin.gather(1, first))


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the leading channels, in the dtype of the states and the table.

    Every product is rounded to that dtype, unlike in `flash_qsa.ops.rotary`, because that is what
    the model was trained and is tested with here.
    """
    width = cos.shape[-1]
    leading, rest = states[..., :width], states[..., width:]
    low, high = leading.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return torch.cat((leading * cos + turned * sin, rest), dim=-1)
