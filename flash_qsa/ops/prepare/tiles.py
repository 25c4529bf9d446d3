"""How prepare divides its work among programs."""

from __future__ import annotations

from typing import NamedTuple

PROGRAMS_PER_PROCESSOR = 8
"""Programs wanted per multiprocessor before tiles grow: enough to hide the loads' latency."""


class Tiles(NamedTuple):
    """Heads (or rows) of each kind that one program takes; powers of two.

    query_units: main query heads with their gates. kv_units: KV heads. index_units: index query
    heads. group_rows: rows searched for closed groups. num_warps: of every program.
    """

    query_units: int
    kv_units: int
    index_units: int
    group_rows: int
    num_warps: int


def choose_tiles(
    rows: int,
    heads: int,
    kv_heads: int,
    index_heads: int,
    block_dim: int,
    block_index_dim: int,
    processors: int,
    num_warps: int = 4,
) -> Tiles:
    """Tiles of at most 4,096 elements, smaller while that leaves processors idle.

    block_dim, block_index_dim: D and Di rounded up to powers of two.
    """
    wanted = processors * PROGRAMS_PER_PROCESSOR
    lanes = 32 * num_warps * 8  # elements that the program's lanes load 16 bytes at a time

    def units(total: int, block: int) -> int:
        count = max(1, 4 * lanes // block)
        while count > max(1, lanes // block) and total < wanted * count:
            count //= 2
        return count

    return Tiles(
        units(rows * heads, block_dim),
        units(rows * kv_heads, block_dim),
        units(rows * index_heads, block_index_dim),
        units(rows, block_index_dim),
        num_warps,
    )
