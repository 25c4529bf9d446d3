"""Inputs of a whole step before selection: projections, positions, norms, and three caches.

Hostile like `inputs.py`: every cell that the step must not read is NaN, pages and ring slots are
permuted, tensors are views with odd strides.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from flash_qsa.config import RopeConfig
from flash_qsa.ops.compress_keys.ring_rows import pack_rows, ring_width
from flash_qsa.ops.fp8 import as_bytes, is_fp8, to_storage
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared, prepare
from flash_qsa.ops.rotary import RopeTable, canonical_positions
from flash_qsa.plan import BatchPlan
from flash_qsa.testing.inputs import Shape, make_plan, scattered_view

SMALL = Shape()


@dataclass(frozen=True)
class StepProblem:
    """Arguments of `prepare`. history: raw keys and canonical positions of every request's tokens,
    the step's included, in token order."""

    shape: Shape
    qkv: torch.Tensor
    index_qk: torch.Tensor
    positions: torch.Tensor
    rope: RopeTable
    norms: Norms
    caches: Caches
    plan: BatchPlan
    history: list[tuple[torch.Tensor, torch.Tensor]]

    def clone_caches(self) -> Caches:
        """The caches with the same bits and strides, in memory of their own."""
        return Caches(*(clone_view(cache) for cache in self.caches))

    def run(self, caches: Caches | None = None, **options) -> Prepared:
        """Calls `prepare` on `caches` (the problem's own by default)."""
        return prepare(
            self.qkv,
            self.index_qk,
            self.positions,
            self.rope,
            self.norms,
            self.caches if caches is None else caches,
            self.plan,
            **options,
        )


def clone_view(view: torch.Tensor) -> torch.Tensor:
    """A copy of `view` and of the memory between its elements, with the same strides."""
    raw = as_bytes(view)
    reach = sum((n - 1) * s for n, s in zip(raw.shape, raw.stride())) + 1 if raw.numel() else 0
    whole = raw.as_strided((reach,), (1,), raw.storage_offset()).clone()
    copy = whole.as_strided(raw.shape, raw.stride())
    return copy.view(view.dtype) if is_fp8(view.dtype) else copy


def make_step(
    seq_lens: list[int],
    query_lens: list[int],
    shape: Shape = SMALL,
    *,
    dtype: torch.dtype = torch.float32,
    main_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype | None = None,
    rope: RopeConfig | None = None,
    position_form: str = "1d",
    ring_positions: bool = False,
    padding: int = 0,
    spare_pages: int = 2,
    scale: float = 1.0,
    plan_backend: str = "reference",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> StepProblem:
    """A step of `query_lens` rows after which the requests have `seq_lens` tokens.

    position_form: "1d" [T], "1xT", "3d" [3, T] with axes that differ, or "canonical" [T, 1, 3].
    ring_positions: ring rows carry exact positions. scale: magnitude of the projections.
    """
    generator = torch.Generator().manual_seed(seed)
    rope = rope or RopeConfig(rotary_dim=shape.index_dim // 2, max_positions=4096)
    requests, size = len(seq_lens), shape.page_size
    needed = [-(-length // size) for length in seq_lens]
    pages = sum(needed) + spare_pages
    order = torch.randperm(pages, generator=generator).int().tolist()
    page_table = torch.full((requests, max(needed, default=0) + 1), -1, dtype=torch.int32)
    for request, count in enumerate(needed):
        page_table[request, :count] = torch.tensor([order.pop() for _ in range(count)])
    slots = requests + 1
    ring_table = torch.randperm(slots, generator=generator)[:requests, None].int()
    plan = make_plan(
        query_lens,
        seq_lens,
        page_table,
        shape,
        ring_table=ring_table,
        padding=padding,
        backend=plan_backend,
    )

    def draw(*sizes: int) -> torch.Tensor:
        return (torch.randn(*sizes, generator=generator) * scale).to(dtype)

    history = []
    for length in seq_lens:
        token = torch.arange(length)
        positions = torch.stack((token, token, token), -1)
        if position_form in ("3d", "canonical"):
            positions = torch.stack((token // 2, token // 3 + 1, token % 7 + token // 4), -1)
        history.append((draw(length, shape.index_dim), positions[:, None]))

    total = sum(query_lens)
    qkv_width = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    qkv = torch.full((total + padding, qkv_width), float("nan"), dtype=dtype)
    qkv[:total] = draw(total, qkv_width)
    index_qk = torch.full((total + padding, (shape.index_heads + 1) * shape.index_dim), torch.nan)
    index_qk = index_qk.to(dtype)
    query_width = shape.index_heads * shape.index_dim
    index_qk[:total, :query_width] = draw(total, query_width)
    positions = torch.full((total + padding, 1, 3), 1 << 40)
    start = 0
    for (keys, where), length, count in zip(history, seq_lens, query_lens):
        index_qk[start : start + count, query_width:] = keys[length - count :]
        positions[start : start + count] = where[length - count :]
        start += count

    width = ring_width(shape.index_dim, dtype, ring_positions)
    ring = torch.full((slots, shape.ring_capacity, 1, width), float("nan"), dtype=dtype)
    for request, (keys, where) in enumerate(history):
        before = seq_lens[request] - query_lens[request]
        kept = torch.arange(max(0, before - shape.ring_capacity), before)
        packed = pack_rows(keys[kept], where[kept], width)
        ring[int(ring_table[request, 0]), kept % shape.ring_capacity, 0] = packed

    def cache(*sizes: int, to: torch.dtype) -> torch.Tensor:
        return scattered_view(to_storage(torch.full(sizes, float("nan")), to).to(device))

    main_dtype, index_dtype = main_dtype or dtype, index_dtype or dtype
    caches = Caches(
        cache(pages, shape.kv_heads, size, 2 * shape.head_dim, to=main_dtype),
        cache(pages, size // shape.ratio, 1, shape.index_dim, to=index_dtype),
        scattered_view(ring.to(device)),
    )
    norms = Norms(
        *(
            (torch.randn(dim, generator=generator) * 0.3).to(dtype).to(device)
            for dim in (shape.index_dim, shape.index_dim, shape.head_dim, shape.head_dim)
        ),
        eps=1e-6,
    )
    forms = {
        "1d": positions[:, 0, 0],
        "1xT": positions[:, 0, :1].t(),
        "3d": positions[:, 0].t(),
        "canonical": positions,
    }
    return StepProblem(
        shape,
        scattered_view(qkv.to(device)),
        scattered_view(index_qk.to(device)),
        forms[position_form].to(device),
        RopeTable.from_config(rope, dtype, device),
        norms,
        caches,
        plan_to(plan, device),
        [(keys, canonical_positions(where)) for keys, where in history],
    )


def plan_to(plan: BatchPlan, device: torch.device | str) -> BatchPlan:
    """The plan with its tensors on `device`."""
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(plan)
        if isinstance(value := getattr(plan, field.name), torch.Tensor)
    }
    return dataclasses.replace(plan, **moved)
