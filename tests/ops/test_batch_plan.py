"""plan_rows.

Claims:
* rows get the request, position, visible blocks and slots that a loop over requests gives;
* rows outside every request, and rows before a request's first token, hold -1 (visible 0);
* a page that the table lacks gives no slot, at any length, and the ring is addressed by position
  modulo its capacity, never through a page table;
* just the last capacity rows of a request go to the ring, so that no two rows share a cell;
* compressed slots count S / C rows a page; page sizes that C does not divide are refused.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.checks import UnsupportedError
from flash_qsa.ops import plan_rows
from flash_qsa.ops.batch_plan.api import PlanRows


def plan(
    query_lens: list[int],
    seq_lens: list[int],
    pages: list[list[int]],
    rings: list[int],
    num_rows: int | None = None,
    ratio: int = 4,
    page_size: int = 16,
    capacity: int = 8,
    first_row: int = 0,
    **options,
) -> PlanRows:
    starts = torch.tensor([first_row, *query_lens], dtype=torch.int32).cumsum(0).int()
    columns = len(pages[0]) if pages else 0
    table = torch.tensor(pages, dtype=torch.int32).view(len(pages), columns)
    return plan_rows(
        starts,
        torch.tensor(seq_lens, dtype=torch.int32),
        table,
        torch.tensor(rings, dtype=torch.int32)[:, None],
        int(starts[-1]) if num_rows is None else num_rows,
        compress_ratio=ratio,
        page_size=page_size,
        ring_capacity=capacity,
        **options,
    )


def by_hand(
    query_lens: list[int],
    seq_lens: list[int],
    pages: list[list[int]],
    rings: list[int],
    num_rows: int,
    ratio: int,
    page_size: int,
    capacity: int,
) -> list[list[int]]:
    """[request, position, visible, main, compressed, ring] of every row, one token at a time."""
    rows = []
    for request, (count, length) in enumerate(zip(query_lens, seq_lens)):
        for position in range(length - count, length):
            if position < 0:
                rows.append([-1, -1, 0, -1, -1, -1])
                continue
            column = position // page_size
            page = pages[request][column] if column < len(pages[request]) else -1
            main = page * page_size + position % page_size if page >= 0 else -1
            closes = main >= 0 and (position + 1) % ratio == 0
            kept = rings[request] >= 0 and length - position <= capacity
            rows.append(
                [
                    request,
                    position,
                    (position + 1) // ratio,
                    main,
                    main // ratio if closes else -1,
                    rings[request] * capacity + position % capacity if kept else -1,
                ]
            )
    return rows + [[-1, -1, 0, -1, -1, -1]] * (num_rows - len(rows))


def as_rows(got: PlanRows) -> list[list[int]]:
    return torch.stack([buffer.long() for buffer in got], 1).tolist()


@pytest.mark.parity("P19", "P20")
def test_hand_worked() -> None:
    got = plan([1, 3], [9, 3], [[7], [2]], [5, 0], num_rows=6)
    assert as_rows(got) == [
        [0, 8, 2, 7 * 16 + 8, -1, 5 * 8 + 0],
        [1, 0, 0, 32, -1, 0],
        [1, 1, 0, 33, -1, 1],
        [1, 2, 0, 34, -1, 2],
        [-1, -1, 0, -1, -1, -1],
        [-1, -1, 0, -1, -1, -1],
    ]
    assert [buffer.dtype for buffer in got] == [
        torch.int32,
        torch.int64,
        torch.int32,
        torch.int64,
        torch.int64,
        torch.int64,
    ]


@pytest.mark.parity("P10")
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_equals_a_loop_over_requests(data: st.DataObject) -> None:
    ratio = data.draw(st.sampled_from([1, 2, 3, 4]))
    page_size = ratio * data.draw(st.integers(1, 5))
    capacity = ratio * data.draw(st.integers(1, 4))
    requests = data.draw(st.integers(0, 5))
    query_lens = [data.draw(st.integers(0, 9)) for _ in range(requests)]
    seq_lens = [data.draw(st.integers(0, 40)) for _ in range(requests)]
    columns = data.draw(st.integers(0, 4))
    pages = [[data.draw(st.integers(-1, 30)) for _ in range(columns)] for _ in range(requests)]
    rings = [data.draw(st.integers(-1, 6)) for _ in range(requests)]
    num_rows = sum(query_lens) + data.draw(st.integers(0, 5))
    arguments = (query_lens, seq_lens, pages, rings, num_rows, ratio, page_size, capacity)
    assert as_rows(plan(*arguments)) == by_hand(*arguments)


@pytest.mark.parity("P20")
def test_query_offsets_may_start_inside_a_larger_tensor() -> None:
    got = as_rows(plan([2], [10], [[3]], [1], num_rows=6, first_row=3))
    assert [row[0] for row in got] == [-1, -1, -1, 0, 0, -1]
    assert [row[1] for row in got] == [-1, -1, -1, 8, 9, -1]


@pytest.mark.bug("O-37")
@pytest.mark.parametrize("capacity", [8, 16])
@pytest.mark.parametrize("position", [0, 3, 4, 7, 8, 262_143, 500_001, 1_048_575])
def test_the_ring_is_addressed_by_position_alone(capacity: int, position: int) -> None:
    got = plan([1], [position + 1], [[6]], [2], capacity=capacity)
    assert int(got.ring_slots[0]) == 2 * capacity + position % capacity
    # the page table is one column wide: past it there is no page, and no slot
    inside = position < 16
    assert int(got.main_slots[0]) == (6 * 16 + position if inside else -1)
    closes = inside and position % 4 == 3
    assert int(got.compressed_slots[0]) == (6 * 4 + position // 4 if closes else -1)


@pytest.mark.bug("O-35")
@pytest.mark.parametrize("page_size", [16, 64, 128, 784, 1600, 3200])
def test_pages_hold_a_ratio_th_of_compressed_rows(page_size: int) -> None:
    pages = torch.randperm(5)[:3].tolist()
    per_page = page_size // 4
    for block in (0, per_page - 1, per_page, 3 * per_page - 1):
        length = 4 * (block + 1)
        got = plan([1], [length], [pages], [0], page_size=page_size)
        want = pages[block // per_page] * per_page + block % per_page
        assert int(got.compressed_slots[0]) == want
        assert (
            int(got.main_slots[0])
            == pages[(length - 1) // page_size] * page_size + (length - 1) % page_size
        )


@pytest.mark.bug("O-35", "O-37")
def test_no_two_rows_share_a_cell() -> None:
    got = plan([1, 40, 6], [30, 40, 41], [[0, 1, -1], [2, 3, 4], [5, 6, 7]], [1, 0, 2])
    for slots in (got.main_slots, got.compressed_slots, got.ring_slots):
        used = slots[slots >= 0]
        assert used.unique().numel() == used.numel()
    assert (got.ring_slots >= 0).sum() == 1 + 8 + 6


def test_refusals_and_buffers() -> None:
    arguments = ([2, 1], [9, 4], [[0], [1]], [0, 1])
    out = PlanRows.empty(3, "cpu")
    assert plan(*arguments, out=out) is out
    assert as_rows(out) == as_rows(plan(*arguments))
    with pytest.raises(ValueError, match="page_size: 18 tokens are not a multiple"):
        plan(*arguments, page_size=18)
    with pytest.raises(ValueError, match="out: expected shape"):
        plan(*arguments, out=PlanRows.empty(4, "cpu"))
    with pytest.raises(UnsupportedError, match="out: dtype int32"):
        plan(*arguments, out=out._replace(positions=out.request_ids))
    for name in ("ratio", "capacity"):
        with pytest.raises(ValueError, match="expected a positive integer"):
            plan(*arguments, **{name: 0})
    starts, lengths = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    sizes = {"compress_ratio": 4, "page_size": 16, "ring_capacity": 8}
    with pytest.raises(ValueError, match="query_start: expected shape"):
        plan_rows(starts[:2], lengths, table, table, 1, **sizes)
    with pytest.raises(UnsupportedError, match="seq_lens: dtype int64"):
        plan_rows(starts, lengths.long(), table, table, 1, **sizes)
    with pytest.raises(ValueError, match="ring_table: expected a column"):
        plan_rows(starts, lengths, table, table[:, :0], 1, **sizes)
