"""What prepare's kernel is launched with: its operands, grouped, and its compile-time constants."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from flash_qsa.dispatch import interpreting
from flash_qsa.ops.compress_keys.ring_rows import position_offset, stores_positions
from flash_qsa.ops.device import Groups, Heads, Positions, Ring
from flash_qsa.ops.fp8 import as_bytes, is_fp8
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.prepare.kernel_rotary import Rope, Table
from flash_qsa.ops.prepare.tiles import Tiles, choose_tiles
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import device_target


class Plan(NamedTuple):
    """The plan's tensors, with the ring table's stride."""

    query_start: Any
    seq_lens: Any
    ring_table: Any
    ring_table_stride: Any
    request_ids: Any
    positions: Any
    main_slots: Any
    compressed_slots: Any
    ring_slots: Any


class Weights(NamedTuple):
    """Norm weights and their epsilon."""

    index_query: Any
    index_key: Any
    query: Any
    key: Any
    eps: Any


class Cells(NamedTuple):
    """A paged cache and how many cells it has."""

    ptr: Any
    stride_page: Any
    stride_row: Any
    stride_head: Any
    count: Any


class Output(NamedTuple):
    """An output [T, heads, dim] with a contiguous last axis."""

    ptr: Any
    stride_row: Any
    stride_head: Any


class Scales(NamedTuple):
    """FP8 scales of K and V: None, a number, or a device tensor."""

    k: Any
    v: Any


class Sizes(NamedTuple):
    """Compile-time sizes; block and index_block are the head dims rounded up to powers of two."""

    heads: int
    kv_heads: int
    index_heads: int
    dim: int
    block: int
    index_dim: int
    index_block: int
    page: int
    page_groups: int
    main_is_fp8: bool
    index_is_fp8: bool
    k_scale: str
    v_scale: str


def rounds_pairs(x: torch.Tensor) -> bool:
    """Whether the device, and not an interpreter, rounds two numbers to x's 16 bits at once."""
    if x.element_size() != 2 or interpreting():
        return False
    return device_target(x.device).capability >= (8, 0)


@functools.lru_cache(maxsize=64)
def constants(
    query_shape: torch.Size,
    index_shape: torch.Size,
    main_shape: torch.Size,
    ring_shape: torch.Size,
    dtype: torch.dtype,
    main_dtype: torch.dtype,
    index_dtype: torch.dtype,
    ratio: int,
    k_scale: str,
    v_scale: str,
    rotary_dim: int,
    neox: bool,
    section: tuple[int, int, int] | None,
    interleaved: bool,
    packed: bool,
) -> tuple[Sizes, Rope, Groups, Tiles]:
    """What a layer's launches have in common, remembered: it costs the host more than a launch."""
    (heads, dim), (index_heads, index_dim) = query_shape, index_shape
    (kv_heads, page), (capacity, width) = main_shape, ring_shape
    block = triton.next_power_of_2(dim)
    index_block = max(4, triton.next_power_of_2(index_dim))  # covers a ring key's alignment gap
    has_positions = stores_positions(width, index_dim, dtype)
    position_at = position_offset(index_dim, dtype) if has_positions else index_dim
    half = rotary_dim // 2
    pairs = triton.next_power_of_2(half)
    axes = "one" if section is None else "interleaved" if interleaved else "runs"
    sizes = Sizes(
        heads,
        kv_heads,
        index_heads,
        dim,
        block,
        index_dim,
        index_block,
        page,
        page // ratio,
        is_fp8(main_dtype),
        is_fp8(index_dtype),
        k_scale,
        v_scale,
    )
    return (
        sizes,
        Rope(half, pairs, neox, axes, *(section or (0, 0, 0)), packed),
        Groups(ratio, capacity, index_dim, index_block, position_at, has_positions),
        choose_tiles(heads, kv_heads, index_heads, block, index_block),
    )


def scale_kind(scale: float | torch.Tensor | None) -> str:
    if scale is None:
        return "none"
    return "device" if isinstance(scale, torch.Tensor) else "number"


def operands(
    qkv: torch.Tensor,
    index_qk: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    caches: Caches,
    plan: BatchPlan,
    out: Prepared,
) -> tuple:
    """The kernel's operands up to `scales`, in its order."""
    main, compressed = as_bytes(caches.main), as_bytes(caches.compressed)
    index_query = as_bytes(out.index_query)
    ring = caches.ring.view(torch.int32 if qkv.element_size() == 4 else torch.int16)
    table = rope.cos_sin
    (pages, _, page, _), (key_pages, page_groups, _, _) = main.shape, compressed.shape
    page_stride, head_stride, row_stride, _ = main.stride()
    key_page_stride, key_stride = compressed.stride()[:2]
    return (
        Heads(qkv, qkv.stride(0)),
        Heads(index_qk, index_qk.stride(0)),
        Positions(positions, positions.stride(0)),
        Table(table, table.stride(0), table.shape[0]),
        Weights(*norms),
        Plan(
            plan.query_start.contiguous(),
            plan.seq_lens.contiguous(),
            plan.ring_table,
            plan.ring_table.stride(0),
            plan.request_ids.contiguous(),
            plan.positions.contiguous(),
            plan.main_slots.contiguous(),
            plan.compressed_slots.contiguous(),
            plan.ring_slots.contiguous(),
        ),
        Cells(main, page_stride, row_stride, head_stride, pages * page),
        Cells(compressed, key_page_stride, key_stride, 0, key_pages * page_groups),
        Ring(ring, *ring.stride()[:2], ring.shape[0]),
        Output(out.query, *out.query.stride()[:2]),
        Output(out.gate, *out.gate.stride()[:2]),
        Output(index_query, *index_query.stride()[:2]),
    )
