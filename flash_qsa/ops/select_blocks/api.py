"""select_blocks: score compressed keys and pick each row's best blocks, exactly."""

from __future__ import annotations

import torch

from flash_qsa import dispatch
from flash_qsa.checks import (
    FLOAT_DTYPES,
    Axes,
    expect_contiguous_last,
    expect_device,
    expect_dtype,
    expect_out,
    expect_positive,
)
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.plan import BatchPlan

DEFAULT_WORKSPACE_BYTES = 512 << 20
MIN_WORKSPACE_BYTES = 1 << 20


def select_blocks(
    index_query: torch.Tensor,
    key_cache: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    visible_blocks: torch.Tensor,
    top_k: int,
    *,
    first_block: torch.Tensor | None = None,
    plan: BatchPlan | None = None,
    workspace: int | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """The min(K, visible) best blocks of every row, in ascending block order.

    score(t, b) = Σ_h relu(index_query[t, h] · key[b]), accumulated in FP32 or better. Blocks rank
    by (score descending, block id ascending); NaN ranks below every number, and so does a block
    whose page is missing. Given the scores the answer is unique. It does not depend on the other
    rows, on the order of pages or on the workspace.

    Where a row sees at most K blocks it takes all of them and nothing is scored.

    Args:
        index_query: [T, Hi, Di], rounded to the cache's dtype.
        key_cache: compressed keys [P, S / C, 1, Di] in BF16, FP16, FP32 or FP8 (float8_e4m3fn, or
            its bytes in uint8, unscaled); any strides with a contiguous last axis.
        page_table: int32 [R, n], physical page of each logical page; outside 0 … P - 1 means none.
        request_ids: int32 [T], row of the page table; outside 0 … R - 1 selects nothing.
        visible_blocks: int32 [T], complete blocks that the row may see; at or below 0 selects
            nothing.
        top_k: K, at least 1.
        first_block: int32 [T], blocks before it are not candidates; 0 by default.
        plan: the step's batch, whose host integers choose a schedule; never changes the result.
        workspace: bytes that scoring may hold at a time (at least 1 MiB), or a uint8 buffer of
            that size to use; up to 512 MiB by default, and no more than the step needs.
        out: int32 [T, K] to fill.

    Returns:
        int32 [T, K] block ids, ascending, -1 behind the last.

    Raises:
        ValueError: shapes, strides, devices or sizes that do not fit; a workspace that cannot hold
            one row (about 5 bytes a block, twice; 3 MiB at 262,144 blocks always suffice).
        UnsupportedError: a dtype that is not listed; rows of more than 1,048,576 blocks on a GPU.
    """
    axes = Axes()
    axes.shape("index_query", index_query, ("T", "Hi", "Di"))
    axes.shape("key_cache", key_cache, ("P", "S/C", 1, "Di"))
    axes.shape("page_table", page_table, ("R", "n"))
    axes.shape("request_ids", request_ids, ("T",))
    axes.shape("visible_blocks", visible_blocks, ("T",))
    expect_dtype("key_cache", key_cache, (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.uint8))
    same = (torch.float8_e4m3fn, torch.uint8) if is_fp8(key_cache.dtype) else (key_cache.dtype,)
    expect_dtype("index_query", index_query, same)
    integers = {
        "page_table": page_table,
        "request_ids": request_ids,
        "visible_blocks": visible_blocks,
    }
    if first_block is not None:
        axes.shape("first_block", first_block, ("T",))
        integers["first_block"] = first_block
    for name, tensor in integers.items():
        expect_dtype(name, tensor, (torch.int32,))
        expect_device(name, tensor, index_query.device)
    expect_device("key_cache", key_cache, index_query.device)
    expect_contiguous_last("index_query", index_query)
    expect_contiguous_last("key_cache", key_cache)
    expect_positive("top_k", top_k)
    workspace = _check_workspace(workspace, index_query.device)

    rows = index_query.shape[0]
    if out is None:
        out = torch.empty(rows, top_k, dtype=torch.int32, device=index_query.device)
    else:
        expect_out(out, (rows, top_k), torch.int32, index_query.device)
    if rows:
        dispatch.implementation("select_blocks", backend, index_query.device)(
            index_query,
            key_cache,
            page_table,
            request_ids,
            visible_blocks,
            first_block,
            plan,
            workspace,
            out,
        )
    return out


def _check_workspace(
    workspace: int | torch.Tensor | None, device: torch.device
) -> int | torch.Tensor:
    if workspace is None:
        return DEFAULT_WORKSPACE_BYTES
    if isinstance(workspace, torch.Tensor):
        expect_dtype("workspace", workspace, (torch.uint8,))
        expect_device("workspace", workspace, device)
        size = workspace.numel()
    else:
        expect_positive("workspace", workspace)
        size = workspace
    if size < MIN_WORKSPACE_BYTES:
        raise ValueError(f"workspace: at least {MIN_WORKSPACE_BYTES} bytes are needed, got {size}")
    return workspace
