"""The scheduler soak: thousands of random steps over many requests, each against the oracle.

Claims: whatever order appends, chunks, decodes, drafts with rejections, forks, truncations,
snapshots, page moves, frees and reuses come in, every output row of every layer is the oracle's
for that request's own tokens, and so is every request's whole state; a refused operation changes
nothing; memory that no request owns may hold NaN. Layers share one record of requests.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from paged_model import PagedModel

from flash_qsa.cache import CacheExhaustedError, RecomputeError

LONGEST = 80
DRAFTS = 3


class Scheduler:
    """Draws operations; keeps the model's requests and its own count of what happened."""

    def __init__(self, model: PagedModel) -> None:
        self.model, self.random = model, model.random
        self.next_id, self.ran = 0, Counter()

    def run(self, steps: int) -> None:
        kinds = {
            self.step: 60,
            self.admit: 7,
            self.fork: 9,
            self.truncate: 9,
            self.free: 5,
            self.swap: 4,
            self.move: 3,
        }
        for number in range(steps):
            kind = self.random.choices(list(kinds), list(kinds.values()))[0]
            touched = kind()
            self.ran[kind.__name__] += 1
            self.model.poison()
            live = [request for request in touched if request in self.model.texts]
            everybody = list(self.model.texts)
            for request in (
                everybody if number % 20 == 0 else self.random.sample(live, len(live))[:2]
            ):
                self.model.check_state(request)
            self._check_pool()

    def admit(self) -> list:
        if self.model.cache.ledger.rings.num_free == 0:
            with pytest.raises(CacheExhaustedError, match="ring slot"):
                self.model.admit(self.next_id + 1)
            return self.free()
        self.next_id += 1
        self.model.admit(self.next_id)
        return [self.next_id]

    def step(self) -> list:
        requests = list(self.model.texts)
        self.random.shuffle(requests)
        split = self.random.randint(0, len(requests))
        window = 1 + self.model.cache.spec.draft_tokens
        query_len = self.random.choice((1, 1, window, self.random.randint(1, window)))
        counts = {r: query_len for r in requests[:split] if self.model.length(r)}
        decodes = list(counts)
        for request in requests[split : split + 2]:
            counts[request] = self.random.choice((1, 1, 2, 3, 5, 7, 9, 17))
        counts = {r: n for r, n in counts.items() if self.model.length(r) + n <= LONGEST}
        decodes = [r for r in decodes if r in counts]
        if not counts:
            return self.free() if requests else []
        new = {r: self.model.draw_tokens(n, self.model.length(r)) for r, n in counts.items()}
        lengths = {r: self.model.length(r) for r in counts}
        if not self._try_forward(new, len(decodes)):
            return self.free()
        for request in decodes:
            self.ran["accepted"] += 1
            accepted = self.random.randint(0, query_len)
            self.ran["rejected"] += query_len - accepted
            self.model.truncate(request, lengths[request] + accepted)
        return list(counts)

    def _try_forward(self, new: dict, num_decodes: int) -> bool:
        before = self._record()
        try:
            self.model.forward(
                new, padding=self.random.choice((0, 0, 1, 5)), num_decodes=num_decodes
            )
        except CacheExhaustedError:
            assert self._record() == before
            self.ran["exhausted"] += 1
            return False
        self.ran["rows"] += sum(map(len, new.values()))
        return True

    def fork(self) -> list:
        if not self.model.texts:
            return []
        parent = self.random.choice(list(self.model.texts))
        length = self.random.choice(
            (self.model.length(parent), self.random.randint(0, self.model.length(parent)))
        )
        self.next_id += 1
        before = self._record()
        try:
            try:
                self.model.fork(parent, self.next_id, length)
            except RecomputeError as error:
                assert self._record() == before and error.position == self._group_start(length)
                self.ran["recompute"] += 1
                kept = self.model.fork(parent, self.next_id, length, to_group_start=True)
                assert kept == error.position
        except CacheExhaustedError:
            assert self._record() == before
            return self.free()
        return [parent, self.next_id]

    def truncate(self) -> list:
        if not self.model.texts:
            return []
        request = self.random.choice(list(self.model.texts))
        current = self.model.length(request)
        length = max(0, current - self.random.choice((1, 2, 3, 5, 9, 30)))
        held_from, before = self.model.cache.raw_from(request), self._record()
        try:
            self.model.truncate(request, length)
            assert held_from <= self._group_start(length) or length == self._group_start(length)
        except RecomputeError as error:
            assert self._record() == before and held_from > error.position
            self.ran["recompute"] += 1
            lost = self.model.texts[request].tokens[error.position : length]
            self.model.truncate(request, length, to_group_start=True)
            if lost and self.random.random() < 0.5:
                self._try_forward({request: lost}, 0)
        return [request]

    def free(self) -> list:
        if self.model.texts:
            self.model.free(self.random.choice(list(self.model.texts)))
        return []

    def swap(self) -> list:
        """Out and in again: all state leaves the pool and comes back to other cells."""
        if not self.model.texts:
            return []
        request = self.random.choice(list(self.model.texts))
        saved, text = self.model.cache.export(request), self.model.texts[request]
        self.model.free(request)
        self.model.poison()
        try:
            self.model.restore(request, saved, text)
        except CacheExhaustedError:
            return []
        return [request]

    def move(self) -> list:
        ledger = self.model.cache.ledger
        used = sorted({page for state in ledger.requests.values() for page in state.pages})
        pool = range(ledger.pages.reserved, ledger.pages.num_pages)
        free = [page for page in pool if ledger.pages.references(page) == 0]
        moved = self.random.sample(used, min(3, len(used)))
        targets = self.random.sample(free + moved, len(moved))
        self.model.cache.move_pages(dict(zip(moved, targets)))
        return list(self.model.texts)

    def _group_start(self, length: int) -> int:
        return length - length % self.model.config.compress_ratio

    def _record(self) -> tuple:
        ledger = self.model.cache.ledger
        states = {
            r: (*s.pages, s.ring_slot, s.length, s.raw_from) for r, s in ledger.requests.items()
        }
        return states, ledger.pages.num_free, ledger.rings.num_free

    def _check_pool(self) -> None:
        """References are exactly the page lists, and everything else is free."""
        ledger = self.model.cache.ledger
        listed = Counter(page for state in ledger.requests.values() for page in state.pages)
        for page in range(ledger.pages.num_pages):
            assert ledger.pages.references(page) == listed[page]
        reserved = ledger.pages.reserved
        assert ledger.pages.num_free == ledger.pages.num_pages - reserved - len(listed)
        assert 0 not in listed
        slots = [state.ring_slot for state in ledger.requests.values()]
        assert len(set(slots)) == len(slots) and 0 not in slots


