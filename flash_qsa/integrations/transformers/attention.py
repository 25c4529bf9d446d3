"""One QSA layer of a transformers model, on flash-qsa's ops.

The layer's own modules project and normalise, so adapters, quantised weights and parallel plans
keep working, and the cache's own methods keep keys and values, so cropping, reordering and
offloading do too.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_qsa.integrations.transformers.layout import TokenLayout
from flash_qsa.ops import select_blocks, sparse_attention


def qsa_attention(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    layout: TokenLayout,
    cache: Any | None,
) -> torch.Tensor:
    """Output of `Qwen4ExpTextAttention` for hidden states [B, Q, hidden].

    Args:
        module: the attention module with its indexer.
        position_embeddings: cos and sin [B, tokens, rotary dims] of all tokens seen, the queries'
            last.
        layout: who sees what.
        cache: transformers' cache, or None.
    """
    batch, length, _ = hidden_states.shape
    cos, sin = (table.expand(batch, -1, -1) for table in position_embeddings)
    with torch.no_grad():
        block_ids = _select(module.indexer, hidden_states, cos, sin, layout, cache)

    heads = (batch, length, -1, module.head_dim)
    query, gate = module.q_proj(hidden_states).view(*heads[:3], 2 * module.head_dim).chunk(2, -1)
    current = cos[:, -length:, None], sin[:, -length:, None]
    query = _rotate(module.q_norm(query), *current)
    key = _rotate(module.k_norm(module.k_proj(hidden_states).view(heads)), *current).transpose(1, 2)
    value = module.v_proj(hidden_states).view(heads).transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    if layout.order is not None:
        key, value = (_take(states, layout.order) for states in (key, value))

    # Under autocast the rotation promotes to the table's dtype; attention runs in the projection's.
    out = sparse_attention(
        query.flatten(0, 1).to(value.dtype),
        (key.to(value.dtype), value),
        block_ids,
        layout.positions,
        layout.page_table,
        layout.request_ids,
        compress_ratio=layout.compress_ratio,
        scale=module.scaling,
        token_base=layout.token_base,
    )
    out = out.reshape(batch, length, -1)
    return module.o_proj(out * torch.sigmoid(gate.reshape(batch, length, -1)))


def _select(
    indexer: torch.nn.Module,
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: TokenLayout,
    cache: Any | None,
) -> torch.Tensor:
    """int32 [B·Q, K] blocks of every query, counted from its own first block."""
    batch, length, _ = hidden_states.shape
    dim = indexer.index_head_dim
    query, raw_keys = indexer.index_qk_proj(hidden_states).split(
        [indexer.index_n_heads * dim, dim], dim=-1
    )
    if cache is not None:
        raw_keys = cache.update_indexer(raw_keys, indexer.layer_idx)
    if raw_keys.shape[1] // layout.compress_ratio <= indexer.block_topk:
        return _all_blocks(layout, indexer.block_topk)

    query = indexer.q_layernorm(query.reshape(batch, length, -1, dim))
    query = _rotate(query, cos[:, -length:, None], sin[:, -length:, None])
    pooled = pool_keys(indexer, raw_keys, cos, sin, layout)
    block_ids = select_blocks(
        query.flatten(0, 1),
        pooled[:, :, None],
        layout.page_table,
        layout.request_ids,
        layout.visible_blocks,
        indexer.block_topk,
        first_block=layout.first_block,
    )
    if layout.first_block is None:
        return block_ids
    return torch.where(block_ids >= 0, block_ids - layout.first_block[:, None], -1)


def _all_blocks(layout: TokenLayout, top_k: int) -> torch.Tensor:
    """The selection where no row can have more than `top_k` blocks: nothing is scored."""
    ids = torch.arange(top_k, dtype=torch.int32, device=layout.positions.device)
    complete = (layout.positions + 1) // layout.compress_ratio
    return torch.where(ids < complete[:, None], ids, -1)


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
    return _rotate(pooled, cos.gather(1, first), sin.gather(1, first))


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the leading channels, in the dtype of the states and the table.

    Every product is rounded to that dtype, unlike in `flash_qsa.ops.rotary`, because that is what
    the model was trained and is tested with here.
    """
    width = cos.shape[-1]
    leading, rest = states[..., :width], states[..., width:]
    low, high = leading.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return torch.cat((leading * cos + turned * sin, rest), dim=-1)


def _take(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """States [B, H, L, D] with the tokens of every row in `order` [B, L]."""
    index = order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
