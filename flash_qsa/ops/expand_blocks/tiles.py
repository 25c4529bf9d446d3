"""How expand_blocks takes a row: in pieces of blocks that fit registers."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Tiles(NamedTuple):
    """blocks: block ids of one step of a program, a power of two; num_warps: of the program."""

    blocks: int
    num_warps: int


@functools.lru_cache(maxsize=64)
def choose_tiles(top_k: int, ratio: int) -> Tiles:
    """At most 4,096 tokens a step, and as few warps as keep them under 16 a lane."""
    blocks = 16
    while blocks < top_k and 2 * blocks * ratio <= 4096:
        blocks *= 2
    warps = 1
    while warps < 8 and blocks * ratio > warps * 32 * 16:
        warps *= 2
    return Tiles(blocks, warps)
