"""plan_rows in Triton: one program a tile of rows. Mirrors `reference.py`.

Each row finds its request by bisection of the query starts; everything else follows from lengths
and tables. Nothing is read by the host, so a captured graph sees the next step's lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.ops.batch_plan.tiles import choose_rows
from flash_qsa.ops.direct import direct


@direct
@triton.jit(do_not_specialize=["rows", "requests", "columns", "halvings"])
def _batch_plan_kernel(
    query_start_ptr,
    seq_lens_ptr,
    page_table_ptr,
    ring_table_ptr,
    request_out,
    position_out,
    visible_out,
    main_out,
    compressed_out,
    ring_out,
    page_stride,
    page_stride_column,
    ring_stride,
    rows,
    requests,
    columns,
    halvings,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    first = tl.load(query_start_ptr)
    total = tl.load(query_start_ptr + requests)
    # the first request that ends behind the row; [low, high) always holds it
    low = tl.zeros((ROWS,), dtype=tl.int32)
    high = tl.zeros((ROWS,), dtype=tl.int32) + requests
    for _ in range(halvings):
        middle = (low + high) // 2
        searching = low < high
        end = tl.load(query_start_ptr + 1 + middle, mask=searching & inside, other=0)
        low = tl.where(searching & (end <= row), middle + 1, low)
        high = tl.where(searching & (end > row), middle, high)
    request = tl.minimum(low, requests - 1)

    real = inside & (row >= first) & (row < total)
    end = tl.load(query_start_ptr + 1 + request, mask=real, other=0)
    length = tl.load(seq_lens_ptr + request, mask=real, other=0)
    from_end = (end - row).to(tl.int64)
    position = length.to(tl.int64) - from_end
    real = real & (position >= 0)

    at = request.to(tl.int64)
    column = position // PAGE
    has_column = real & (column < columns)
    page_at = page_table_ptr + at * page_stride + column * page_stride_column
    page = tl.load(page_at, mask=has_column, other=-1).to(tl.int64)
    paged = has_column & (page >= 0)
    main_slot = page * PAGE + position % PAGE
    closes = paged & ((position + 1) % RATIO == 0)
    ring_slot = tl.load(ring_table_ptr + at * ring_stride, mask=real, other=-1).to(tl.int64)
    kept = real & (ring_slot >= 0) & (from_end <= CAPACITY)

    tl.store(request_out + row, tl.where(real, request, -1), mask=inside)
    tl.store(position_out + row, tl.where(real, position, -1), mask=inside)
    visible = tl.where(real, (position + 1) // RATIO, 0).to(tl.int32)
    tl.store(visible_out + row, visible, mask=inside)
    tl.store(main_out + row, tl.where(paged, main_slot, -1), mask=inside)
    tl.store(compressed_out + row, tl.where(closes, main_slot // RATIO, -1), mask=inside)
    ring_cell = ring_slot * CAPACITY + position % CAPACITY
    tl.store(ring_out + row, tl.where(kept, ring_cell, -1), mask=inside)


def launch(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    ring_table: torch.Tensor,
    ratio: int,
    page_size: int,
    ring_capacity: int,
    out: PlanRows,
) -> None:
    """Fills the row tensors of `out`."""
    rows, requests = out.request_ids.shape[0], seq_lens.shape[0]
    if requests == 0:
        for buffer in out:
            buffer.fill_(-1)
        out.visible_blocks.zero_()
        return
    tile = choose_rows(rows)
    _batch_plan_kernel[(triton.cdiv(rows, tile),)](
        query_start.contiguous(),
        seq_lens.contiguous(),
        page_table,
        ring_table,
        *out,
        page_table.stride(0),
        page_table.stride(1),
        ring_table.stride(0),
        rows,
        requests,
        page_table.shape[1],
        requests.bit_length(),
        RATIO=ratio,
        PAGE=page_size,
        CAPACITY=ring_capacity,
        ROWS=tile,
        num_warps=max(1, tile // 32),
    )
