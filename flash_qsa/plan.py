"""BatchPlan: everything the ops need to know about one step's batch, built once and shared.

The plan is data. It is built by `flash_qsa.cache.build_plan` (from request lengths) or by an
engine that already has these tensors; ops only read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class BatchPlan:
    """One step over R requests packed into T token rows.

    Decode requests come first and share one query length (1, or 1 + draft tokens); prefill
    requests follow. Rows behind `num_tokens` are padding: request -1, position -1, slots -1.

    Host integers (never read back from the device):
        num_tokens: real rows.
        num_requests, num_decodes, num_decode_tokens, decode_query_len, max_query_len: the split.
        max_seq_len: no request is longer than this after the step (an upper bound is enough).
        compress_ratio: C. page_size: S, tokens of a main page. ring_capacity: rows of a ring slot.

    Tensors:
        query_start: int32 [R + 1], first row of each request, then the total.
        seq_lens: int32 [R], tokens of each request after this step.
        page_table: int32 [R, n], physical page of each logical page, -1 where there is none.
        ring_table: int32 [R, 1], ring slot of each request, -1 where there is none.
        request_ids: int32 [T].
        positions: int64 [T], logical 0-based position of each row.
        visible_blocks: int32 [T], complete blocks at or before the row: (position + 1) // C.
        main_slots: int64 [T], page * S + offset of the row's K and V, -1 to skip.
        compressed_slots: int64 [T], page * (S // C) + offset of the block that the row closes,
            -1 where it closes none.
        ring_slots: int64 [T], slot * ring_capacity + position % ring_capacity for the last
            ring_capacity rows of each request, -1 for earlier rows.
    """

    num_tokens: int
    num_requests: int
    num_decodes: int
    num_decode_tokens: int
    decode_query_len: int
    max_query_len: int
    max_seq_len: int
    compress_ratio: int
    page_size: int
    ring_capacity: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    ring_table: torch.Tensor
    request_ids: torch.Tensor
    positions: torch.Tensor
    visible_blocks: torch.Tensor
    main_slots: torch.Tensor
    compressed_slots: torch.Tensor
    ring_slots: torch.Tensor

    @property
    def num_rows(self) -> int:
        """T: rows with padding."""
        return self.request_ids.shape[0]


_INTEGERS = tuple(f.name for f in fields(BatchPlan) if f.type == "int")
_TENSORS = tuple(f.name for f in fields(BatchPlan) if f.type == "torch.Tensor")


def flatten_plan(plan: BatchPlan | None) -> tuple[list[torch.Tensor], list[int]]:
    """A plan's tensors and integers, as operator schemas take them; empty where there is none."""
    if plan is None:
        return [], []
    return [getattr(plan, name) for name in _TENSORS], [getattr(plan, name) for name in _INTEGERS]


def unflatten_plan(tensors: Sequence[torch.Tensor], integers: Sequence[int]) -> BatchPlan | None:
    """The inverse of `flatten_plan`."""
    if not integers:
        return None
    return BatchPlan(**dict(zip(_INTEGERS, integers)), **dict(zip(_TENSORS, tensors)))
