"""QSACache: the tensors of every QSA layer under one record of requests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from flash_qsa.cache import moves, snapshot
from flash_qsa.cache.ledger import Freed, RequestLedger, RequestStep
from flash_qsa.cache.pages import PageAllocator
from flash_qsa.cache.planning import PlanBuffers, build_plan
from flash_qsa.cache.rings import RingAllocator
from flash_qsa.cache.snapshot import RequestSnapshot
from flash_qsa.cache.spec import CacheSpec
from flash_qsa.config import QSAConfig
from flash_qsa.ops.fp8 import as_bytes
from flash_qsa.ops.prepare.api import Caches
from flash_qsa.plan import BatchPlan


class QSACache:
    """Caches of all layers with one page list, ring slot and length per request.

    Every layer of a request has the same pages, so no layer, and neither the keys nor their
    compressed form, can fall out of step.

    Args:
        spec: geometry; `from_config` builds it.
        device: where the tensors are allocated.
        reserve_null: keep page 0 and ring slot 0 unused, as engines that point padding there do.
        layers: tensors of the caller to use instead; any strides with a contiguous last axis.

    Attributes:
        layers: `ops.prepare.Caches` of each layer, what `ops.prepare` takes.
        ledger: the record of requests.

    Example::

        cache = QSACache.from_config(config, num_layers=12, num_pages=512, page_size=64,
                                     num_ring_slots=8)
        cache.allocate("a")
        plan = cache.plan(cache.append({"a": 100}))
        prepare(qkv, index_qk, positions, rope, norms, cache.layers[0], plan)
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        device: torch.device | str = "cpu",
        reserve_null: bool = False,
        layers: Sequence[Caches] | None = None,
    ) -> None:
        self.spec = spec
        if layers is None:
            layers = spec.allocate(device)
        spec.require(layers)
        self.layers: tuple[Caches, ...] = tuple(layers)
        self.ledger = RequestLedger(
            PageAllocator(spec.num_pages, reserved=int(reserve_null)),
            RingAllocator(spec.num_ring_slots, reserved=int(reserve_null)),
            page_size=spec.page_size,
            compress_ratio=spec.compress_ratio,
            ring_capacity=spec.ring_capacity,
        )

    @classmethod
    def from_config(
        cls,
        config: QSAConfig,
        *,
        device: torch.device | str = "cpu",
        reserve_null: bool = False,
        **sizes,
    ) -> QSACache:
        """A cache for `config`; `sizes` are the arguments of `CacheSpec.from_config`."""
        spec = CacheSpec.from_config(config, **sizes)
        return cls(spec, device=device, reserve_null=reserve_null)

    @property
    def device(self) -> torch.device:
        return self.layers[0].main.device

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the tensors' storages, each counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for layer in self.layers
            for tensor in layer
        }
        return sum(storages.values())

    @property
    def requests(self) -> tuple[Hashable, ...]:
        return tuple(self.ledger.requests)

    def length(self, request: Hashable) -> int:
        """Tokens of `request`."""
        return self.ledger.state(request).length

    def pages(self, request: Hashable) -> tuple[int, ...]:
        """Physical pages of `request` in logical order."""
        return tuple(self.ledger.state(request).pages)

    def ring_slot(self, request: Hashable) -> int:
        """Ring slot of `request`, the same in every layer."""
        return self.ledger.state(request).ring_slot

    def raw_from(self, request: Hashable) -> int:
        """First position whose raw key the ring holds; all up to the length are there."""
        return self.ledger.state(request).raw_from

    def allocate(self, request: Hashable) -> None:
        """Admits a request without tokens.

        Raises:
            ValueError: a request that exists. CacheExhaustedError: no ring slot is free.
        """
        self.ledger.admit(request)

    def append(self, counts: Mapping[Hashable, int]) -> list[RequestStep]:
        """Reserves tokens for one step of several requests, in the mapping's order.

        The step must then run on every layer: from here on the tokens count as written. A page
        that a fork still shares is copied before the first write into it.

        Raises:
            KeyError: an unknown request. ValueError: a count below 0.
            CacheExhaustedError: too few pages; nothing has changed.
        """
        steps, copies = self.ledger.append(counts)
        for shared, own in copies:
            for layer in self.layers:
                for cache in (layer.main, layer.compressed):
                    as_bytes(cache)[own] = as_bytes(cache)[shared]
        return steps

    def plan(
        self,
        steps: Sequence[RequestStep],
        *,
        num_rows: int | None = None,
        num_decodes: int | None = None,
        max_seq_len: int | None = None,
        out: PlanBuffers | None = None,
        backend: str = "auto",
    ) -> BatchPlan:
        """`build_plan` with this cache's sizes."""
        return build_plan(
            [step.query_len for step in steps],
            [step.seq_len for step in steps],
            [step.pages for step in steps],
            [step.ring_slot for step in steps],
            compress_ratio=self.spec.compress_ratio,
            page_size=self.spec.page_size,
            ring_capacity=self.spec.ring_capacity,
            num_decodes=num_decodes,
            draft_tokens=self.spec.draft_tokens,
            num_rows=num_rows,
            max_seq_len=max_seq_len,
            device=self.device,
            out=out,
            backend=backend,
        )

    def truncate(self, request: Hashable, length: int, *, to_group_start: bool = False) -> int:
        """Drops the tokens from `length` on; returns the new length.

        Args:
            to_group_start: where the raw keys of the group that `length` opens are gone, lower
                the length to the group's start instead of refusing; append the rest again.

        Raises:
            ValueError: a length beyond the request's.
            RecomputeError: those raw keys are gone; nothing has changed.
        """
        return self.ledger.truncate(request, length, to_group_start)

    def fork(
        self,
        parent: Hashable,
        child: Hashable,
        length: int | None = None,
        *,
        to_group_start: bool = False,
        open_group: Sequence[torch.Tensor] | None = None,
    ) -> int:
        """Makes `child` share the first `length` tokens of `parent` (all by default).

        Pages are shared until one of the two writes into them; the ring is copied.

        Args:
            to_group_start: as in `truncate`, for the child; the parent never changes.
            open_group: ring rows [length % C, width] of every layer, as `open_group()` gave them
                while the parent was that long; for lengths whose raw keys the ring has lost.

        Returns:
            The child's length.

        Raises:
            ValueError: a child that exists, or a length beyond the parent's.
            RecomputeError, CacheExhaustedError: nothing has changed.
        """
        length = self.length(parent) if length is None else length
        if open_group is None:
            length = self.ledger.open_at(parent, length, to_group_start)
        else:
            self.ledger.require_length(parent, length)
            self._require_rows(open_group, length - self.ledger.group_start(length))
        child_state = self.ledger.fork(parent, child, length, open_group is not None)
        for layer in self.layers:
            layer.ring[child_state.ring_slot] = layer.ring[self.ring_slot(parent)]
        if open_group is not None:
            cells = self._open_cells(length)
            for layer, rows in zip(self.layers, open_group):
                layer.ring[child_state.ring_slot, cells, 0] = rows.to(self.device)
        return length

    def open_group(self, request: Hashable) -> list[torch.Tensor]:
        """Copies of the open group's ring rows [length % C, width], one a layer.

        Raises:
            RecomputeError: the ring does not hold them.
        """
        length = self.ledger.open_at(request, self.length(request))
        cells, slot = self._open_cells(length), self.ring_slot(request)
        return [layer.ring[slot, cells, 0] for layer in self.layers]

    def free(self, request: Hashable) -> Freed:
        """Forgets a request.

        Raises:
            KeyError: an unknown request, also one that was freed before.
        """
        return self.ledger.free(request)

    def export(
        self, request: Hashable, device: torch.device | str | None = None
    ) -> RequestSnapshot:
        """Copies all state of a request: main rows, compressed keys, ring rows and length."""
        state = self.ledger.state(request)
        return snapshot.read(self.spec, self.layers, state, device)

    def restore(self, request: Hashable, saved: RequestSnapshot) -> None:
        """Admits a request with the state of `saved`, in pages and a slot of its own.

        Raises:
            ValueError: a request that exists; a snapshot that lacks a part or has another geometry.
            CacheExhaustedError: too few pages, or no slot. Nothing has changed in either case.
        """
        snapshot.require_complete(saved, self.spec)
        state = self.ledger.admit(request, saved.length)
        try:
            state.raw_from = snapshot.write(saved, self.spec, self.layers, state)
        except Exception:
            self.ledger.free(request)
            raise

    def move_pages(self, targets: Mapping[int, int]) -> None:
        """Moves used pages, keys and compressed keys of all layers together, and every table entry.

        Raises:
            ValueError: see `PageAllocator.relocate`; nothing has changed.
        """
        self.ledger.relocate(targets)
        contents = moves.read_pages(self.layers, list(targets))
        moves.write_pages(self.layers, list(targets.values()), contents)

    def _open_cells(self, length: int) -> torch.Tensor:
        """int64 ring rows of the group that is open after `length` tokens."""
        tokens = torch.arange(self.ledger.group_start(length), length, device=self.device)
        return tokens % self.spec.ring_capacity

    def _require_rows(self, open_group: Sequence[torch.Tensor], count: int) -> None:
        expected = (count, self.spec.ring_width)
        shapes = [tuple(rows.shape) for rows in open_group]
        if shapes != [expected] * self.spec.num_layers:
            raise ValueError(
                f"open_group: expected {self.spec.num_layers} tensors of {list(expected)}, "
                f"got {shapes}"
            )
