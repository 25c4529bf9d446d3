"""How prepare divides its work among programs."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """Heads of a row that one program loads at once, powers of two, and its warps.

    query_heads: main query heads (with their gates) of one program. kv_heads, index_heads: those of
    the programs for them, which repeat until all are done.
    """

    query_heads: int
    kv_heads: int
    index_heads: int
    num_warps: int


def choose_tiles(
    heads: int, kv_heads: int, index_heads: int, block_dim: int, block_index_dim: int
) -> Tiles:
    """Tiles of at most 512 elements and one warp: two 16-byte accesses for each lane, and heads
    whose squares are summed without leaving the warp. Larger tiles leave fewer programs on a
    processor, and less under way.

    The number of rows has no say: a tile's shape decides the order in which a head's squares are
    added, and a row's bits must not depend on its batch.

    block_dim, block_index_dim: D and Di rounded up to powers of two.
    """

    def fitting(count: int, block: int) -> int:
        tile = 1
        while tile < count and 2 * tile * block <= 512:
            tile *= 2
        return tile

    return Tiles(
        fitting(heads, block_dim),
        fitting(kv_heads, block_dim),
        fitting(index_heads, block_index_dim),
        1,
    )
