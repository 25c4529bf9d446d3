"""build_plan: one step's BatchPlan from request lengths, on the host, once a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from flash_qsa.cache.rings import require_ring_capacity
from flash_qsa.checks import expect_positive
from flash_qsa.ops.batch_plan.api import PlanRows, plan_rows
from flash_qsa.plan import BatchPlan


@dataclass(frozen=True)
class PlanBuffers:
    """Tensors of a plan at fixed addresses, refilled step after step under a captured graph.

    `build_plan(..., out=buffers)` fills them in place. Requests behind the real ones have no rows
    and no pages; rows behind the real ones are padding.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    ring_table: torch.Tensor
    rows: PlanRows

    @classmethod
    def allocate(
        cls, max_requests: int, max_rows: int, max_pages: int, device: torch.device | str = "cpu"
    ) -> PlanBuffers:
        """Buffers for `max_requests` requests of up to `max_pages` pages and `max_rows` rows."""

        def table(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        return cls(
            torch.zeros(max_requests + 1, dtype=torch.int32, device=device),
            torch.zeros(max_requests, dtype=torch.int32, device=device),
            table(max_requests, max_pages),
            table(max_requests, 1),
            PlanRows.empty(max_rows, device),
        )


def build_plan(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    pages: Sequence[Sequence[int]] | torch.Tensor,
    ring_slots: Sequence[int] | torch.Tensor,
    *,
    compress_ratio: int,
    page_size: int,
    ring_capacity: int,
    num_decodes: int | None = None,
    draft_tokens: int = 0,
    num_rows: int | None = None,
    max_seq_len: int | None = None,
    device: torch.device | str = "cpu",
    out: PlanBuffers | None = None,
    backend: str = "auto",
) -> BatchPlan:
    """Plans one step: decode requests first, with one query length, then prefill chunks.

    Args:
        query_lens: rows of each request in this step; a prefill chunk may have any length, 1
            included.
        seq_lens: tokens of each request after this step, cached ones and this step's.
        pages: physical pages of each request, in logical order, enough for its seq_len; or a
            page table, int32 [R, n].
        ring_slots: ring slot of each request, or int32 [R, 1].
        compress_ratio: C. page_size: S. ring_capacity: rows of a ring slot.
        num_decodes: leading requests that are decodes. By default the leading run of requests
            with one common query length of at most 1 + draft_tokens. It steers schedules, never
            results.
        draft_tokens: widest draft window that a later step may reject from.
        num_rows: T; rows behind the requests' are padding. By default there are none, or as many
            as `out` has.
        max_seq_len: an upper bound to plan for (captured graphs); by default the longest request.
        device: where the plan's tensors live; `out` decides when it is given.
        out: buffers to refill in place.
        backend: of the row expansion, see `ops.plan_rows`.

    Raises:
        ValueError: lengths that do not fit, too few pages, decodes that do not lead the batch with
            one query length, a ring too narrow for the draft window, or buffers that are too small.
    """
    query_lens, seq_lens = [int(n) for n in query_lens], [int(n) for n in seq_lens]
    requests = len(query_lens)
    expect_positive("compress_ratio", compress_ratio)
    expect_positive("page_size", page_size)
    if draft_tokens < 0:
        raise ValueError(f"draft_tokens: expected at least 0, got {draft_tokens}")
    for name, given in (("seq_lens", seq_lens), ("pages", pages), ("ring_slots", ring_slots)):
        if len(given) != requests:
            raise ValueError(f"{name}: expected {requests} requests, got {len(given)}")
    for request, (rows, length) in enumerate(zip(query_lens, seq_lens)):
        if not 0 <= rows <= length:
            raise ValueError(
                f"query_lens[{request}]: expected 0 … {length} (the request's seq_len), got {rows}"
            )
    num_decodes, decode_query_len = _split(query_lens, num_decodes, draft_tokens)
    require_ring_capacity(ring_capacity, compress_ratio, max(draft_tokens, decode_query_len - 1))

    total = sum(query_lens)
    longest = max(seq_lens, default=0)
    if max_seq_len is None:
        max_seq_len = longest
    elif max_seq_len < longest:
        raise ValueError(f"max_seq_len: {max_seq_len} is below the longest request, {longest}")
    if out is None:
        page_columns = pages.shape[1] if isinstance(pages, torch.Tensor) else _widest(pages)
        rows = total if num_rows is None else num_rows
        out = PlanBuffers.allocate(requests, rows, page_columns, device)
    elif num_rows is not None and num_rows != out.rows.request_ids.shape[0]:
        raise ValueError(
            f"num_rows: the buffers have {out.rows.request_ids.shape[0]} rows, got {num_rows}"
        )
    if total > out.rows.request_ids.shape[0]:
        raise ValueError(
            f"num_rows: the step has {total} rows, there is room for "
            f"{out.rows.request_ids.shape[0]}"
        )
    _fill(out, query_lens, seq_lens, pages, ring_slots, page_size)
    plan_rows(
        out.query_start,
        out.seq_lens,
        out.page_table,
        out.ring_table,
        out.rows.request_ids.shape[0],
        compress_ratio=compress_ratio,
        page_size=page_size,
        ring_capacity=ring_capacity,
        out=out.rows,
        backend=backend,
    )
    return BatchPlan(
        num_tokens=total,
        num_requests=requests,
        num_decodes=num_decodes,
        num_decode_tokens=num_decodes * decode_query_len,
        decode_query_len=decode_query_len,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max_seq_len,
        compress_ratio=compress_ratio,
        page_size=page_size,
        ring_capacity=ring_capacity,
        query_start=out.query_start,
        seq_lens=out.seq_lens,
        page_table=out.page_table,
        ring_table=out.ring_table,
        **out.rows._asdict(),
    )


def require_same_step(raw: BatchPlan, compressed: BatchPlan) -> None:
    """Refuses two plans that do not describe the same step.

    Engines that keep the raw-key ring and the compressed keys in cache groups of their own build
    one metadata object a group. Positions are compared on the CPU only: a step must not wait for
    a device.

    Raises:
        RuntimeError: naming what differs, and both values.
    """
    for what, names in (
        ("token count", ("num_tokens", "num_rows")),
        ("compress ratio", ("compress_ratio",)),
        (
            "batch split",
            (
                "num_requests",
                "num_decodes",
                "num_decode_tokens",
                "decode_query_len",
                "max_query_len",
            ),
        ),
    ):
        for name in names:
            one, other = getattr(raw, name), getattr(compressed, name)
            if one != other:
                raise RuntimeError(
                    f"raw and compressed metadata disagree in their {what}: {name} is {one} and "
                    f"{other}"
                )
    for name in ("query_start", "request_ids", "positions"):
        one, other = getattr(raw, name), getattr(compressed, name)
        if one.device.type != "cpu" or other.device.type != "cpu":
            continue
        if one.shape != other.shape or not torch.equal(one.long(), other.long()):
            raise RuntimeError(
                f"raw and compressed metadata disagree in their {name}: "
                f"{_first_difference(one, other)}"
            )


def _split(query_lens: list[int], num_decodes: int | None, draft_tokens: int) -> tuple[int, int]:
    """Leading decode requests and their common query length."""
    if num_decodes is None:
        num_decodes = 0
        while (
            num_decodes < len(query_lens)
            and 0 < query_lens[num_decodes] <= 1 + draft_tokens
            and query_lens[num_decodes] == query_lens[0]
        ):
            num_decodes += 1
    if not 0 <= num_decodes <= len(query_lens):
        raise ValueError(
            f"num_decodes: expected 0 … {len(query_lens)} (the requests), got {num_decodes}"
        )
    decodes = query_lens[:num_decodes]
    if len(set(decodes)) > 1 or 0 in decodes:
        raise ValueError(
            "query_lens: decode requests must lead the batch and share one query length above 0, "
            f"the first {num_decodes} have {decodes}"
        )
    return num_decodes, decodes[0] if decodes else 0


def _widest(pages: Sequence[Sequence[int]]) -> int:
    return max((len(row) for row in pages), default=0)


def _fill(
    out: PlanBuffers,
    query_lens: list[int],
    seq_lens: list[int],
    pages: Sequence[Sequence[int]] | torch.Tensor,
    ring_slots: Sequence[int] | torch.Tensor,
    page_size: int,
) -> None:
    room, columns = out.page_table.shape
    requests = len(query_lens)
    if requests > room:
        raise ValueError(f"out: the step has {requests} requests, the buffers hold {room}")
    paged = isinstance(pages, torch.Tensor)
    widths = [pages.shape[1]] * requests if paged else [len(row) for row in pages]
    for request, (length, width) in enumerate(zip(seq_lens, widths)):
        if width * page_size < length:
            raise ValueError(
                f"pages[{request}]: {width} pages of {page_size} tokens cannot hold {length} tokens"
            )
        if width > columns:
            raise ValueError(f"pages[{request}]: {width} pages, the buffers hold {columns}")

    starts = numpy.full(room + 1, sum(query_lens), dtype=numpy.int32)
    starts[: requests + 1] = [0, *itertools.accumulate(query_lens)]
    lengths = numpy.zeros(room, dtype=numpy.int32)
    lengths[:requests] = seq_lens
    out.query_start.copy_(torch.from_numpy(starts))
    out.seq_lens.copy_(torch.from_numpy(lengths))

    if paged:  # may live on the device: no read back
        out.page_table.fill_(-1)
        out.page_table[:requests, : pages.shape[1]].copy_(pages)
    else:
        table = numpy.full((room, columns), -1, dtype=numpy.int32)
        for row, listed in zip(table, pages):
            row[: len(listed)] = listed
        out.page_table.copy_(torch.from_numpy(table))
    if isinstance(ring_slots, torch.Tensor):
        out.ring_table.fill_(-1)
        out.ring_table[:requests].copy_(ring_slots.reshape(requests, -1)[:, :1])
    else:
        slots = numpy.full((room, 1), -1, dtype=numpy.int32)
        slots[:requests, 0] = ring_slots
        out.ring_table.copy_(torch.from_numpy(slots))


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.shape != other.shape:
        return f"{list(one.shape)} and {list(other.shape)} entries"
    index = int((one.long() != other.long()).nonzero()[0])
    return f"entry {index} is {int(one[index])} and {int(other[index])}"
