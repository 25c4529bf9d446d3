"""How plan_rows divides its rows among programs."""

from __future__ import annotations


def choose_rows(rows: int) -> int:
    """Rows of one program, a power of two: one a lane of four warps."""
    return 32 if rows <= 32 else 128
