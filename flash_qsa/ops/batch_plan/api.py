"""plan_rows: per-row metadata of a step, computed where the lengths are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_qsa import dispatch
from flash_qsa.checks import Axes, expect_device, expect_dtype, expect_out, expect_positive


class PlanRows(NamedTuple):
    """The row tensors of a `BatchPlan`, in its words; each has T entries."""

    request_ids: torch.Tensor
    positions: torch.Tensor
    visible_blocks: torch.Tensor
    main_slots: torch.Tensor
    compressed_slots: torch.Tensor
    ring_slots: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> PlanRows:
        """Uninitialised buffers for T rows, to be filled (and refilled under a captured graph)."""
        dtypes = (torch.int32, torch.int64, torch.int32, torch.int64, torch.int64, torch.int64)
        return cls(*(torch.empty(rows, dtype=dtype, device=device) for dtype in dtypes))


def plan_rows(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    ring_table: torch.Tensor,
    num_rows: int,
    *,
    compress_ratio: int,
    page_size: int,
    ring_capacity: int,
    out: PlanRows | None = None,
    backend: str = "auto",
) -> PlanRows:
    """Expands request lengths to row metadata, without reading anything back to the host.

    Args:
        query_start: int32 [R + 1], first row of each request, then the number of real rows.
        seq_lens: int32 [R], tokens of each request after this step.
        page_table: int32 [R, n]; ring_table: int32 [R, m ≥ 1], column 0 is the ring slot.
            Negative entries, and pages past column n - 1, mean there is none: the slot is -1.
        num_rows: T, real rows and padding.
        compress_ratio: C. page_size: S, a multiple of C. ring_capacity: rows of a ring slot.
        out: buffers to fill.

    Returns:
        PlanRows; rows behind the last request hold -1 (visible_blocks 0).

    Raises:
        ValueError: shapes, devices or sizes that do not fit.
        UnsupportedError: a dtype other than int32.
    """
    axes = Axes()
    axes.shape("seq_lens", seq_lens, ("R",))
    axes.shape("query_start", query_start, (axes["R"] + 1,))
    axes.shape("page_table", page_table, ("R", "n"))
    axes.shape("ring_table", ring_table, ("R", "m"))
    for name, tensor in (
        ("seq_lens", seq_lens),
        ("query_start", query_start),
        ("page_table", page_table),
        ("ring_table", ring_table),
    ):
        expect_dtype(name, tensor, (torch.int32,))
        expect_device(name, tensor, seq_lens.device)
    expect_positive("compress_ratio", compress_ratio)
    expect_positive("page_size", page_size)
    expect_positive("ring_capacity", ring_capacity)
    if num_rows < 0:
        raise ValueError(f"num_rows: expected at least 0, got {num_rows}")
    if page_size % compress_ratio:
        raise ValueError(
            f"page_size: {page_size} tokens are not a multiple of compress_ratio {compress_ratio}"
        )
    if axes["R"] and axes["m"] == 0:
        raise ValueError(f"ring_table: expected a column, got {list(ring_table.shape)}")
    if out is None:
        out = PlanRows.empty(num_rows, seq_lens.device)
    else:
        wanted = PlanRows.empty(0, "meta")
        for name, buffer in out._asdict().items():
            expect_out(buffer, (num_rows,), getattr(wanted, name).dtype, seq_lens.device)
    if num_rows:
        dispatch.implementation("batch_plan", backend, seq_lens.device)(
            query_start,
            seq_lens,
            page_table,
            ring_table,
            compress_ratio,
            page_size,
            ring_capacity,
            out,
        )
    return out
