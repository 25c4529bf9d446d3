"""RequestLedger: who owns which pages and ring slot, and how long every request is.

Pure bookkeeping, no tensors: each operation either changes the record and says which copies the
caches must make, or raises and changes nothing. It is the only such record; all layers follow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flash_qsa.cache.pages import CacheExhaustedError, PageAllocator
from flash_qsa.cache.rings import RingAllocator


class RecomputeError(RuntimeError):
    """The raw keys of an open group are gone; `position` is where recomputation must start."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class RequestStep(NamedTuple):
    """One request's share of a step, as `build_plan` needs it."""

    request: Hashable
    query_len: int
    seq_len: int
    pages: tuple[int, ...]
    ring_slot: int


class Freed(NamedTuple):
    """What a freed request gave back: pages that nobody lists any more, and its ring slot."""

    pages: tuple[int, ...]
    ring_slot: int


@dataclass
class RequestState:
    """One request.

    Attributes:
        pages: physical pages in logical order.
        ring_slot: its slot in every layer's ring.
        length: tokens, all of them written.
        raw_from: first position whose raw key the ring holds; it holds all from there to the end.
    """

    pages: list[int]
    ring_slot: int
    length: int = 0
    raw_from: int = 0


class RequestLedger:
    """The record of all requests over one page pool and one ring pool."""

    def __init__(
        self,
        pages: PageAllocator,
        rings: RingAllocator,
        *,
        page_size: int,
        compress_ratio: int,
        ring_capacity: int,
    ) -> None:
        self.pages = pages
        self.rings = rings
        self.page_size = page_size
        self.compress_ratio = compress_ratio
        self.ring_capacity = ring_capacity
        self.requests: dict[Hashable, RequestState] = {}

    def state(self, request: Hashable) -> RequestState:
        """The live state of a request; KeyError for an unknown one."""
        if request not in self.requests:
            raise KeyError(f"request {request!r} is not in the cache")
        return self.requests[request]

    def group_start(self, length: int) -> int:
        """First token of the group that is open after `length` tokens."""
        return length - length % self.compress_ratio

    def admit(self, request: Hashable, length: int = 0) -> RequestState:
        """A new request with pages for `length` tokens, and no raw keys in its ring."""
        self.require_new(request)
        if self.rings.num_free == 0:
            raise CacheExhaustedError("a ring slot is needed, none is free")
        pages = self.pages.allocate(self._pages_for(length))
        state = RequestState(pages, self.rings.allocate(), length, length)
        self.requests[request] = state
        return state

    def append(
        self, counts: Mapping[Hashable, int]
    ) -> tuple[list[RequestStep], list[tuple[int, int]]]:
        """Lengthens requests; returns their steps and the page copies (from, to) to make first."""
        needed, left = 0, Counter()
        for request, count in counts.items():
            state = self.state(request)
            if count < 0:
                raise ValueError(f"counts[{request!r}]: expected at least 0, got {count}")
            if self._writes_shared_page(state, count, left):
                left[state.pages[-1]] += 1
                needed += 1
            needed += self._pages_for(state.length + count) - len(state.pages)
        if needed > self.pages.num_free:
            raise CacheExhaustedError(
                f"the step needs {needed} pages, {self.pages.num_free} are free"
            )
        steps, copies = [], []
        for request, count in counts.items():
            state = self.requests[request]
            if self._writes_shared_page(state, count, Counter()):
                shared, (own,) = state.pages[-1], self.pages.allocate(1)
                self.pages.release([shared])
                state.pages[-1] = own
                copies.append((shared, own))
            state.length += count
            state.pages += self.pages.allocate(self._pages_for(state.length) - len(state.pages))
            state.raw_from = max(state.raw_from, state.length - self.ring_capacity)
            pages = tuple(state.pages)
            steps.append(RequestStep(request, count, state.length, pages, state.ring_slot))
        return steps, copies

    def truncate(self, request: Hashable, length: int, to_group_start: bool) -> int:
        """Shortens a request; returns its new length."""
        length = self.open_at(request, length, to_group_start)
        state = self.state(request)
        keep = self._pages_for(length)
        dropped, state.pages = state.pages[keep:], state.pages[:keep]
        self.pages.release(dropped)
        state.length, state.raw_from = length, min(state.raw_from, length)
        return length

    def fork(
        self, parent: Hashable, child: Hashable, length: int, open_group_given: bool
    ) -> RequestState:
        """A child that shares the parent's pages up to `length`, which `open_at` has allowed."""
        state = self.state(parent)
        self.require_new(child)
        slot = self.rings.allocate()
        pages = state.pages[: self._pages_for(length)]
        self.pages.share(pages)
        raw_from = self.group_start(length) if open_group_given else min(state.raw_from, length)
        self.requests[child] = RequestState(pages, slot, length, raw_from)
        return self.requests[child]

    def free(self, request: Hashable) -> Freed:
        """Forgets a request."""
        state = self.state(request)
        del self.requests[request]
        self.rings.release(state.ring_slot)
        return Freed(tuple(self.pages.release(state.pages)), state.ring_slot)

    def relocate(self, targets: Mapping[int, int]) -> None:
        """Renames used pages in the pool and in every request."""
        self.pages.relocate(dict(targets))
        for state in self.requests.values():
            state.pages = [targets.get(page, page) for page in state.pages]

    def require_new(self, request: Hashable) -> None:
        """Refuses a request that exists."""
        if request in self.requests:
            raise ValueError(f"request {request!r} is already in the cache")

    def require_length(self, request: Hashable, length: int) -> None:
        """Refuses a length that the request never reached."""
        longest = self.state(request).length
        if not 0 <= length <= longest:
            raise ValueError(f"length: expected 0 … {longest}, got {length}")

    def open_at(self, request: Hashable, length: int, to_group_start: bool = False) -> int:
        """`length`, if the ring still holds the raw keys of the group that is open there.

        Otherwise the group's start where `to_group_start` allows it, or RecomputeError.
        """
        self.require_length(request, length)
        start, raw_from = self.group_start(length), self.state(request).raw_from
        if start == length or raw_from <= start:
            return length
        if to_group_start:
            return start
        raise RecomputeError(
            f"request {request!r} cannot stop at {length}: the ring holds raw keys from {raw_from} "
            f"on, the open group begins at {start}; recompute from position {start}, or pass "
            "to_group_start=True",
            start,
        )

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _writes_shared_page(self, state: RequestState, count: int, left: Counter) -> bool:
        """Whether appending writes into a page of others; `left`: who leaves it in this step."""
        if count == 0 or state.length % self.page_size == 0:
            return False
        page = state.pages[-1]
        return self.pages.references(page) - left[page] > 1
