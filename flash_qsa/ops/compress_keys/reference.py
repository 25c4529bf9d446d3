"""compress_keys in PyTorch: the specification."""

from __future__ import annotations

import torch

from flash_qsa.ops.compress_keys.ring_rows import stores_positions, unpack_positions
from flash_qsa.ops.norm import wide
from flash_qsa.plan import BatchPlan


def compress_keys(
    raw_keys: torch.Tensor,
    positions: torch.Tensor,
    ring: torch.Tensor,
    ring_table: torch.Tensor,
    plan: BatchPlan,
    ratio: int,
    out: torch.Tensor,
    first_positions_out: torch.Tensor,
) -> None:
    dim = raw_keys.shape[1]
    closes = (plan.request_ids >= 0) & (plan.positions >= 0) & ((plan.positions + 1) % ratio == 0)
    rows = closes.nonzero().flatten()
    if rows.numel() == 0:
        return
    request = plan.request_ids[rows].long()
    starts = plan.query_start.long()
    first_here = plan.seq_lens[request].long() - (starts[request + 1] - starts[request])

    # members [n, C]: logical positions of the groups' tokens, oldest first
    members = plan.positions[rows, None] - torch.arange(ratio - 1, -1, -1, device=rows.device)
    in_step = members >= first_here[:, None]
    step_rows = (starts[request] - first_here)[:, None] + members
    slots = ring_table[request, 0].long()
    in_ring = ~in_step & ((slots >= 0) & (slots < ring.shape[0]))[:, None]
    ring_rows = ring[slots.clamp(0, ring.shape[0] - 1)[:, None], members % ring.shape[1], 0]

    from_step = raw_keys[torch.where(in_step, step_rows, 0)]
    keys = torch.where(in_step[..., None], from_step, ring_rows[..., :dim])
    pooled = mean_in_order(wide(keys))

    if stores_positions(ring.shape[3], dim, ring.dtype):
        ring_first = unpack_positions(ring_rows[:, 0], dim)
    else:
        ring_first = members[:, :1].expand(-1, 3)
    step_first = positions[torch.where(in_step[:, 0], step_rows[:, 0], 0), 0]
    first = torch.where(in_step[:, :1], step_first, ring_first)

    known = (in_step | in_ring).all(1)
    out[rows[known]] = pooled[known].to(out.dtype)
    first_positions_out[rows[known], 0] = first[known]


def mean_in_order(keys: torch.Tensor) -> torch.Tensor:
    """Mean of keys [n, C, Di] over C, added from the oldest to the newest: the one order that every
    implementation keeps, so that all of them round alike."""
    total = torch.zeros_like(keys[:, 0])
    for member in keys.unbind(1):
        total = total + member
    # by a tensor: torch may multiply by the reciprocal of a number instead
    return total / total.new_full((), keys.shape[1])
