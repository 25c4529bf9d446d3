"""One QSA layer of a transformers model, on flash-qsa's ops.

The layer's own modules project and normalise, so adapters, quantised weights and parallel plans
keep working, and the cache's own methods keep keys and values, so cropping, reordering and
offloading do too.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_qsa.integrations.transformers.cache import GrowingIndexedLayer, adopt
from flash_qsa.integrations.transformers.layout import TokenLayout
from flash_qsa.integrations.transformers.pooling import pool_keys, rotate
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
    adopt(cache, module.layer_idx)
    with torch.no_grad():
        block_ids = _select(module.indexer, hidden_states, cos, sin, layout, cache)

    heads = (batch, length, -1, module.head_dim)
    query, gate = module.q_proj(hidden_states).view(*heads[:3], 2 * module.head_dim).chunk(2, -1)
    current = cos[:, -length:, None], sin[:, -length:, None]
    query = rotate(module.q_norm(query), *current)
    key = rotate(module.k_norm(module.k_proj(hidden_states).view(heads)), *current).transpose(1, 2)
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
    query = rotate(query, cos[:, -length:, None], sin[:, -length:, None])
    layer = None if cache is None else cache.layers[indexer.layer_idx]
    pool = layer.compressed_keys if isinstance(layer, GrowingIndexedLayer) else pool_keys
    pooled = pool(indexer, raw_keys, cos, sin, layout)
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


def _take(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """States [B, H, L, D] with the tokens of every row in `order` [B, L]."""
    index = order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
