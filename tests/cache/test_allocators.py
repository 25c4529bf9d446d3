"""Page and ring allocators, and the ledger over them: bookkeeping without a tensor.

Claims: a page or slot is handed out once until it is given back; reserved ones never; references
count the holders; exhaustion and misuse raise with the numbers and change nothing; a shared,
partly filled page is copied exactly when somebody else still holds it; truncating into a group
needs its raw keys. The modules import no torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.cache import (
    CacheExhaustedError,
    PageAllocator,
    RecomputeError,
    RequestLedger,
    RingAllocator,
    ring_capacity,
)


def make_ledger(
    pages: int = 8, slots: int = 4, drafts: int = 0, reserved: int = 0
) -> RequestLedger:
    return RequestLedger(
        PageAllocator(pages, reserved=reserved),
        RingAllocator(slots, reserved=reserved),
        page_size=8,
        compress_ratio=4,
        ring_capacity=ring_capacity(4, drafts),
    )


def record(ledger: RequestLedger) -> tuple:
    states = {r: (*s.pages, s.ring_slot, s.length, s.raw_from) for r, s in ledger.requests.items()}
    return states, ledger.pages.num_free, ledger.rings.num_free


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


# ---- the ledger ---------------------------------------------------------------------------


def test_appending_reserves_pages_and_returns_what_a_plan_needs() -> None:
    ledger = make_ledger()
    ledger.admit("a")
    ledger.admit("b")
    steps, copies = ledger.append({"b": 9, "a": 8})
    assert [(s.request, s.query_len, s.seq_len, len(s.pages)) for s in steps] == [
        ("b", 9, 9, 2),
        ("a", 8, 8, 1),
    ]
    assert steps[0].ring_slot != steps[1].ring_slot and copies == []
    assert not set(steps[0].pages) & set(steps[1].pages)


@pytest.mark.parametrize("length", [8, 16])
def test_a_fork_at_a_page_boundary_copies_nothing(length: int) -> None:
    ledger = make_ledger()
    ledger.admit("a")
    ledger.append({"a": length})
    ledger.fork("a", "b", length, False)
    steps, copies = ledger.append({"a": 1, "b": 1})
    assert copies == [] and steps[0].pages[:-1] == steps[1].pages[:-1]
    assert steps[0].pages[-1] != steps[1].pages[-1]


def test_the_first_writer_into_a_shared_page_copies_and_the_last_does_not() -> None:
    ledger = make_ledger()
    ledger.admit("a")
    ledger.append({"a": 10})
    for child in ("b", "c"):
        ledger.fork("a", child, 10, False)
    shared = ledger.state("a").pages[1]
    steps, copies = ledger.append({"b": 1, "a": 1, "c": 1})
    assert [old for old, _ in copies] == [shared, shared]
    assert len({step.pages[1] for step in steps}) == 3 and steps[2].pages[1] == shared
    assert {step.pages[0] for step in steps} == {steps[0].pages[0]}


def test_copies_count_towards_exhaustion_exactly() -> None:
    """Two holders of one page need one copy; with one page left the step fits, with none not."""
    for left, fits in ((1, True), (0, False)):
        ledger = make_ledger(pages=2 + left)
        ledger.admit("a")
        ledger.append({"a": 10})
        ledger.fork("a", "b", 10, False)
        before = record(ledger)
        if fits:
            assert len(ledger.append({"a": 1, "b": 1})[1]) == 1
        else:
            with pytest.raises(CacheExhaustedError, match="needs 1 pages, 0 are free"):
                ledger.append({"a": 1, "b": 1})
            assert record(ledger) == before


def test_a_step_that_does_not_fit_changes_no_request() -> None:
    ledger = make_ledger(pages=3)
    ledger.admit("a")
    ledger.admit("b")
    ledger.append({"a": 8})
    before = record(ledger)
    with pytest.raises(CacheExhaustedError, match="needs 3 pages, 2 are free"):
        ledger.append({"a": 8, "b": 9})
    with pytest.raises(ValueError, match=r"counts\['b'\]"):
        ledger.append({"a": 8, "b": -1})
    with pytest.raises(KeyError, match="'c' is not in the cache"):
        ledger.append({"a": 1, "c": 1})
    assert record(ledger) == before


def test_admission_without_room_changes_nothing() -> None:
    ledger = make_ledger(pages=2, slots=2)
    ledger.admit("a")
    with pytest.raises(ValueError, match="already in the cache"):
        ledger.admit("a")
    with pytest.raises(CacheExhaustedError, match="3 pages"):
        ledger.admit("b", length=20)
    ledger.admit("b")
    before = record(ledger)
    with pytest.raises(CacheExhaustedError, match="ring slot"):
        ledger.admit("c", length=1)
    assert record(ledger) == before


def test_freeing_returns_what_nobody_else_holds() -> None:
    ledger = make_ledger()
    ledger.admit("a")
    ledger.append({"a": 10})
    ledger.fork("a", "b", 10, False)
    pages, slot = ledger.state("a").pages, ledger.state("a").ring_slot
    assert ledger.free("a") == ((), slot)
    assert sorted(ledger.free("b").pages) == sorted(pages)
    with pytest.raises(KeyError, match="'b'"):
        ledger.free("b")


@pytest.mark.bug("O-30")
@pytest.mark.parametrize("drafts", [0, 3, 5])
def test_truncation_keeps_a_group_or_says_where_to_recompute(drafts: int) -> None:
    """After n tokens the ring holds the last `capacity` raw keys, and nothing older."""
    for length in range(1, 22):
        for target in range(length + 1):
            ledger = make_ledger(drafts=drafts)
            ledger.admit("a")
            ledger.append({"a": length})
            start, before = target // 4 * 4, record(ledger)
            if target % 4 == 0 or length - ledger.ring_capacity <= start:
                assert ledger.truncate("a", target, False) == target
            else:
                with pytest.raises(RecomputeError, match=f"position {start}") as caught:
                    ledger.truncate("a", target, False)
                assert caught.value.position == start and record(ledger) == before
                assert ledger.truncate("a", target, True) == start
            state = ledger.state("a")
            assert len(state.pages) == -(-state.length // 8)


def test_raw_keys_lost_once_stay_lost_until_written_again() -> None:
    ledger = make_ledger(drafts=1)  # eight rows
    ledger.admit("a")
    ledger.append({"a": 20})
    assert ledger.truncate("a", 14, False) == 14  # rows 12 … 13 of 12 … 19 survive
    with pytest.raises(RecomputeError):
        ledger.truncate("a", 11, False)
    assert ledger.truncate("a", 8, False) == 8
    ledger.append({"a": 3})
    assert ledger.truncate("a", 9, False) == 9


def test_a_draft_window_can_always_be_rejected() -> None:
    for drafts in range(9):
        for length in range(12):
            ledger = make_ledger(drafts=drafts, pages=16)
            ledger.admit("a")
            for _ in range(length):
                ledger.append({"a": 1})
            for accepted in range(drafts + 2):
                ledger.append({"a": 1 + drafts})
                assert ledger.truncate("a", length + accepted, False) == length + accepted
                length += accepted


@pytest.mark.parametrize("length", [-1, 11])
def test_lengths_beyond_the_request_are_refused(length: int) -> None:
    ledger = make_ledger()
    ledger.admit("a")
    ledger.append({"a": 10})
    with pytest.raises(ValueError, match=f"expected 0 … 10, got {length}"):
        ledger.truncate("a", length, False)


def test_the_bookkeeping_needs_no_tensors() -> None:
    """Its three files run where torch cannot be imported."""
    script = (
        "import sys, types, importlib.util, pathlib, flash_qsa\n"
        "sys.modules['torch'] = None\n"
        "root = pathlib.Path(flash_qsa.__file__).parent / 'cache'\n"
        "package = types.ModuleType('flash_qsa.cache'); package.__path__ = [str(root)]\n"
        "sys.modules['flash_qsa.cache'] = package\n"
        "from flash_qsa.cache.ledger import RequestLedger\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
