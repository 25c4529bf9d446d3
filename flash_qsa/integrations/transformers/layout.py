"""Where the tokens and blocks of a padded or packed batch lie, for ops that think in requests.

transformers keeps one rectangle of tokens per batch row; QSA counts *visible* tokens: padding and
other packed sequences do not exist for a query. A `TokenLayout` translates. Batch row b is request
b, and the row's whole rectangle is one page. A query's `position` is its rank among its visible
tokens, and blocks live in *slots* of the row: with several packed sequences, sequence by sequence.

Everything is a tensor of static shape, computed on the device once per forward pass and shared by
all layers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class TokenLayout:
    """Row t is query t % Q of batch row t // Q; B rows of the batch, L cached tokens, N slots.

    Attributes:
        compress_ratio: C.
        positions: int64 [B·Q], visible tokens up to the query, less one; -1 where there are none.
        request_ids: int32 [B·Q], the batch row.
        page_table: int32 [B, 1]: request b's only page is b.
        visible_blocks: int32 [B·Q], the slot behind the query's last complete block.
        token_base: int64 [B·Q], cell of position 0.
        first_block: int32 [B·Q], the slot of its first block, or None for 0.
        block_start: int64 [B, N], cell of the first token in each slot; None where slot n starts
            at cell n · C.
        order: int64 [B, L], the cached token that each cell holds; None where cell and token agree.
        run_starts: per batch row, its first visible token, where all later cached tokens belong to
            the same sequence in order and this is known on the host: blocks then stay where they
            are as the cache grows. None otherwise.
    """

    compress_ratio: int
    positions: torch.Tensor
    request_ids: torch.Tensor
    page_table: torch.Tensor
    visible_blocks: torch.Tensor
    token_base: torch.Tensor
    first_block: torch.Tensor | None = None
    block_start: torch.Tensor | None = None
    order: torch.Tensor | None = None
    run_starts: tuple[int, ...] | None = None

    def to(self, device: Any, **kwargs: Any) -> TokenLayout:
        return move(self, device, **kwargs)


def move(record: Any, device: Any, **kwargs: Any) -> Any:
    """A copy of a dataclass whose tensors (and nested layouts) lie on `device`."""
    moved = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, (torch.Tensor, TokenLayout)):
            moved[field.name] = value.to(device, **kwargs)
    return dataclasses.replace(record, **moved)


def slots_of(kv_length: int, ratio: int) -> int:
    """N: blocks that fit a row of `kv_length` tokens; at least one, for kernels' sake."""
    return max(1, kv_length // ratio)


def causal_layout(query_index: torch.Tensor, batch: int, kv_length: int, ratio: int) -> TokenLayout:
    """Every cached token is visible.

    Args:
        query_index: int64 [Q], place of each query among the cached tokens.
    """
    positions = query_index.expand(batch, -1)
    start = None
    if kv_length < ratio:
        start = torch.zeros(batch, 1, dtype=torch.int64, device=query_index.device)
    return _layout(positions, ratio, block_start=start, run_starts=(0,) * batch)


def run_layout(
    query_index: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    kv_length: int,
    ratio: int,
    run_starts: tuple[int, ...] | None = None,
) -> TokenLayout:
    """Row b sees the tokens start[b] … start[b] + count[b] - 1: left and right padding.

    Args:
        query_index: int64 [Q]. start, count: int64 [B]. run_starts: `start` on the host.
    """
    seen = (query_index + 1 - start[:, None]).minimum(count[:, None]).clamp(min=0)
    slots = torch.arange(slots_of(kv_length, ratio), device=start.device)
    return _layout(
        seen - 1,
        ratio,
        token_base=start[:, None].expand_as(seen),
        block_start=start[:, None] + slots * ratio,
        run_starts=run_starts,
    )


def gathered_layout(query_index: torch.Tensor, valid: torch.Tensor, ratio: int) -> TokenLayout:
    """Row b sees the tokens that `valid` [B, L] marks, wherever they are.

    Cells hold the visible tokens first, in order, so keys and values must be gathered by `order`.
    """
    seen = valid.long().cumsum(1)[:, query_index]
    order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)
    slots = torch.arange(slots_of(valid.shape[1], ratio), device=valid.device)
    start = (slots * ratio).expand(valid.shape[0], -1)
    return _layout(seen - 1, ratio, block_start=start, order=order)


def packed_layout(segment_start: torch.Tensor, ratio: int) -> TokenLayout:
    """Query t sees the tokens from segment_start[b, t] on: sequences packed into a row.

    A sequence that starts at token s has its blocks in slots s // C, s // C + 1, …; because
    ⌊a⌋ + ⌊b⌋ ≤ ⌊a + b⌋, the next sequence starts behind its last slot.

    Args:
        segment_start: int64 [B, Q], nondecreasing, at or before the token itself; Q = L.
    """
    batch, length = segment_start.shape
    token = torch.arange(length, device=segment_start.device)
    rank, first = token - segment_start, segment_start // ratio
    count = slots_of(length, ratio)
    slot = torch.where((rank + 1) % ratio == 0, first + rank // ratio, count)
    start = segment_start.new_zeros(batch, count + 1)
    start = start.scatter(1, slot, (token - (ratio - 1)).expand(batch, -1))
    return _layout(rank, ratio, first=first, token_base=segment_start, block_start=start[:, :count])


def _layout(
    positions: torch.Tensor,
    ratio: int,
    first: torch.Tensor | None = None,
    token_base: torch.Tensor | None = None,
    block_start: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    run_starts: tuple[int, ...] | None = None,
) -> TokenLayout:
    batch, queries = positions.shape
    rows = torch.arange(batch, dtype=torch.int32, device=positions.device)
    visible = (positions + 1) // ratio
    visible = visible if first is None else visible + first
    # Always a tensor: without a base, ops want rectangles whose length is a multiple of C.
    token_base = torch.zeros_like(positions) if token_base is None else token_base
    return TokenLayout(
        compress_ratio=ratio,
        positions=positions.reshape(-1),
        request_ids=rows[:, None].expand(-1, queries).reshape(-1),
        page_table=rows[:, None],
        visible_blocks=visible.to(torch.int32).reshape(-1),
        token_base=token_base.reshape(-1),
        first_block=None if first is None else first.to(torch.int32).reshape(-1),
        block_start=block_start,
        order=order,
        run_starts=run_starts,
    )
