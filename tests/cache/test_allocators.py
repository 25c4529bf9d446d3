"""Page and ring allocators: bookkeeping without a tensor.

Claims: a page or slot is handed out once until it is given back; reserved ones never; references
count the holders; exhaustion and misuse raise with the numbers and change nothing.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.cache import (
    CacheExhaustedError,
    PageAllocator,
    RingAllocator,
    ring_capacity,
)


def test_pages_are_distinct_and_reserved_ones_stay() -> None:
    pool = PageAllocator(6, reserved=2)
    pages = pool.allocate(4)
    assert sorted(pages) == [2, 3, 4, 5] and pool.num_free == 0 and pool.num_used == 4
    assert [pool.references(page) for page in range(6)] == [0, 0, 1, 1, 1, 1]


def test_exhaustion_takes_nothing() -> None:
    pool = PageAllocator(4, reserved=1)
    held = pool.allocate(1)
    with pytest.raises(CacheExhaustedError, match="3 pages are needed, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2 and pool.references(held[0]) == 1
    assert len(pool.allocate(2)) == 2


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    pool = PageAllocator(2)
    (page,) = pool.allocate(1)
    pool.share([page])
    assert pool.release([page]) == [] and pool.references(page) == 1
    assert pool.release([page]) == [page] and pool.num_free == 2


@pytest.mark.parametrize("pages", [[0], [1], [0, 0], [2], [-1]])
def test_double_frees_are_refused_whole(pages: list[int]) -> None:
    pool = PageAllocator(3)
    (held,) = pool.allocate(1)
    assert held == 0
    if pages == [0]:
        pool.release(pages)
    before = pool.num_free
    with pytest.raises(ValueError, match="released . times"):
        pool.release(pages)
    assert pool.num_free == before


def test_sharing_a_free_page_is_refused_whole() -> None:
    pool = PageAllocator(3)
    (held,) = pool.allocate(1)
    with pytest.raises(ValueError, match="page 2 cannot be shared"):
        pool.share([held, 2])
    assert pool.references(held) == 1


@pytest.mark.parametrize(("pages", "reserved"), [(0, 0), (1, 1), (3, -1)])
def test_pools_without_a_page_are_refused(pages: int, reserved: int) -> None:
    with pytest.raises(ValueError, match="leave none"):
        PageAllocator(pages, reserved=reserved)
    with pytest.raises(ValueError, match="leave none"):
        RingAllocator(pages, reserved=reserved)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        PageAllocator(2).allocate(-1)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ({5: 6}, "not in use"),
        ({1: 2}, "in use"),
        ({1: 0}, "reserved"),
        ({1: 9}, "outside the pool"),
        ({1: 6, 2: 6}, "twice"),
    ],
)
def test_impossible_moves_are_refused(moves: dict[int, int], message: str) -> None:
    pool = PageAllocator(8, reserved=1)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(ValueError, match=message):
        pool.relocate(moves)
    assert [pool.references(page) for page in range(8)] == [0, 1, 1, 0, 0, 0, 0, 0]


def test_moves_may_permute_and_free_what_they_leave() -> None:
    pool = PageAllocator(5)
    pool.allocate(3)
    pool.share([0])
    pool.relocate({0: 1, 1: 0, 2: 4})
    assert [pool.references(page) for page in range(5)] == [1, 2, 0, 0, 1]
    assert sorted(pool.allocate(2)) == [2, 3]


def test_ring_slots_are_distinct_and_freed_once() -> None:
    rings = RingAllocator(3, reserved=1)
    assert sorted((rings.allocate(), rings.allocate())) == [1, 2] and rings.num_used == 2
    with pytest.raises(CacheExhaustedError, match="0 of 2 are free"):
        rings.allocate()
    rings.release(2)
    for slot in (2, 0, 7):
        with pytest.raises(ValueError, match="not in use"):
            rings.release(slot)
    assert rings.allocate() == 2


@pytest.mark.parametrize(
    ("ratio", "drafts", "rows"), [(4, 0, 4), (4, 1, 8), (4, 4, 8), (4, 5, 12), (1, 0, 1), (3, 2, 6)]
)
def test_ring_capacity_is_group_and_drafts_in_whole_groups(
    ratio: int, drafts: int, rows: int
) -> None:
    assert ring_capacity(ratio, drafts) == rows


def test_impossible_rings_are_refused() -> None:
    for ratio, drafts in ((0, 0), (4, -1)):
        with pytest.raises(ValueError, match=f"got {ratio} and {drafts}"):
            ring_capacity(ratio, drafts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_page_references_equal_a_counter(script: list[tuple[int, int]]) -> None:
    pool, held = PageAllocator(9, reserved=1), Counter()
    for action, amount in script:
        pages = sorted(page for page, times in held.items() if times)
        if action == 0 and amount <= pool.num_free:
            held.update(pool.allocate(amount))
        elif action == 1 and pages:
            pool.share([pages[amount % len(pages)]])
            held[pages[amount % len(pages)]] += 1
        elif action == 2 and pages:
            page = pages[amount % len(pages)]
            held[page] -= 1
            assert pool.release([page]) == ([] if held[page] else [page])
        elif action == 3 and pages:
            free = [page for page in range(1, 9) if not held[page]]
            old, new = pages[amount % len(pages)], (free + pages)[0]
            if new in free or new == old:
                pool.relocate({old: new})
                held[new], held[old] = held[old], held[new]
        assert [pool.references(page) for page in range(9)] == [held[page] for page in range(9)]
        assert pool.num_free == 8 - sum(1 for times in held.values() if times)
