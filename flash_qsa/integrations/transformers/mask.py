"""The attention mask of the "qsa" implementation: who sees what, without a matrix.

transformers asks a registered function for the mask of a forward pass. Its own are boolean
[B, 1, Q, L]; ours keeps the rules they are made of, which is all that QSA needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from flash_qsa.integrations.transformers.layout import (
    TokenLayout,
    causal_layout,
    gathered_layout,
    move,
    packed_layout,
    run_layout,
)


@dataclass
class CompactMask:
    """Query q of row b sees token k when k is valid, not after q, and of q's sequence.

    Attributes:
        layout: the same rules as the ops take them.
        kv_length: L, cells of the cache.
        query_index: int64 [Q], place of each query among the cached tokens.
        valid: bool [B, L], or None where every token is.
        segment_start: int64 [B, Q], first token of the query's packed sequence, or None.
    """

    layout: TokenLayout
    kv_length: int
    query_index: torch.Tensor
    valid: torch.Tensor | None = None
    segment_start: torch.Tensor | None = None

    def to(self, device: Any, **kwargs: Any) -> CompactMask:
        """Follows a module to another device, as accelerate moves the arguments of a layer."""
        return move(self, device, **kwargs)

    def contiguous(self) -> CompactMask:
        """Nothing to do; `generate` of transformers before 5.24 calls this on any mask."""
        return self

    def to_dense(self) -> torch.Tensor:
        """The bool mask [B, 1, Q, L] that transformers' own attention takes."""
        token = torch.arange(self.kv_length, device=self.query_index.device)
        batch = self.layout.page_table.shape[0]
        seen = (token <= self.query_index[:, None]).expand(batch, -1, -1)
        if self.valid is not None:
            seen = seen & self.valid[:, None, :]
        if self.segment_start is not None:
            seen = seen & (token >= self.segment_start[..., None])
        return seen[:, None]


def qsa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> CompactMask | torch.Tensor | None:
    """Mask function of the "qsa" attention implementation.

    Returns:
        A `CompactMask` for a Qwen4-Exp text model whose mask is causal, with 2-D padding or packed
        sequences; otherwise transformers' dense mask, with which its own attention runs.
    """
    ratio = getattr(config, "indexer_compress_ratio", None)
    compact = ratio is not None and not use_vmap and isinstance(kv_offset, int) and kv_offset == 0
    plain = mask_function is causal_mask_function
    tracing = torch.compiler.is_compiling()
    if compact and not plain:
        compact = attention_mask is None and q_length == kv_length
        # Only a mask that never looks ahead can be described by where sequences start.
        compact = compact and (tracing or not _looks_ahead(mask_function, q_length, device))
    if compact and attention_mask is not None:
        # More tokens than the model has seen: a prefix that no cache holds.
        compact = attention_mask.dim() == 2 and q_length <= kv_length
    if not compact:
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            config=config,
            **kwargs,
        )

    # A sum, not a view: a static cache's offset is a counter that the layers then advance.
    query_index = torch.arange(q_length, device=device) + q_offset
    if not plain:
        start = _segment_starts(mask_function, batch_size, q_length, device)
        layout = packed_layout(start, ratio)
        return CompactMask(layout, kv_length, query_index, segment_start=start)
    if attention_mask is None:
        layout = causal_layout(query_index, batch_size, kv_length, ratio)
        return CompactMask(layout, kv_length, query_index)
    valid = attention_mask[:, :kv_length].to(device=device, dtype=torch.bool)
    valid = torch.nn.functional.pad(valid, (0, kv_length - valid.shape[1]))
    layout = _padded_layout(query_index, valid, ratio, tracing)
    return CompactMask(layout, kv_length, query_index, valid=valid)


def _padded_layout(
    query_index: torch.Tensor, valid: torch.Tensor, ratio: int, tracing: bool
) -> TokenLayout:
    """The cheapest layout for a padding mask.

    Valid tokens nearly always form one run per row, and then no token has to move. Seeing that
    takes one read of the device per forward pass, which a traced program cannot do.
    """
    if tracing:
        return gathered_layout(query_index, valid, ratio)
    batch, kv_length = valid.shape
    count = valid.sum(1)
    start = valid.to(torch.uint8).argmax(1)
    token = torch.arange(kv_length, device=valid.device)
    run = (token >= start[:, None]) & (token < (start + count)[:, None])
    # A query behind the last valid token still sees every valid token, so runs at the front
    # equal plain causality only while no query is behind them.
    plain = (start == 0).all() & (count[:, None] > query_index).all()
    facts = torch.stack(((run == valid).all(), plain))
    is_run, is_plain, *starts = torch.cat((facts.long(), start)).tolist()
    if not is_run:
        return gathered_layout(query_index, valid, ratio)
    if is_plain:
        return causal_layout(query_index, batch, kv_length, ratio)
    return run_layout(query_index, start, count, kv_length, ratio, tuple(starts))


def _looks_ahead(mask_function: Callable, length: int, device: torch.device | str) -> bool:
    """Whether any token sees its successor (one read of the device)."""
    token = torch.arange(length - 1, device=device)[None, None, :]
    zero = torch.zeros(1, dtype=torch.int64, device=device)[:, None, None]
    return bool(mask_function(zero, zero, token, token + 1).any())


def _segment_starts(
    mask_function: Callable, batch: int, length: int, device: torch.device | str
) -> torch.Tensor:
    """int64 [B, Q]: a sequence starts where a token does not see its predecessor."""
    rows = torch.arange(batch, device=device)[:, None]
    token = torch.arange(length, device=device)[None, :]
    before = mask_function(rows, torch.zeros_like(rows), token, (token - 1).clamp(min=0))
    before = before.expand(batch, length)
    return torch.where(before & (token > 0), 0, token).cummax(1).values
