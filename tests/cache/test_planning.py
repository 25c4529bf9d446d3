"""build_plan, its buffers, and the comparison of two plans.

Claims: the tensors are what the lengths say, row by row; decodes lead with one query length and
anything else is refused; prefill chunks of any length follow; padding and missing pages give -1
and never a cell; a ring is addressed by position % capacity and nothing else; a draft window wider
than the ring is refused; refilled buffers keep their addresses and equal a fresh plan.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.cache import PlanBuffers, build_plan, require_same_step
from flash_qsa.ops import plan_rows, store_rows
from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.ops.prepare.reference import store_keys_values
from flash_qsa.plan import BatchPlan

SIZES = {"compress_ratio": 4, "page_size": 8, "ring_capacity": 8}


def plan_for(query_lens: list[int], seq_lens: list[int], **options) -> BatchPlan:
    """A plan over pages that lie in reverse order, slots too."""
    needed = [-(-length // 8) for length in seq_lens]
    total, pages = sum(needed) + 3, []
    for count in needed:
        pages.append([total - 1 - i - sum(map(len, pages)) for i in range(count)])
    slots = list(range(len(seq_lens), 0, -1))
    return build_plan(query_lens, seq_lens, pages, slots, **{**SIZES, **options})


def rows_by_hand(plan: BatchPlan, query_lens: list[int], seq_lens: list[int]) -> list[tuple]:
    """The six row values, written out from their definitions."""
    rows = []
    for request, (count, length) in enumerate(zip(query_lens, seq_lens)):
        pages = plan.page_table[request].tolist()
        slot = int(plan.ring_table[request, 0])
        for position in range(length - count, length):
            page = pages[position // 8]
            closes = (position + 1) % 4 == 0
            kept = position >= length - plan.ring_capacity
            ring = slot * plan.ring_capacity + position % plan.ring_capacity
            rows.append(
                (
                    request,
                    position,
                    (position + 1) // 4,
                    page * 8 + position % 8,
                    page * 2 + position % 8 // 4 if closes else -1,
                    ring if kept else -1,
                )
            )
    return rows + [(-1, -1, 0, -1, -1, -1)] * (plan.num_rows - len(rows))


def row_values(plan: BatchPlan) -> list[tuple]:
    return list(zip(*(getattr(plan, name).tolist() for name in PlanRows._fields)))


@pytest.mark.bug("O-18")
@pytest.mark.parity("P19", "P20")
@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=4),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 30)), max_size=4),
    st.integers(0, 4),
    st.booleans(),
)
def test_rows_equal_their_definitions(cached, query_len, prefills, padding, explicit) -> None:
    query_lens = [query_len] * len(cached) + [new for new, _ in prefills]
    seq_lens = [old + query_len for old in cached] + [new + old for new, old in prefills]
    total = sum(query_lens)
    plan = plan_for(
        query_lens,
        seq_lens,
        draft_tokens=query_len - 1,
        num_rows=total + padding,
        num_decodes=len(cached) if explicit else None,
    )
    assert row_values(plan) == rows_by_hand(plan, query_lens, seq_lens)
    assert plan.query_start.tolist() == [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    assert plan.seq_lens.tolist() == seq_lens
    assert (plan.num_tokens, plan.num_rows) == (total, total + padding)
    if explicit:
        assert plan.num_decodes == len(cached)
    assert plan.num_decode_tokens == plan.num_decodes * plan.decode_query_len
    assert plan.max_query_len == max(query_lens, default=0)
    assert plan.max_seq_len == max(seq_lens, default=0)


@pytest.mark.parity("P19")
@pytest.mark.parametrize(
    ("query_lens", "num_decodes", "seen"),
    [([37, 1, 1], 2, r"\[37, 1\]"), ([1, 2], 2, r"\[1, 2\]"), ([1, 1, 3], 3, r"\[1, 1, 3\]")],
)
def test_decodes_that_do_not_lead_with_one_length_are_refused(
    query_lens: list[int], num_decodes: int, seen: str
) -> None:
    with pytest.raises(ValueError, match=f"share one query length.* have {seen}"):
        plan_for(query_lens, [64] * len(query_lens), num_decodes=num_decodes, draft_tokens=2)


@pytest.mark.parity("P19")
def test_decodes_without_rows_or_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        plan_for([0, 0], [4, 4], num_decodes=2)
    for count in (-1, 3):
        with pytest.raises(ValueError, match=f"num_decodes: expected 0 … 2 .*got {count}"):
            plan_for([1, 1], [4, 4], num_decodes=count)


@pytest.mark.parity("P19")
@pytest.mark.parametrize(
    ("query_lens", "drafts", "split"),
    [
        ([1, 1, 37, 1, 200], 0, (2, 1)),
        ([4, 4, 1, 9], 3, (2, 4)),
        ([1, 4, 4], 3, (1, 1)),
        ([9, 1], 0, (0, 0)),
        ([], 0, (0, 0)),
        ([0, 1], 0, (0, 0)),
    ],
)
def test_the_leading_uniform_run_is_the_decode_batch(query_lens, drafts, split) -> None:
    plan = plan_for(query_lens, [n + 3 for n in query_lens], draft_tokens=drafts)
    assert (plan.num_decodes, plan.decode_query_len) == split


@pytest.mark.parity("P20")
def test_prefill_offsets_may_be_a_slice_of_the_batch() -> None:
    """Query starts that begin above 0 address the same rows; the decodes' rows become padding."""
    query_lens, seq_lens = [1, 1, 5, 9], [11, 4, 5, 20]
    whole = plan_for(query_lens, seq_lens)
    base = whole.query_start
    prefill = plan_rows(
        base[2:],
        whole.seq_lens[2:],
        whole.page_table[2:],
        whole.ring_table[2:],
        whole.num_rows,
        **SIZES,
    )
    assert base[2:].storage_offset() == 2 and base[2:].untyped_storage().nbytes() == base.nbytes
    assert prefill.request_ids.tolist() == [-1, -1] + [0] * 5 + [1] * 9
    for name in ("positions", "visible_blocks", "main_slots", "compressed_slots", "ring_slots"):
        assert getattr(prefill, name)[2:].equal(getattr(whole, name)[2:])
    assert prefill.main_slots[:2].tolist() == [-1, -1]


