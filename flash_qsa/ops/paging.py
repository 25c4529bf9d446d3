"""Logical to physical addresses, for the reference implementations."""

from __future__ import annotations

import torch


def lookup_pages(page_row: torch.Tensor, logical: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Physical page of each logical page of one request, -1 where there is none.

    Args:
        page_row: int32 [n], one row of a page table.
        logical: int64 [...], logical pages; outside 0 … n - 1 means none.
        num_pages: P; a table entry outside 0 … P - 1 means none.
    """
    if page_row.shape[0] == 0:
        return torch.full_like(logical, -1, dtype=torch.int64)
    inside = (logical >= 0) & (logical < page_row.shape[0])
    pages = page_row.long()[logical.clamp(0, page_row.shape[0] - 1)]
    return torch.where(inside & (pages >= 0) & (pages < num_pages), pages, -1)
