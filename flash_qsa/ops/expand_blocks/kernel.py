"""expand_blocks in Triton: one program a row. Mirrors `reference.py`.

Valid blocks keep their order and close up: a block's place is the number of valid ones before it.
Then the open group, then -1, then the count. Reads K ids and writes K·C + C numbers a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_qsa.ops.direct import direct
from flash_qsa.ops.expand_blocks.tiles import choose_tiles


@direct
@triton.jit
def _expand_blocks_kernel(
    ids_ptr,
    positions_ptr,
    visible_ptr,
    out_ptr,
    ids_stride_row,
    ids_stride_block,
    positions_stride,
    visible_stride,
    out_stride,
    TOP_K: tl.constexpr,
    RATIO: tl.constexpr,
    RATIO_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row * positions_stride).to(tl.int64)
    visible = tl.load(visible_ptr + row * visible_stride)
    limit = tl.where(position >= 0, visible, 0)
    out = out_ptr + row * out_stride
    within = tl.arange(0, RATIO_BLOCK)
    taken = tl.zeros((), dtype=tl.int32)
    for base in range(0, TOP_K, BLOCKS):
        k = base + tl.arange(0, BLOCKS)
        block = tl.load(ids_ptr + row * ids_stride_row + k * ids_stride_block, k < TOP_K, other=-1)
        valid = (block >= 0) & (block < limit)
        place = taken + tl.cumsum(valid.to(tl.int32), axis=0) - 1
        # [BLOCKS, RATIO_BLOCK]
        token = block[:, None] * RATIO + within[None, :]
        at = out + place[:, None] * RATIO + within[None, :]
        tl.store(at, token, mask=valid[:, None] & (within < RATIO)[None, :])
        taken += tl.sum(valid.to(tl.int32), axis=0)

    first = visible.to(tl.int64) * RATIO
    ends = (position >= 0) & (visible >= 0)
    tail = tl.minimum(tl.maximum(position + 1 - first, 0), RATIO - 1).to(tl.int32)
    tail = tl.where(ends, tail, 0)
    filled = taken * RATIO
    tl.store(out + filled + within, (first + within).to(tl.int32), mask=within < tail)
    count = filled + tail
    WIDTH: tl.constexpr = TOP_K * RATIO + RATIO - 1
    PIECE: tl.constexpr = BLOCKS * RATIO_BLOCK
    for base in range(0, WIDTH, PIECE):
        column = base + tl.arange(0, PIECE)
        empty = tl.full((PIECE,), -1, tl.int32)
        tl.store(out + column, empty, mask=(column >= count) & (column < WIDTH))
    tl.store(out + WIDTH, count)


def launch(
    block_ids: torch.Tensor,
    positions: torch.Tensor,
    visible_blocks: torch.Tensor,
    ratio: int,
    out: torch.Tensor,
) -> None:
    """Fills `out` [T, K·C + C]."""
    rows, top_k = block_ids.shape
    ratio_block = triton.next_power_of_2(ratio)
    tiles = choose_tiles(top_k, ratio_block)
    _expand_blocks_kernel[(rows,)](
        block_ids,
        positions,
        visible_blocks,
        out,
        *block_ids.stride(),
        positions.stride(0),
        visible_blocks.stride(0),
        out.stride(0),
        TOP_K=top_k,
        RATIO=ratio,
        RATIO_BLOCK=ratio_block,
        BLOCKS=tiles.blocks,
        num_warps=tiles.num_warps,
    )
