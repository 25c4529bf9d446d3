"""compress_keys: pool the raw keys of every group that this step completes."""

from __future__ import annotations

import torch

from flash_qsa import dispatch
from flash_qsa.checks import (
    FLOAT_DTYPES,
    Axes,
    expect_contiguous_last,
    expect_device,
    expect_dtype,
    expect_out,
    expect_positive,
)
from flash_qsa.ops.compress_keys.ring_rows import stores_positions
from flash_qsa.ops.rotary import canonical_positions
from flash_qsa.plan import BatchPlan


def compress_keys(
    raw_keys: torch.Tensor,
    positions: torch.Tensor,
    ring: torch.Tensor,
    ring_table: torch.Tensor,
    plan: BatchPlan,
    *,
    compress_ratio: int | None = None,
    out: torch.Tensor | None = None,
    first_positions_out: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the C raw keys of each group that a row of this step closes.

    Row t closes a group when (plan.positions[t] + 1) % C == 0. The group's members are taken from
    this step's rows where the step holds them and from the request's ring otherwise. The mean is
    FP32, rounded once to the keys' dtype. The ring is only read: commit the step's keys with
    `store_rows` afterwards.

    Args:
        raw_keys: [T, Di], the step's raw index keys.
        positions: rotary positions of the step's rows, [T], [1, T], [3, T] or [T, 1, 3].
        ring: [slots, capacity, 1, Di] or wider, with three int64 positions behind each key
            (`ring_rows`); position p of a request sits at row p % capacity of its slot.
        ring_table: int32 [R, n ≥ 1]; column 0 is the request's ring slot, -1 for none.
        plan: the step's batch; its query_start, seq_lens, request_ids and positions are read.
        compress_ratio: C, at least 1; the plan's own by default.
        out, first_positions_out: buffers for the results; rows that close no group, or whose group
            has a member that is nowhere, are left untouched in them.

    Returns:
        pooled: [T, Di] in raw_keys' dtype; first_positions: int64 [T, 1, 3], the rotary position
        of each group's first token. Rows that close no group hold zeros and -1.

    Raises:
        ValueError: shapes that do not fit, an empty ring or table, a ring narrower than C, a table
            with fewer rows than requests, a query_start without its total.
        UnsupportedError: a dtype that is not listed.
    """
    axes = Axes()
    axes.shape("raw_keys", raw_keys, ("T", "Di"))
    axes.shape("ring", ring, ("slots", "capacity", 1, "width"))
    axes.shape("ring_table", ring_table, ("R'", "n"))
    expect_dtype("raw_keys", raw_keys, FLOAT_DTYPES)
    expect_dtype("ring", ring, (raw_keys.dtype,))
    expect_dtype("ring_table", ring_table, (torch.int32,))
    for name, tensor in (("positions", positions), ("ring", ring), ("ring_table", ring_table)):
        expect_device(name, tensor, raw_keys.device)
    for name, tensor in (("raw_keys", raw_keys), ("ring", ring)):
        expect_contiguous_last(name, tensor)
    ratio = plan.compress_ratio if compress_ratio is None else compress_ratio
    expect_positive("compress_ratio", ratio)
    canonical = canonical_positions(positions)
    rows, dim = raw_keys.shape
    if canonical.shape[0] != rows:
        raise ValueError(f"positions: expected {rows} rows, got {canonical.shape[0]}")
    if plan.num_rows != rows:
        raise ValueError(f"plan: built for {plan.num_rows} rows, raw_keys has {rows}")
    requests = plan.seq_lens.shape[0]
    if plan.query_start.shape[0] != requests + 1:
        raise ValueError(
            f"plan.query_start: expected {requests + 1} entries (one a request, then the total), "
            f"got {plan.query_start.shape[0]}"
        )
    if ring_table.shape[0] < requests:
        raise ValueError(f"ring_table: {ring_table.shape[0]} rows for {requests} requests")
    if requests and (ring_table.shape[1] == 0 or ring.shape[0] == 0):
        raise ValueError(
            f"ring_table/ring: empty, got {list(ring_table.shape)} and {list(ring.shape)}"
        )
    if ring.shape[1] < ratio:
        raise ValueError(f"ring: capacity {ring.shape[1]} cannot hold a group of {ratio} keys")
    stores_positions(ring.shape[3], dim, ring.dtype)

    if out is None:
        out = raw_keys.new_zeros(rows, dim)
    else:
        expect_out(out, (rows, dim), raw_keys.dtype, raw_keys.device)
    if first_positions_out is None:
        first_positions_out = canonical.new_full((rows, 1, 3), -1)
    else:
        expect_out(first_positions_out, (rows, 1, 3), torch.int64, raw_keys.device)
    if rows:
        dispatch.implementation("compress_keys", backend, raw_keys.device)(
            raw_keys, canonical, ring, ring_table, plan, ratio, out, first_positions_out
        )
    return out, first_positions_out