@pytest.mark.bug("O-18", "O-20", "O-30", "O-31")
@pytest.mark.parity("P06", "P16")
def test_two_thousand_random_steps_equal_the_oracle() -> None:
    model = PagedModel(num_layers=1, num_pages=40, num_ring_slots=7, draft_tokens=DRAFTS, seed=11)
    scheduler = Scheduler(model)
    scheduler.run(2_000)
    ran = scheduler.ran
    for kind in ("step", "admit", "fork", "truncate", "free", "swap", "move"):
        assert ran[kind] >= 40, ran
    for happened in ("rejected", "exhausted", "recompute"):
        assert ran[happened] >= 10, ran
    assert ran["rows"] >= 4_000, ran
    assert torch.isnan(model.cache.layers[0].main).any()


@pytest.mark.bug("O-18", "O-51")
@pytest.mark.parametrize(
    ("ratio", "budget", "page_size", "drafts", "mrope", "layers"),
    [
        (1, 5, 6, 2, True, 1),
        (2, 8, 8, 5, False, 1),
        (3, 9, 6, 0, True, 1),
        (8, 24, 16, 3, True, 2),
        (4, 16, 4, 8, True, 1),
    ],
)
def test_random_steps_hold_for_other_geometries(
    ratio: int, budget: int, page_size: int, drafts: int, mrope: bool, layers: int
) -> None:
    model = PagedModel(
        num_layers=layers,
        num_pages=40,
        page_size=page_size,
        num_ring_slots=7,
        draft_tokens=drafts,
        ratio=ratio,
        budget=budget,
        mrope=mrope,
        seed=ratio,
    )
    scheduler = Scheduler(model)
    scheduler.run(60)
    assert scheduler.ran["rows"] >= 50, scheduler.ran
