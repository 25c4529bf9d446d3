"""The selection buffer: one row of block ids per token, which multi-token prediction reuses.

A row holds K block ids, ascending, -1 behind the last; its last column is the number of complete
blocks that the token saw when it selected, never a block id. The attended tokens follow from both:
the blocks' own, and everything from the first token behind the visible blocks up to the token that
attends. So a row that a later draft step reuses still covers the tokens in between.

vLLM moves rows as wholes (`index_select` on the buffer), so ids and count stay together.
"""

from __future__ import annotations

import torch

from flash_qsa import ops

ROW_ALIGNMENT = 16
"""Ids; rows start at addresses that vector loads like."""


def row_width(top_k: int) -> int:
    """Columns of a buffer whose rows hold K ids and the visible count."""
    return -(-(top_k + 1) // ROW_ALIGNMENT) * ROW_ALIGNMENT


def require_rows(rows: torch.Tensor, count: int, top_k: int) -> None:
    """Requires a selection buffer of `count` rows.

    Raises:
        ValueError: another shape or dtype.
    """
    expected = (count, row_width(top_k))
    if tuple(rows.shape) != expected or rows.dtype != torch.int32:
        raise ValueError(
            f"selection rows: expected int32 {list(expected)}, got {rows.dtype} {list(rows.shape)}"
        )


def blocks(rows: torch.Tensor, top_k: int) -> torch.Tensor:
    """int32 [T, K], a view."""
    return rows[:, :top_k]


def visible(rows: torch.Tensor) -> torch.Tensor:
    """int32 [T], a view: complete blocks the rows' tokens saw."""
    return rows[:, -1]


def clear(rows: torch.Tensor) -> None:
    """Makes rows that select nothing."""
    rows.fill_(-1)
    visible(rows).zero_()


def expand(
    rows: torch.Tensor, positions: torch.Tensor, compress_ratio: int, top_k: int
) -> torch.Tensor:
    """The token lists that vLLM's own kernels read, for comparison and inspection.

    Args:
        rows: [T, width] selection rows of this step. positions: int64 [T].

    Returns:
        int32 [T, K·C + C]: token columns, -1 behind the last, then their count.
    """
    return ops.expand_blocks(
        blocks(rows, top_k), positions, visible(rows).contiguous(), compress_ratio
    )