@pytest.mark.bug("O-17")
@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"draft_tokens": 6}, 10),
        ({"draft_tokens": 0, "num_decodes": 1, "ring_capacity": 7}, 10),
        ({"draft_tokens": 1, "ring_capacity": 4}, 5),
        ({"ring_capacity": 3}, 4),
    ],
)
def test_a_ring_too_narrow_for_the_window_is_refused(options: dict, needed: int) -> None:
    with pytest.raises(ValueError, match=f"ring_capacity.* at least {needed} are needed"):
        plan_for([7], [17], **options)


@pytest.mark.bug("O-17")
def test_a_window_of_seven_fits_a_ring_of_ten() -> None:
    plan = plan_for([7], [17], draft_tokens=6, ring_capacity=10)
    assert plan.num_decodes == 1 and plan.decode_query_len == 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_plan([1], [1, 2], [[0]], [0], **SIZES), "seq_lens: expected 1 requests"),
        (lambda: build_plan([1], [1], [], [0], **SIZES), "pages: expected 1 requests, got 0"),
        (lambda: build_plan([1], [1], [[0]], [], **SIZES), "ring_slots: expected 1 requests"),
        (lambda: build_plan([3], [2], [[0]], [0], **SIZES), r"query_lens\[0\]: expected 0 … 2"),
        (lambda: build_plan([-1], [2], [[0]], [0], **SIZES), r"query_lens\[0\].*got -1"),
        (lambda: build_plan([1], [9], [[0]], [0], **SIZES), r"pages\[0\]: 1 pages of 8 tokens"),
        (lambda: plan_for([5], [5], num_rows=4), "the step has 5 rows, there is room for 4"),
        (lambda: plan_for([5], [5], max_seq_len=4), "max_seq_len: 4 is below the longest"),
        (lambda: plan_for([1], [1], draft_tokens=-1), "draft_tokens: expected at least 0, got -1"),
        (lambda: plan_for([1], [1], compress_ratio=0), "compress_ratio"),
        (lambda: plan_for([1], [1], page_size=6), "page_size: 6 tokens are not a multiple"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_page_tables_and_slots_may_be_tensors() -> None:
    lists = build_plan([1, 3], [9, 3], [[4, 2], [3]], [1, 0], **SIZES)
    table = torch.tensor([[4, 2, -1], [3, -1, -1]], dtype=torch.int32)
    tensors = build_plan([1, 3], [9, 3], table, torch.tensor([[1], [0]]), **SIZES)
    assert row_values(tensors) == row_values(lists)
    assert tensors.page_table.equal(table)


@pytest.mark.bug("O-21")
def test_refilled_buffers_keep_their_addresses_and_equal_fresh_plans() -> None:
    """Lengths grow by one across groups and a page, at 8, 3 and 1 live requests."""
    buffers = PlanBuffers.allocate(max_requests=8, max_rows=8, max_pages=4)
    tensors = (*buffers.rows, buffers.query_start, buffers.seq_lens, buffers.page_table)
    addresses = [tensor.data_ptr() for tensor in tensors]
    for length in range(13, 30):
        for live in (8, 3, 1):
            lengths = [length - request for request in range(live)]
            fresh = plan_for([1] * live, lengths, num_rows=8)
            plan = plan_for([1] * live, lengths, out=buffers, max_seq_len=32)
            assert row_values(plan) == row_values(fresh)
            assert plan.seq_lens.tolist() == lengths + [0] * (8 - live)
            assert plan.query_start.tolist() == [min(i, live) for i in range(9)]
            assert (plan.page_table[live:] == -1).all() and (plan.ring_table[live:] == -1).all()
            assert plan.max_seq_len == 32 and plan.num_requests == live
            assert plan.positions is buffers.rows.positions
    assert [tensor.data_ptr() for tensor in tensors] == addresses


@pytest.mark.parametrize(
    ("requests", "length", "options", "message"),
    [
        (3, 1, {}, "the step has 3 requests, the buffers hold 2"),
        (2, 20, {}, r"pages\[0\]: 3 pages, the buffers hold 2"),
        (2, 1, {"num_rows": 5}, "the buffers have 4 rows, got 5"),
        (2, 5, {"query": 3}, "the step has 6 rows, there is room for 4"),
    ],
)
def test_buffers_that_are_too_small_are_refused(requests, length, options, message) -> None:
    buffers = PlanBuffers.allocate(max_requests=2, max_rows=4, max_pages=2)
    query = options.pop("query", 1)
    with pytest.raises(ValueError, match=message):
        plan_for([query] * requests, [length] * requests, out=buffers, **options)


@pytest.mark.bug("O-36")
def test_padding_rows_write_no_cell_of_any_cache() -> None:
    """128 rows of which 64 are real; first and last cells hold a pattern that must survive."""
    pages = [[7, 1, 3, 5, 2, 6, 4, 8]]
    plan = build_plan([64], [64], pages, [1], num_rows=128, **SIZES)
    main = torch.arange(10 * 2 * 8 * 6.0).view(10, 2, 8, 6)
    ring = torch.arange(3 * 8 * 5.0).view(3, 8, 1, 5)
    compressed = torch.arange(10 * 2 * 5.0).view(10, 2, 1, 5)
    before = [tensor.clone() for tensor in (main, ring, compressed)]
    rows, heads = torch.full((128, 5), -1.0), torch.full((128, 2, 3), -1.0)
    store_keys_values(main, plan.main_slots, heads, heads, None, None)
    store_rows(ring, plan.ring_slots, rows)
    store_rows(compressed, plan.compressed_slots, rows)
    assert (main[pages[0]] == -1).all() and main[[0, 9]].equal(before[0][[0, 9]])
    assert (ring[1] == -1).all() and ring[[0, 2]].equal(before[1][[0, 2]])
    assert (compressed[pages[0]] == -1).all()
    assert compressed[[0, 9]].equal(before[2][[0, 9]])


@pytest.mark.bug("O-37")
@pytest.mark.parametrize("capacity", [8, 16])
def test_a_ring_is_addressed_by_position_modulo_capacity(capacity: int) -> None:
    """Positions far past anything that a one-column table could page; guard slots around."""
    for position in (0, 3, 4, 7, 8, 262_143, 500_001, 1_048_575):
        width = position // 64 + 1
        table = torch.zeros(1, width, dtype=torch.int32)
        sizes = {**SIZES, "ring_capacity": capacity, "page_size": 64}
        plan = build_plan([1], [position + 1], table, [1], **sizes)
        ring = torch.full((3, capacity, 1, 4), torch.nan)
        store_rows(ring, plan.ring_slots, torch.ones(1, 4))
        written = (~ring.isnan()).all(-1).nonzero().tolist()
        assert written == [[1, position % capacity, 0]]


@pytest.mark.bug("O-37")
def test_positions_past_the_table_have_no_page() -> None:
    plan = plan_rows(
        torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([18], dtype=torch.int32),
        torch.tensor([[5, 6]], dtype=torch.int32),
        torch.tensor([[-1]], dtype=torch.int32),
        4,
        **SIZES,
    )
    assert plan.positions.tolist() == [14, 15, 16, 17]
    assert plan.main_slots.tolist() == [54, 55, -1, -1]
    assert plan.compressed_slots.tolist() == [-1, 13, -1, -1]
    assert plan.ring_slots.tolist() == [-1] * 4


@pytest.mark.parity("P22")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 9}, "token count: num_tokens is 10 and 9"),
        ({"num_decodes": 1}, "batch split: num_decodes is 2 and 1"),
        ({"num_requests": 4}, "batch split: num_requests is 3 and 4"),
        ({"num_decode_tokens": 1}, "batch split: num_decode_tokens is 2 and 1"),
        ({"decode_query_len": 2}, "batch split: decode_query_len is 1 and 2"),
        ({"compress_ratio": 2}, "compress ratio: compress_ratio is 4 and 2"),
    ],
)
def test_plans_of_different_steps_are_told_apart(change: dict, message: str) -> None:
    raw = plan_for([1, 1, 8], [9, 12, 20])
    with pytest.raises(RuntimeError, match=f"disagree in their {message}"):
        require_same_step(raw, replace(raw, **change))


@pytest.mark.parity("P22")
def test_positions_are_compared_on_the_cpu_only() -> None:
    raw, other = plan_for([1, 1, 8], [9, 12, 20]), plan_for([1, 1, 8], [9, 13, 20])
    require_same_step(raw, plan_for([1, 1, 8], [9, 12, 20]))
    with pytest.raises(RuntimeError, match="positions: entry 1 is 11 and 12"):
        require_same_step(raw, other)
    moved = {name: getattr(other, name).to("meta") for name in ("positions", "request_ids")}
    require_same_step(raw, replace(other, **moved))
    with pytest.raises(RuntimeError, match="token count: num_rows is 10 and 11"):
        require_same_step(raw, plan_for([1, 1, 8], [9, 12, 20], num_rows=11))
