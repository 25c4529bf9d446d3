"""sparse_attention on the GPU: chooses schedules and launches them.

Mirrors `reference.sparse_attention`. Launches, allocations and sizes follow from shapes and from
the plan's host integers alone, so that a call can be captured in a graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flash_qsa import dispatch
from flash_qsa.checks import Scale
from flash_qsa.ops.sparse_attention import tiles as choices
from flash_qsa.ops.sparse_attention.call import Call
from flash_qsa.ops.sparse_attention.launch_rows import allocate_partials, launch_merge, launch_rows
from flash_qsa.ops.sparse_attention.launch_union import launch_union
from flash_qsa.ops.sparse_attention.tiles import RowTiles, Segment
from flash_qsa.ops.sparse_attention.tiles_union import UnionTiles, choose_hopper, choose_union
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import Target

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


USUAL = Tuning()


class Numbers(NamedTuple):
    """All that schedules depend on.

    rows, num_requests, num_decode_tokens, decode_query_len, max_query_len: as `tiles.segments`
    takes them; the others as `tiles.choose_rows` and `tiles_union.choose_union` do. may_share,
    hopper: whether the row-union schedules, and the sm_90 one, can take the call's tensors.
    """

    rows: int
    num_requests: int
    num_decode_tokens: int
    decode_query_len: int
    max_query_len: int
    group: int
    kv_heads: int
    dim: int
    num_ids: int
    ratio: int
    kv_bytes: int
    compute_bytes: int
    precise_exponent: bool
    deterministic: bool
    may_share: bool
    hopper: bool
    target: Target


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
    tuning: Tuning = USUAL,
) -> None:
    """Fills out and lse_out; arguments as in `reference.sparse_attention`."""
    call = Call.of(
        query, keys, values, block_ids, positions, page_table, request_ids, ratio, scale, gate,
        k_scale, v_scale, tail_start, token_base, plan, out, lse_out,
    )  # fmt: skip
    numbers = _numbers(call, plan, deterministic)
    chosen = _usual_schedules(numbers) if tuning is USUAL else _schedules(numbers, tuning)
    for segment, union, rows in chosen:
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
            rows_per_program = -(-programs // (MAX_PROGRAMS * call.target.processors))
            launch_rows(call, part, rows, rows_per_program, None, partials)
            launch_merge(call, part, rows.splits, partials, deterministic)


def _numbers(call: Call, plan: BatchPlan | None, deterministic: bool) -> Numbers:
    heads, dim = call.query.shape[1:]
    kv_heads = call.keys.shape[1]
    if plan is None:
        batch = (call.page_table.shape[0], -1, 0, 0)
    else:
        batch = (
            plan.num_requests,
            plan.num_decode_tokens,
            plan.decode_query_len,
            plan.max_query_len,
        )
    # Blocks of shifted sequences straddle pages unless there is one page a request.
    straddles = call.token_base is not None and call.page_table.shape[1] > 1
    may_share = not deterministic and call.tail_start is None and not straddles
    return Numbers(
        call.query.shape[0],
        *batch,
        heads // kv_heads,
        kv_heads,
        dim,
        call.block_ids.shape[1],
        call.ratio,
        call.keys.element_size(),
        call.compute.itemsize,
        call.compute != torch.float16,
        deterministic,
        may_share,
        may_share and _hopper(call),
        call.target,
    )


def _hopper(call: Call) -> bool:
    """Whether the sm_90 schedule can read this call's tensors."""
    keys, values = call.keys, call.values
    cached = (torch.bfloat16, torch.float8_e4m3fn)
    if call.target.name != "sm_90" or call.query.dtype != cached[0] or keys.dtype not in cached:
        return False
    strides = keys.stride()
    sixteen_byte_rows = (strides[0] | strides[1] | strides[2]) * keys.element_size() % 16 == 0
    return (
        sixteen_byte_rows
        and call.cell_units()[2] > 0
        and keys.data_ptr() % 16 == 0
        and values.data_ptr() % 16 == 0
        and call.scale > 0
        and not dispatch.interpreting()
    )


def _schedules(
    numbers: Numbers, tuning: Tuning
) -> list[tuple[Segment, UnionTiles | None, RowTiles]]:
    """Segments of a step, each with its row-union schedule, if any, and its per-row schedule, whose
    splits are then the union's."""
    chosen = []
    for part in choices.segments(*numbers[:5]):
        union = _choose_union(numbers, part, tuning)
        rows = _choose_rows(numbers, part, tuning)
        if union is not None:
            rows = replace(rows, splits=union.splits)
            rows = choices.split_ids(rows, numbers.num_ids, numbers.ratio)
            rows = replace(rows, splits=union.splits)
        chosen.append((part, union, rows))
    return chosen


@functools.lru_cache(maxsize=256)
def _usual_schedules(
    numbers: Numbers,
) -> list[tuple[Segment, UnionTiles | None, RowTiles]]:
    """Remembered, because every layer of a step asks the same."""
    return _schedules(numbers, USUAL)


def _choose_union(n: Numbers, segment: Segment, tuning: Tuning) -> UnionTiles | None:
    if not n.may_share or tuning.share is False:
        return None
    if tuning.hopper is not False and n.hopper:
        hopper = choose_hopper(
            segment, n.group, n.kv_heads, n.dim, n.num_ids, n.ratio, n.target, n.kv_bytes
        )
        if hopper is not None:
            return replace(hopper, **tuning.hopper) if tuning.hopper is not True else hopper
    union = choose_union(
        segment,
        n.group,
        n.kv_heads,
        n.dim,
        n.num_ids,
        n.ratio,
        2 if tuning.share else n.compute_bytes,
        n.precise_exponent,
        n.target,
    )
    return replace(union, **tuning.union) if union and tuning.union else union


def _choose_rows(n: Numbers, segment: Segment, tuning: Tuning) -> RowTiles:
    rows = choices.choose_rows(
        segment,
        n.kv_heads,
        n.dim,
        n.num_ids,
        n.ratio,
        n.kv_bytes,
        n.compute_bytes,
        n.target,
        n.deterministic,
    )
    if tuning.rows or tuning.split_factor != 1.0:
        rows = replace(rows, **(tuning.rows or {}))
        splits = max(1, min(int(rows.splits * tuning.split_factor), choices.MAX_SPLITS))
        rows = choices.split_ids(replace(rows, splits=splits), n.num_ids, n.ratio)
    return rows
