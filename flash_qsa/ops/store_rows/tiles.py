"""How store_rows divides its rows among programs."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Tiles(NamedTuple):
    """rows and columns (powers of two) that one program moves, and its warps."""

    rows: int
    columns: int
    num_warps: int


@functools.lru_cache(maxsize=64)
def choose_tiles(rows: int, width: int) -> Tiles:
    """Tiles of at most 2,048 elements; narrow caches take more rows, few rows take one each."""
    columns = 16
    while columns < min(width, 1024):
        columns *= 2
    count = 1
    while count * columns < 2048 and count * 256 < rows:
        count *= 2
    return Tiles(count, columns, 4 if count * columns >= 1024 else 1)
