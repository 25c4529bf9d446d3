"""store_rows in Triton: one program moves a tile of rows × columns. Mirrors `reference.py`.

Reads and writes each stored row once; skipped rows cost their slot alone. Equal dtypes are moved as
integers, bit for bit; FP8 is written as bytes, so every device stores the same bits. Others pass
through FP32: Triton 3.9 compiles no FP16 to BF16 for Turing, but FP32 to BF16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_qsa.ops.device import e4m3_from_fp32, e4m3_to_fp16
from flash_qsa.ops.direct import direct
from flash_qsa.ops.fp8 import as_bytes, is_fp8
from flash_qsa.ops.store_rows.tiles import choose_tiles


@direct
@triton.jit(do_not_specialize=["count", "cells"])
def _store_rows_kernel(
    cache_ptr,
    slots_ptr,
    rows_ptr,
    cache_stride_page,
    cache_stride_cell,
    rows_stride,
    count,
    cells,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    FROM_FP8: tl.constexpr,
    TO_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    STRIPS: tl.constexpr = tl.cdiv(WIDTH, COLUMNS)
    pid = tl.program_id(0)
    row = ((pid // STRIPS) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (pid % STRIPS) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots_ptr + row, mask=row < count, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < cells)
    mask = live[:, None] & (column < WIDTH)[None, :]
    # [ROWS, COLUMNS]
    x = tl.load(rows_ptr + (row * rows_stride)[:, None] + column[None, :], mask=mask, other=0)
    if FROM_FP8 and not TO_FP8:
        x = e4m3_to_fp16(x).to(tl.float32)
    elif TO_FP8 and not FROM_FP8:
        x = e4m3_from_fp32(x.to(tl.float32))
    elif x.dtype.is_floating():
        x = x.to(tl.float32)
    cell = slot // PAGE * cache_stride_page + slot % PAGE * cache_stride_cell
    at = cache_ptr + cell[:, None] + column[None, :]
    tl.store(at, x.to(cache_ptr.dtype.element_ty), mask=mask)


def launch(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows [T, W] to cells `slots` of cache [P, S, 1, W]."""
    count, width = rows.shape
    if width == 0:
        return
    from_fp8, to_fp8 = is_fp8(rows.dtype), is_fp8(cache.dtype)
    cache_bits, row_bits = as_bytes(cache), as_bytes(rows)
    if cache.dtype == rows.dtype and not to_fp8:
        integers = torch.int32 if cache.element_size() == 4 else torch.int16
        cache_bits, row_bits = cache.view(integers), rows.view(integers)
    tiles = choose_tiles(count, width)
    programs = -(-count // tiles.rows) * -(-width // tiles.columns)
    _store_rows_kernel[(programs,)](
        cache_bits,
        slots.contiguous(),
        row_bits,
        cache_bits.stride(0),
        cache_bits.stride(1),
        row_bits.stride(0),
        count,
        cache.shape[0] * cache.shape[1],
        WIDTH=width,
        PAGE=cache.shape[1],
        FROM_FP8=from_fp8,
        TO_FP8=to_fp8,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )
