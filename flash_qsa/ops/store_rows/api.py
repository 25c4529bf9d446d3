"""store_rows: scatter one step's rows into the cells of a paged cache."""

from __future__ import annotations

import torch

from flash_qsa import dispatch
from flash_qsa.checks import (
    E4M3_DTYPES,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    Axes,
    expect_contiguous_last,
    expect_device,
    expect_dtype,
    expect_placed,
)

STORED_DTYPES = (*FLOAT_DTYPES, *E4M3_DTYPES)


def store_rows(
    cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Writes rows[t] to cell slots[t] of `cache`, in place.

    Args:
        cache: [P, S, 1, W], float or FP8 (float8_e4m3fn or its bytes in uint8); any strides with a
            contiguous last axis.
        slots: int32 or int64 [T], cell page · S + offset. Slots below 0 or past the last cell are
            skipped. Slots must be distinct: which of two rows wins is not defined.
        rows: [T, W] or [T, 1, W], rounded to the cache's dtype (FP8 saturates at ±448).

    Raises:
        ValueError: shapes, strides or devices that do not fit together.
        UnsupportedError: a dtype that is not listed.
    """
    axes = Axes()
    axes.shape("cache", cache, ("P", "S", 1, "W"))
    axes.shape("slots", slots, ("T",))
    flat = rows.dim() == 2
    axes.shape("rows", rows, ("T", "W") if flat else ("T", 1, "W"))
    expect_dtype("cache", cache, STORED_DTYPES)
    expect_dtype("slots", slots, INDEX_DTYPES)
    expect_dtype("rows", rows, STORED_DTYPES)
    expect_device("slots", slots, cache.device)
    expect_contiguous_last("cache", cache)
    expect_placed("rows", rows, cache.device)
    if slots.shape[0] == 0:
        return
    if not flat:
        rows = rows[:, 0]
    dispatch.implementation("store_rows", backend, cache.device)(cache, slots, rows)
