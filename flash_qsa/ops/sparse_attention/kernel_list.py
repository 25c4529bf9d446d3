"""Where the per-row schedule's tokens lie: page lookups, and the list of a row's readable cells."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tokens(page_row_ptr, place, wanted, num_columns, num_pages, page_size):
    """Page (int64), token of the page and existence of each wanted logical place."""
    column = place // page_size
    inside = wanted & (place >= 0) & (column < num_columns)
    page = tl.load(page_row_ptr + column, mask=inside, other=-1)
    found = (page >= 0) & (page < num_pages)
    token = tl.where(found, place - column * page_size, 0)
    return tl.where(found, page, 0).to(tl.int64), token, found


@triton.jit
def list_cells(
    k_list,
    v_list,
    ids_ptr,
    page_row_ptr,
    stride_k_p,
    stride_k_s,
    stride_v_p,
    stride_v_s,
    num_ids,
    limit,
    tail_start,
    tail_cells,
    base,
    num_columns,
    num_pages,
    page_size,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SAME: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Writes the offsets of all readable cells of num_ids ids, in order, and of tail_cells cells
    from tail_start on; returns their number."""
    PER_BLOCK: tl.constexpr = RATIO // WIDTH
    of_blocks = num_ids * PER_BLOCK
    count = 0
    for start in range(0, of_blocks + tail_cells, CHUNK):
        at = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at // PER_BLOCK, mask=at < of_blocks, other=-1)
        chosen = (ids >= 0) & (ids < limit)
        behind = at - of_blocks
        in_tail = (behind >= 0) & (behind < tail_cells)
        place = tl.where(chosen, ids * RATIO + at % PER_BLOCK * WIDTH, 0)
        place = tl.where(in_tail, tail_start + behind * WIDTH, place) + base
        page, token, found = find_tokens(
            page_row_ptr, place, chosen | in_tail, num_columns, num_pages, page_size
        )
        ones = tl.where(found, 1, 0)
        rank = count + tl.cumsum(ones, 0) - ones
        k_at = (page * stride_k_p + token * stride_k_s) // ALIGN
        tl.store(k_list + rank, k_at.to(k_list.dtype.element_ty), mask=found)
        if not SAME:
            v_at = (page * stride_v_p + token * stride_v_s) // ALIGN
            tl.store(v_list + rank, v_at.to(v_list.dtype.element_ty), mask=found)
        count += tl.sum(ones, 0)
    return count
