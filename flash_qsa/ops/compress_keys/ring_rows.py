"""Layout of a raw-key ring row: the key, then (mRoPE models only) its three exact positions.

The positions are int64 whatever the cache's dtype, aligned to 8 bytes behind the key.
"""

from __future__ import annotations

import torch


def position_offset(head_dim: int, dtype: torch.dtype) -> int:
    """First element of the packed positions: the key's end, rounded up to 8 bytes."""
    return -(-head_dim * dtype.itemsize // 8) * 8 // dtype.itemsize


def ring_width(head_dim: int, dtype: torch.dtype, with_positions: bool) -> int:
    """Elements of a ring row."""
    if not with_positions:
        return head_dim
    return position_offset(head_dim, dtype) + 24 // dtype.itemsize


def stores_positions(width: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether a ring of this width carries positions.

    Raises:
        ValueError: a width that is neither form.
    """
    if width == head_dim:
        return False
    if width == ring_width(head_dim, dtype, True):
        return True
    raise ValueError(
        f"ring: rows of {width} elements fit neither a bare key of {head_dim} nor a key with "
        f"three int64 positions ({ring_width(head_dim, dtype, True)})"
    )


def pack_rows(raw_keys: torch.Tensor, positions: torch.Tensor | None, width: int) -> torch.Tensor:
    """Ring rows [T, width] from raw keys [T, Di] and canonical positions [T, 1, 3] (or None)."""
    if width == raw_keys.shape[1]:
        return raw_keys
    rows = raw_keys.new_zeros(raw_keys.shape[0], width)
    rows[:, : raw_keys.shape[1]] = raw_keys
    start = position_offset(raw_keys.shape[1], raw_keys.dtype)
    rows[:, start:] = positions[:, 0, :].contiguous().view(raw_keys.dtype)
    return rows


def unpack_positions(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """int64 [T, 3] positions of ring rows [T, width]."""
    return rows[:, position_offset(head_dim, rows.dtype) :].contiguous().view(torch.int64)
