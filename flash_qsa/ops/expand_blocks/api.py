"""expand_blocks: block ids to the packed token lists that other engines read."""

from __future__ import annotations

import torch

from flash_qsa import dispatch
from flash_qsa.checks import (
    INDEX_DTYPES,
    INT32,
    Axes,
    expect_device,
    expect_dtype,
    expect_out,
    expect_positive,
)


def expand_blocks(
    block_ids: torch.Tensor,
    positions: torch.Tensor,
    visible_blocks: torch.Tensor,
    compress_ratio: int,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Tokens that each row attends: its complete blocks, then its open group, then the count.

    Args:
        block_ids: int32 [T, K]; -1, and ids that are not below visible_blocks, contribute nothing.
            Holes are closed: the tokens keep their order without gaps.
        positions: int64 or int32 [T], logical positions; below 0 the row attends nothing.
        visible_blocks: int32 [T]; the open group is tokens visible_blocks · C … position, of which
            the first C - 1 are written.
        compress_ratio: C.
        out: int32 [T, K·C + C] to fill.

    Returns:
        int32 [T, K·C + C]: K·C + C - 1 token columns, -1 behind the last, and the count of tokens.

    Raises:
        ValueError: shapes or devices that do not fit.
        UnsupportedError: a dtype that is not listed.
    """
    axes = Axes()
    axes.shape("block_ids", block_ids, ("T", "K"))
    axes.shape("positions", positions, ("T",))
    axes.shape("visible_blocks", visible_blocks, ("T",))
    expect_dtype("block_ids", block_ids, INT32)
    expect_dtype("positions", positions, INDEX_DTYPES)
    expect_dtype("visible_blocks", visible_blocks, INT32)
    expect_positive("compress_ratio", compress_ratio)
    device = block_ids.device
    expect_device("positions", positions, device)
    expect_device("visible_blocks", visible_blocks, device)
    rows, top_k = block_ids.shape
    shape = (rows, top_k * compress_ratio + compress_ratio)
    if out is None:
        out = block_ids.new_empty(shape)
    else:
        expect_out(out, shape, torch.int32, device)
    if rows:
        dispatch.implementation("expand_blocks", backend, device)(
            block_ids, positions, visible_blocks, compress_ratio, out
        )
    return out
