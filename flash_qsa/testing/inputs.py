"""Hostile inputs: permuted pages, NaN wherever nothing may be read, views with odd strides.

Values are drawn on the CPU from a seed, so that every device sees the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_qsa.ops.batch_plan.api import plan_rows
from flash_qsa.ops.fp8 import as_bytes, is_fp8, to_storage
from flash_qsa.plan import BatchPlan


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem, in DESIGN.md's letters; small by default, for the interpreter."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    index_heads: int = 2
    index_dim: int = 16
    ratio: int = 4
    page_size: int = 16
    top_k: int = 4
    ring_capacity: int = 8


REAL = Shape(
    heads=24, kv_heads=2, head_dim=256, index_heads=4, index_dim=128, page_size=64, top_k=512
)
"""Qwen3.8-Flash-Next on one GPU."""


@dataclass(frozen=True)
class Problem:
    """One step over a paged state, complete: what selection and attention take."""

    shape: Shape
    plan: BatchPlan
    query: torch.Tensor  # [T, Hq, D]
    gate: torch.Tensor  # [T, Hq, D]
    index_query: torch.Tensor  # [T, Hi, Di]
    kv_cache: torch.Tensor  # [P, Hkv, S, 2·D]
    key_cache: torch.Tensor  # [P, S/C, 1, Di]

    def block_ids(self, seed: int = 0) -> torch.Tensor:
        """int32 [T, K]: a random ascending selection of each row's visible blocks."""
        generator = torch.Generator().manual_seed(seed)
        out = torch.full((self.plan.num_rows, self.shape.top_k), -1, dtype=torch.int32)
        for row, visible in enumerate(self.plan.visible_blocks.tolist()):
            chosen = torch.randperm(max(visible, 0), generator=generator)[: self.shape.top_k]
            out[row, : chosen.numel()] = chosen.sort().values.int()
        return out.to(self.query.device)


