"""Tiles of the row-union schedules, and the units of their lists: pure functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from flash_qsa.ops.sparse_attention.tiles import MAX_SHARE, Segment
from flash_qsa.targets import Target, power_of_two


@dataclass(frozen=True)
class UnionTiles:
    """The row-union schedule.

    Attributes:
        rows: R, rows that share a list of blocks. block_m: rows of the matrix tile, at least R · G.
        fixed: probabilities relative to the first tile's maximum instead of a running one.
        capacity: blocks a list may hold; a tile that needs more goes to the per-row schedule.
        build_programs, build_warps, build_regs: launch of the list builder; registers of a thread,
            None for as many as it takes.
        half: rows of each of the Hopper schedule's two consumers; 0 for the portable schedule.
        producer_regs: registers of a thread of the Hopper schedule's producer.
    """

    rows: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    fixed: bool
    capacity: int
    build_programs: int
    build_warps: int
    build_regs: int | None
    half: int = 0
    producer_regs: int = 72


BLOCK_UNION = 64
"""Tokens of a step of the Hopper row-union schedule."""

MAX_IDS = (1 << 17) - 1
"""Ids of a row in a union: those of MAX_SHARE rows are counted in 21 bits."""


def choose_union(
    segment: Segment,
    group: int,
    kv_heads: int,
    dim: int,
    num_ids: int,
    ratio: int,
    compute_bytes: int,
    precise_exponent: bool,
    target: Target,
) -> UnionTiles | None:
    """Tiles of the row-union schedule, or None where the per-row schedule should run alone.

    Args:
        group: G. precise_exponent: probabilities keep FP32's exponent range (BF16, FP32).
    """
    if ratio & (ratio - 1) or ratio > MAX_SHARE or dim & (dim - 1) or not 0 < num_ids <= MAX_IDS:
        return None
    if compute_bytes != 2 or not target.has_bf16 or segment.rows_per_request == 1:
        return None
    if segment.rows_per_request:
        rows = segment.rows_per_request
        # Few draft windows leave too few programs to pay for the lists.
        windows = (segment.end_row - segment.first_row) // rows
        if rows * group > 128 or rows < 3 or 4 * windows * kv_heads < target.processors:
            return None
    else:
        rows = min(max(64 // group, 2), MAX_SHARE)
    block_m = max(64, power_of_two(rows * group))
    tiles = -(-(segment.end_row - segment.first_row) // rows)
    slots = 2 * target.processors
    splits = max(1, min(slots // max(tiles * kv_heads, 1), -(-num_ids * ratio // 64)))
    block_n = 32
    capacity = num_ids * min(rows, 4) + rows + 64
    return UnionTiles(
        rows=rows,
        block_m=block_m,
        block_n=max(block_n, ratio),
        num_warps=4 if block_m == 64 else 8,
        num_stages=3,
        splits=splits,
        fixed=precise_exponent,
        capacity=-(-capacity // 64) * 64,
        **_builder(tiles, target),
    )


def _builder(tiles: int, target: Target) -> dict[str, int | None]:
    """The list builder's launch. It waits for memory most of the time: many tiles take four
    programs a processor, few wide ones."""
    many = tiles > target.processors
    return {
        "build_programs": min(tiles, 8 * target.processors),
        "build_warps": 8 if many else 16,
        "build_regs": 64 if many else None,
    }


def offset_unit(strides: tuple[int, ...]) -> int:
    """The power of two, up to 512 elements, in which offsets of pages and tokens are counted."""
    step = strides[0] | strides[2] | 512
    return step & -step


def cell_units(
    pages: int, page_size: int, keys: tuple[int, ...], values: tuple[int, ...]
) -> tuple[int, int, int]:
    """What a page and a token add to a cell of a list (see `kernel_build`), and the elements that a
    cell counts: 0 where keys and values, of these strides, share no offsets that fit int32."""
    unit = offset_unit(keys)
    if keys != values or pages * keys[0] // unit >= 2**31:
        return page_size, 1, 0
    return keys[0] // unit, keys[2] // unit, unit


def choose_hopper(
    segment: Segment,
    group: int,
    kv_heads: int,
    dim: int,
    num_ids: int,
    ratio: int,
    target: Target,
    kv_bytes: int = 2,
) -> UnionTiles | None:
    """Tiles of the Hopper row-union schedule for prefills and many draft windows, or None.

    Its halves take as many rows as a 64-row wgmma tile holds, at most half of a 16-bit mask. Lists
    have room for every row's own blocks: it is faster than the per-row schedule even there. FP8 has
    one producer that converts for all: where a prefill's rows share less than half of their blocks
    the per-row schedule, whose warps all convert, is faster.
    """
    half = min(64 // group, MAX_SHARE // 2)
    window = segment.rows_per_request
    if window and window % 2 == 0:
        half = min(half, window // 2)
    rows = 2 * half
    if dim not in (128, 256) or half < 2 or ratio % 2 or 64 % ratio or not 0 < num_ids <= MAX_IDS:
        return None
    tiles = -(-(segment.end_row - segment.first_row) // rows)
    if (window and window != rows) or 4 * tiles * kv_heads < target.processors:
        return None
    steps = num_ids * ratio // BLOCK_UNION
    splits = max(1, min(target.processors // (tiles * kv_heads), steps // 4))
    most = rows * num_ids // (2 if kv_bytes == 1 and not window else 1)
    capacity = most + rows + 3 * BLOCK_UNION
    return UnionTiles(
        rows=rows,
        block_m=64,
        block_n=BLOCK_UNION,
        num_warps=4,
        num_stages=2,
        splits=splits,
        fixed=True,
        capacity=-(-capacity // BLOCK_UNION) * BLOCK_UNION,
        **_builder(tiles, target),
        half=half,
        # a producer that converts FP8 holds more
        producer_regs=104 if kv_bytes == 1 else 72,
    )
