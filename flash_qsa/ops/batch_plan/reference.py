"""plan_rows in PyTorch: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flash_qsa.ops.batch_plan.api import PlanRows


def batch_plan(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    ring_table: torch.Tensor,
    ratio: int,
    page_size: int,
    ring_capacity: int,
    out: PlanRows,
) -> None:
    rows = torch.arange(out.request_ids.shape[0], device=seq_lens.device)
    if seq_lens.shape[0] == 0:
        for buffer in out:
            buffer.fill_(-1)
        out.visible_blocks.zero_()
        return
    real = (rows >= query_start[0]) & (rows < query_start[-1])
    request = torch.searchsorted(query_start[1:].contiguous(), rows.int(), right=True)
    request = request.clamp(max=seq_lens.shape[0] - 1)
    from_end = query_start[1:].long()[request] - rows  # 1 for a request's last row
    position = seq_lens.long()[request] - from_end
    real &= position >= 0

    column = position // page_size
    if page_table.shape[1]:
        page = page_table[request, column.clamp(0, page_table.shape[1] - 1)].long()
    else:
        page = torch.full_like(position, -1)
    paged = real & (column < page_table.shape[1]) & (page >= 0)
    main_slot = page * page_size + position % page_size
    closes = paged & ((position + 1) % ratio == 0)

    ring_slot = ring_table[request, 0].long()
    kept = real & (ring_slot >= 0) & (from_end <= ring_capacity)

    out.request_ids.copy_(request.where(real, -1))
    out.positions.copy_(position.where(real, -1))
    out.visible_blocks.copy_(((position + 1) // ratio).where(real, 0))
    out.main_slots.copy_(main_slot.where(paged, -1))
    out.compressed_slots.copy_((main_slot // ratio).where(closes, -1))
    out.ring_slots.copy_((ring_slot * ring_capacity + position % ring_capacity).where(kept, -1))
