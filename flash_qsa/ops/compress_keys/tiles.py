"""compress_keys gives every row a program of its own; only the warps depend on the head."""

from __future__ import annotations


def choose_warps(block_dim: int) -> int:
    """Warps of a program for keys of `block_dim` elements, four a lane."""
    return 1 if block_dim <= 128 else 4
