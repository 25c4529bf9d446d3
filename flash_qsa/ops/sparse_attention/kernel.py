"""sparse_attention on the GPU: chooses schedules and launches them.

Mirrors `reference.sparse_attention`. Launches, allocations and sizes follow from shapes and from
the plan's host integers alone, so that a call can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from flash_qsa import dispatch
from flash_qsa.checks import Scale
from flash_qsa.ops.sparse_attention import tiles as choices
from flash_qsa.ops.sparse_attention.call import Call
from flash_qsa.ops.sparse_attention.launch_rows import allocate_partials, launch_merge, launch_rows
from flash_qsa.ops.sparse_attention.launch_union import launch_union
from flash_qsa.ops.sparse_attention.tiles import RowTiles, Segment, UnionTiles
from flash_qsa.plan import BatchPlan

MAX_PROGRAMS = 32
"""Programs a processor in the per-row schedule; more rows than that share a program's scratch."""

PARTIALS_BYTES = 64 << 20
"""Deterministic splits are worked off in chunks of rows whose partials fit this."""


@dataclass(frozen=True)
class Tuning:
    """Overrides for experiments and tests; None keeps the choice of `tiles`.

    `rows` and `union` are field overrides of RowTiles and UnionTiles. share=False forbids unions,
    share=True allows them for any dtype; hopper=False forbids the sm_90 schedule, a dict
    overrides its fields. split_factor scales the number of splits.
    """

    rows: dict | None = None
    union: dict | None = None
    share: bool | None = None
    hopper: bool | dict = True
    split_factor: float = 1.0


def launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_ids: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    ratio: int,
    scale: float,
    gate: torch.Tensor | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    tail_start: torch.Tensor | None,
    token_base: torch.Tensor | None,
    plan: BatchPlan | None,
    deterministic: bool,
    out: torch.Tensor,
    lse_out: torch.Tensor | None,
    *,
    tuning: Tuning = Tuning(),
) -> None:
    """Fills out and lse_out; arguments as in `reference.sparse_attention`."""
    call = Call.of(
        query, keys, values, block_ids, positions, page_table, request_ids, ratio, scale, gate,
        k_scale, v_scale, tail_start, token_base, plan, out, lse_out,
    )  # fmt: skip
    if plan is None:
        parts = choices.segments(query.shape[0], page_table.shape[0], -1, 0, 0)
    else:
        parts = choices.segments(
            query.shape[0],
            plan.num_requests,
            plan.num_decode_tokens,
            plan.decode_query_len,
            plan.max_query_len,
        )
    for segment in parts:
        rows = _choose_rows(call, segment, deterministic, tuning)
        union = None if deterministic else _choose_union(call, segment, tuning)
        if union is not None:
            launch_union(call, segment, union, rows)
            continue
        chunk = segment.end_row - segment.first_row
        if deterministic and rows.splits > 1:
            row_bytes = 4 * call.query.shape[1] * rows.splits * call.query.shape[2]
            chunk = max(PARTIALS_BYTES // row_bytes, 1)
        for first in range(segment.first_row, segment.end_row, chunk):
            part = Segment(first, min(first + chunk, segment.end_row), 1)
            partials = allocate_partials(call, part, rows.splits)
            programs = (part.end_row - first) * call.keys.shape[1] * rows.splits
            rows_per_program = triton.cdiv(programs, MAX_PROGRAMS * call.target.processors)
            launch_rows(call, part, rows, rows_per_program, None, partials)
            launch_merge(call, part, rows.splits, partials)


def _choose_union(call: Call, segment: Segment, tuning: Tuning) -> UnionTiles | None:
    # Blocks of shifted sequences straddle pages unless there is one page a request.
    straddles = call.token_base is not None and call.page_table.shape[1] > 1
    if call.tail_start is not None or straddles or tuning.share is False:
        return None
    if tuning.hopper is not False and _hopper(call):
        hopper = choices.choose_hopper(
            segment,
            call.group,
            call.query.shape[2],
            call.block_ids.shape[1],
            call.ratio,
            call.target,
        )
        if hopper is not None:
            return replace(hopper, **tuning.hopper) if tuning.hopper is not True else hopper
    union = choices.choose_union(
        segment,
        call.group,
        call.keys.shape[1],
        call.query.shape[2],
        call.block_ids.shape[1],
        call.ratio,
        2 if tuning.share else call.compute.itemsize,
        call.query.dtype != torch.float16,
        call.target,
    )
    return replace(union, **tuning.union) if union and tuning.union else union


def _hopper(call: Call) -> bool:
    """Whether the sm_90 schedule can read this call's tensors."""
    sixteen_byte_rows = all(
        tensor.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in tensor.stride()[:-1])
        for tensor in (call.keys, call.values)
    )
    # Offsets in such units must fit int32.
    reach = call.keys.shape[0] * call.keys.stride(0) // choices.offset_unit(call.keys.stride())
    return (
        not dispatch.interpreting()
        and call.target.name == "sm_90"
        and call.keys.stride() == call.values.stride()
        and reach < 2**31
        and call.query.dtype == call.keys.dtype == torch.bfloat16
        and call.scale > 0
        and sixteen_byte_rows
    )


def _choose_rows(call: Call, segment: Segment, deterministic: bool, tuning: Tuning) -> RowTiles:
    num_ids = call.block_ids.shape[1]
    rows = choices.choose_rows(
        segment,
        call.keys.shape[1],
        call.query.shape[2],
        num_ids,
        call.ratio,
        call.context,
        call.keys.element_size(),
        call.compute.itemsize,
        call.target,
        deterministic,
    )
    if tuning.rows or tuning.split_factor != 1.0:
        rows = replace(rows, **(tuning.rows or {}))
        splits = max(1, min(int(rows.splits * tuning.split_factor), choices.MAX_SPLITS))
        rows = choices.split_ids(replace(rows, splits=splits), num_ids, call.ratio)
    return rows
