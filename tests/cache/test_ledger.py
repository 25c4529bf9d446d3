"""RequestLedger: pages, ring slots and lengths of all requests, without a tensor.

Claims: a step that does not fit changes no request; a shared, partly filled page is copied exactly
when somebody else still holds it; truncating into a group needs its raw keys, and says where to
recompute; a draft window can always be rejected. The modules import no torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

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
