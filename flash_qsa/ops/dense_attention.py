"""dense_attention: causal grouped-query attention over a paged cache, QSA's oracle.

With visible ≤ K every block is selected and QSA equals this.
"""

from __future__ import annotations

import torch

from flash_qsa.ops.fp8 import from_storage
from flash_qsa.ops.norm import wide


def dense_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    *,
    scale: float | None = None,
    gate: torch.Tensor | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Every row attends all tokens of its request at or before its position.

    Shapes and dtypes as in `sparse_attention`; float64 is accepted too. One row at a time, without
    any schedule: slow, and hard to get wrong.

    Returns:
        [T, Hq, D] in query's dtype; zeros for rows without a request.
    """
    rows, heads, dim = query.shape
    kv_heads, page_size = kv_cache.shape[1:3]
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros_like(query)
    for row in range(rows):
        position, request = int(positions[row]), int(request_ids[row])
        if position < 0 or not 0 <= request < page_table.shape[0]:
            continue
        token = torch.arange(position + 1, device=query.device)
        pages = page_table[request].long()[token // page_size]
        kv = wide(from_storage(kv_cache[pages, :, token % page_size], _compute_dtype(query)))
        k, v = kv.repeat_interleave(heads // kv_heads, 1).chunk(2, -1)  # [tokens, Hq, D]
        scores = torch.einsum("hd,thd->ht", wide(query[row]), k * k_scale) * scale
        attn = torch.einsum("ht,thd->hd", scores.softmax(-1), v * v_scale).to(query.dtype)
        if gate is not None:
            attn = (wide(attn) * torch.sigmoid(wide(gate[row]))).to(query.dtype)
        out[row] = attn
    return out


def _compute_dtype(query: torch.Tensor) -> torch.dtype:
    return query.dtype if query.dtype == torch.float64 else torch.float32