def make_problem(
    seq_lens: list[int],
    query_lens: list[int],
    shape: Shape = Shape(),
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype | None = None,
    padding: int = 0,
    spare_pages: int = 2,
    device: torch.device | str = "cpu",
    draw_on: torch.device | str = "cpu",
    seed: int = 0,
) -> Problem:
    """A problem whose requests have `seq_lens` tokens after a step of `query_lens` rows.

    Cells that hold no token, spare pages and padding rows are NaN (FP8: its NaN code); pages are a
    random permutation; every tensor is a non-contiguous view with a contiguous last axis.

    Values are drawn on `draw_on`: on the CPU every device gets the same numbers, on a GPU a long
    context takes milliseconds.
    """
    generator = torch.Generator().manual_seed(seed)
    requests, size = len(seq_lens), shape.page_size
    columns = max((-(-length // size) for length in seq_lens), default=0) + 1
    needed = [-(-length // size) for length in seq_lens]
    pages = sum(needed) + spare_pages
    order = torch.randperm(pages, generator=generator).int()
    page_table = torch.full((requests, columns), -1, dtype=torch.int32)
    taken = 0
    for request, count in enumerate(needed):
        page_table[request, :count] = order[taken : taken + count]
        taken += count
    plan = make_plan(query_lens, seq_lens, page_table, shape, padding=padding, device=device)
    page_table = page_table.to(draw_on)
    if torch.device(draw_on).type != "cpu":
        generator = torch.Generator(draw_on).manual_seed(seed)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=draw_on)

    def spoiled(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, float("nan"), device=draw_on)

    def filled(rows: int, heads: int, dim: int) -> torch.Tensor:
        values = spoiled(rows + padding, heads, dim)
        values[:rows] = drawn(rows, heads, dim)
        return values

    total = sum(query_lens)
    kv = spoiled(pages, shape.kv_heads, size, 2 * shape.head_dim)
    keys = spoiled(pages, size // shape.ratio, 1, shape.index_dim)
    for request, length in enumerate(seq_lens):
        token = torch.arange(length, device=draw_on)
        page = page_table[request].long()[token // size]
        kv[page, :, token % size] = drawn(length, shape.kv_heads, 2 * shape.head_dim)
        block = torch.arange(length // shape.ratio, device=draw_on)
        per_page = size // shape.ratio
        page = page_table[request].long()[block // per_page]
        keys[page, block % per_page, 0] = drawn(length // shape.ratio, shape.index_dim)
    index_dtype = index_dtype or dtype
    index_query = filled(total, shape.index_heads, shape.index_dim)

    def place(values: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        return scattered_view(to_storage(values, to).to(device))

    return Problem(
        shape,
        plan,
        place(filled(total, shape.heads, shape.head_dim), dtype),
        place(filled(total, shape.heads, shape.head_dim), dtype),
        place(index_query, index_dtype),
        place(kv, kv_dtype or dtype),
        place(keys, index_dtype),
    )


def make_plan(
    query_lens: list[int],
    seq_lens: list[int],
    page_table: torch.Tensor,
    shape: Shape,
    *,
    ring_table: torch.Tensor | None = None,
    padding: int = 0,
    decode_query_len: int = 1,
    device: torch.device | str = "cpu",
    backend: str = "reference",
) -> BatchPlan:
    """A BatchPlan straight from lengths; leading requests of decode_query_len rows are decodes."""
    requests = len(seq_lens)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    if ring_table is None:
        ring_table = torch.arange(requests, dtype=torch.int32)[:, None]
    tensors = [t.to(device) for t in (starts, lengths, page_table, ring_table)]
    rows = plan_rows(
        *tensors,
        sum(query_lens) + padding,
        compress_ratio=shape.ratio,
        page_size=shape.page_size,
        ring_capacity=shape.ring_capacity,
        backend=backend,
    )
    decodes = next((i for i, n in enumerate(query_lens) if n != decode_query_len), requests)
    return BatchPlan(
        num_tokens=sum(query_lens),
        num_requests=requests,
        num_decodes=decodes,
        num_decode_tokens=decodes * decode_query_len,
        decode_query_len=decode_query_len,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        compress_ratio=shape.ratio,
        page_size=shape.page_size,
        ring_capacity=shape.ring_capacity,
        query_start=tensors[0],
        seq_lens=tensors[1],
        page_table=tensors[2],
        ring_table=tensors[3],
        **rows._asdict(),
    )


def scattered_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a view whose strides exceed its shape, NaN in between and behind."""
    if tensor.dim() < 2:
        return tensor
    shape = list(tensor.shape)
    shape[0] += 1
    shape[-1] += 16
    if tensor.dim() > 2:
        shape[1] += 1
    backing = torch.full(shape, float("nan"), device=tensor.device)
    backing = to_storage(backing, tensor.dtype)
    view = as_bytes(backing)[tuple(slice(0, size) for size in tensor.shape)]
    view.copy_(as_bytes(tensor))
    return view.view(tensor.dtype) if is_fp8(tensor.dtype) else view


def score_dial(
    scores: torch.Tensor, shape: Shape, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """index_query [1, Hi, Di], key_cache and page_table such that block b scores scores[b].

    The last index channel of head 0 carries the score, every other product is zero.
    """
    count, per_page = scores.numel(), shape.page_size // shape.ratio
    pages = -(-count // per_page)
    query = torch.zeros(1, shape.index_heads, shape.index_dim, dtype=dtype)
    query[0, 0, -1] = 1
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(count))
    keys = torch.zeros(pages * per_page, shape.index_dim, dtype=dtype)
    keys[:count, -1] = scores.to(dtype)
    cache = torch.empty(pages, per_page, 1, shape.index_dim, dtype=dtype)
    cache[order] = keys.view(pages, per_page, 1, shape.index_dim)
    return query, cache, order.int()[None]
