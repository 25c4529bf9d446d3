"""Logical to physical addresses: lookups of the references, and what kernels are compiled for."""

from __future__ import annotations

import torch

from flash_qsa.plan import BatchPlan


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


def constant_page(size: int, page_table: torch.Tensor, plan: BatchPlan | None) -> int:
    """The page size that kernels are compiled for; 0 where they take `size` at run time.

    An engine's pages have one size. Without a plan and with one page a request, as where tensors of
    whole sequences are attended, a page is as long as the sequence and grows with every step.
    """
    return 0 if plan is None and page_table.shape[1] == 1 else size
