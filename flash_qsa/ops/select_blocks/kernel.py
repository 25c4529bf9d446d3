"""select_blocks on the GPU: score a chunk of rows into the workspace, select from it, repeat.

Two launches a chunk: `kernel_score` writes one ordered int32 per row and key and the largest of
every group of keys, `kernel_select` or `select.cu` (see `selector.py`) picks exactly. A step whose
rows see at most K blocks is one launch. Everything is decided from shapes and the plan's host
integers; lengths are read on the device, so a captured graph serves other lengths.

Bytes a row and key: Di · itemsize / rows-per-tile read, 4 written and read again. Mirrors
`reference.py`: a row without candidates is -1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl

from flash_qsa.checks import UnsupportedError
from flash_qsa.dispatch import interpreting
from flash_qsa.ops.direct import launches_early
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.ops.paging import constant_page
from flash_qsa.ops.select_blocks import selector, tiles
from flash_qsa.ops.select_blocks.kernel_dense import dense_score_kernel
from flash_qsa.ops.select_blocks.kernel_score import score_kernel
from flash_qsa.ops.select_blocks.kernel_select import select_kernel
from flash_qsa.ops.select_blocks.workspace import GatheredKeys, Workspace
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import Target, device_target, power_of_two

NARROW_REACH = 1 << 31
"""Cells of a cache from which on 32 bits do not hold them."""


def launch(
    index_query: torch.Tensor,
    key_cache: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    visible_blocks: torch.Tensor,
    first_block: torch.Tensor | None,
    plan: BatchPlan | None,
    workspace: int | torch.Tensor,
    out: torch.Tensor,
    *,
    tuning: dict[str, Any] | None = None,
) -> None:
    """`tuning` replaces fields of the chosen tiles, for benchmarks and tests."""
    tuning = tuning or {}
    target = device_target(out.device)
    query, cache = _storage(index_query, target), _storage(key_cache, target)
    page_blocks = cache.shape[1]
    # Kernels read vectors one element after the other; a caller's may be expanded or strided views.
    request_ids, visible_blocks = request_ids.contiguous(), visible_blocks.contiguous()
    first_block = None if first_block is None else first_block.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    width = max(page_table.shape[1] * page_blocks, 1)
    if plan is not None:
        width = min(width, max(plan.max_seq_len // plan.compress_ratio, 1))
    if width > tiles.MAX_BLOCKS:
        raise UnsupportedError(
            f"visible_blocks: rows of {width} blocks are longer than the {tiles.MAX_BLOCKS} that "
            "select_blocks supports; give a plan whose max_seq_len is smaller"
        )
    rows, top_k = out.shape
    page = constant_page(page_blocks, page_table, plan)
    step = _Step(
        query, cache, page_table, request_ids, visible_blocks, first_block, out, width, page, target
    )
    step.pdl &= tuning.get("pdl", True)
    step.admit_next = tuning.get("admit_next", tiles.admits_next(rows, step.e4m3 > 0, target))
    step.select_options = tuning.get("select_options", {})
    if width <= top_k:
        step.select(tiles.choose_select(rows, width, top_k, target), 0, rows, None)
        return
    for phase in tuning.get("phases") or tiles.phases(rows, page_table.shape[0], plan):
        _run_phase(step, phase, plan, workspace, target, tuning)


def _run_phase(
    step: _Step,
    phase: tiles.Phase,
    plan: BatchPlan | None,
    workspace: int | torch.Tensor,
    target: Target,
    tuning: dict[str, Any],
) -> None:
    rows = phase.end - phase.begin
    product = tiles.product_dtype(step.query.dtype, target)
    shape = (step.width, *step.query.shape[1:], product.itemsize)
    dense = tiles.choose_dense(phase, *shape, target)
    if dense is not None:
        dense = _tuned(dense, tuning.get("dense"))
        keys = GatheredKeys(
            step.cache, step.page_table, step.width, step.page, phase, dense, product, plan
        )
        room = workspace if isinstance(workspace, int) else workspace.numel()
        if 2 * keys.size > room or tuning.get("dense", True) is None:
            dense = None
    max_group = tiles.MAX_GROUP if dense is None else tiles.DENSE_MAX_GROUP
    order = tuning.get("selector")
    select = selector.choose_tiles(rows, step.width, step.top_k, target, max_group, order)
    select = _tuned(select, tuning.get("select"))
    space = Workspace(
        workspace,
        step.width,
        select,
        rows,
        step.top_k,
        step.out.device,
        0 if dense is None else keys.size,
    )
    parts = tuning.get("parts", ("score", "select"))
    if dense is not None and "score" in parts:
        keys.fill(space, step.e4m3)
    for begin in range(phase.begin, phase.end, space.rows):
        end = min(begin + space.rows, phase.end)
        dependent = False
        if "score" in parts and dense is not None:
            step.score_dense(dense, select, begin, end, space, keys, target)
        elif "score" in parts:
            whole = (begin, end) == (phase.begin, phase.end)
            part = phase if whole else replace(phase, begin=begin, end=end)
            programs = tuning.get("decode", {}).get("programs", step.programs)
            score = tiles.choose_score(part, *shape, target, programs)
            score = _tuned(score, tuning.get("score"))
            # only a scorer that is resident as a whole lets the selection start before its end
            grid = -(-(end - begin) // score.rows) * score.splits
            dependent = grid <= step.programs * target.processors
            dependent = step.pdl and phase.decode and dependent
            step.score(score, select, begin, end, space, target, dependent)
        if "select" in parts:
            step.select(select, begin, end, space, dependent)


def _tuned(tiles: Any, fields: dict[str, Any] | None) -> Any:
    return replace(tiles, **fields) if fields else tiles


def _storage(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """FP8 in the type that the target multiplies, or as bytes where it has none."""
    if not is_fp8(tensor.dtype):
        return tensor
    native = target.backend == "cuda" and target.has_e4m3 and tensor.device.type != "cpu"
    return tensor.view(torch.float8_e4m3fn if native else torch.uint8)


class _Step:
    """The arguments that both kernels share."""

    def __init__(
        self, query, cache, page_table, request_ids, visible, first, out, width, page, target
    ) -> None:
        self.query, self.cache, self.page_table = query, cache, page_table
        self.request_ids, self.visible, self.out, self.width = request_ids, visible, out, width
        self.page = page
        self.has_first = first is not None
        self.first = first if self.has_first else visible
        self.top_k = out.shape[1]
        self.e4m3 = {torch.uint8: 2, torch.float8_e4m3fn: 1}.get(query.dtype, 0)
        self.programs = tiles.FP8_DECODE_PROGRAMS if self.e4m3 else tiles.DECODE_PROGRAMS
        self.ptx = target.backend == "cuda" and not interpreting()
        pages, strides = cache.shape[0], cache.stride()[:2]
        self.align = 16 if all(stride % 16 == 0 for stride in strides) else 1
        reach = (pages * strides[0] + cache.shape[1] * strides[1]) // self.align
        self.cell_dtype = tl.int32 if reach < NARROW_REACH else tl.int64
        # dependent launch: the selection's start overlaps the scorer's end
        self.pdl = launches_early(target)

    def score(
        self,
        score: tiles.ScoreTiles,
        select: tiles.SelectTiles | tiles.CudaSelectTiles,
        begin: int,
        end: int,
        space: Workspace,
        target: Target,
        dependent: bool,
    ) -> None:
        options = {"matrix_instr_nonkdim": 16} if target.backend == "hip" else {}
        query, cache, table = self.query, self.cache, self.page_table
        score_kernel[(-(-(end - begin) // score.rows) * score.splits,)](
            query,
            cache,
            table,
            self.request_ids,
            self.visible,
            self.first,
            space.scores,
            space.maxima if select.group > 1 else space.scores,
            query.stride(0),
            query.stride(1),
            cache.stride(0) // self.align,
            cache.stride(1) // self.align,
            table.stride(0),
            space.widths[0],
            space.widths[1],
            begin,
            end,
            self.width,
            table.shape[0],
            cache.shape[0],
            table.shape[1],
            score.splits,
            cache.shape[1],
            TOP_K=self.top_k,
            HEADS=query.shape[1],
            HEAD_DIM=query.shape[2],
            HEADS_PAD=score.heads_pad,
            DIM_PAD=score.dim_pad,
            BLOCK_D=score.block_d,
            ROWS=score.rows,
            ROWS_PAD=score.rows_pad,
            BLOCK_N=tiles.BLOCK_N,
            GROUP=select.group,
            PAGE_BLOCKS=self.page,
            RUN=math.gcd(self.page, tiles.BLOCK_N) if self.page else 1,
            E4M3=self.e4m3,
            WIDEN=not target.has_bf16,
            HAS_FIRST=self.has_first,
            PTX=self.ptx,
            PDL=dependent,
            KEEP=dependent and 4 * (end - begin) * self.width <= tiles.KEPT_BYTES,
            CELL=self.cell_dtype,
            ALIGN=self.align,
            STAGES=score.num_stages,
            num_warps=score.num_warps,
            **options,
            **({"launch_pdl": True} if dependent else {}),
        )

    def score_dense(
        self,
        dense: tiles.DenseTiles,
        select: tiles.SelectTiles | tiles.CudaSelectTiles,
        begin: int,
        end: int,
        space: Workspace,
        keys: GatheredKeys,
        target: Target,
    ) -> None:
        query = self.query
        options = {"matrix_instr_nonkdim": 16} if target.backend == "hip" else {}
        splits = dense.splits(self.width)
        dense_score_kernel[(-(-(end - begin) // dense.rows) * splits,)](
            query,
            keys.tensor,
            self.request_ids,
            self.visible,
            self.first,
            space.scores,
            space.maxima if select.group > 1 else space.scores,
            query.stride(0),
            query.stride(1),
            keys.stride,
            space.widths[0],
            space.widths[1],
            begin,
            end,
            space.rows,
            self.width,
            keys.begin,
            self.page_table.shape[0],
            splits,
            dense.pairs,
            TOP_K=self.top_k,
            HEADS=query.shape[1],
            HEAD_DIM=query.shape[2],
            HEADS_PAD=dense.heads_pad,
            DIM_PAD=dense.dim_pad,
            ROWS=dense.rows,
            GROUP=select.group,
            HAS_FIRST=self.has_first,
            E4M3=self.e4m3,
            PTX=self.ptx,
            STAGES=dense.num_stages,
            num_warps=dense.num_warps,
            **options,
        )

    def select(
        self,
        select: tiles.SelectTiles | tiles.CudaSelectTiles,
        begin: int,
        end: int,
        space: Workspace | None,
        dependent: bool = False,
    ) -> None:
        if isinstance(select, tiles.CudaSelectTiles):
            self.select_cuda(select, begin, end, space, dependent)
            return
        scores = self.out if space is None else space.scores
        grouped = space is not None and select.group > 1
        widths = (0, 0, 0) if space is None else space.widths
        select_kernel[(end - begin,)](
            scores,
            space.maxima if grouped else scores,
            space.scratch if grouped else scores,
            self.request_ids,
            self.visible,
            self.first,
            self.out,
            *widths,
            self.out.stride(0),
            begin,
            self.width,
            self.page_table.shape[0],
            TOP_K=self.top_k,
            TOP_K_PAD=power_of_two(self.top_k),
            GROUP=select.group,
            UNITS=select.units,
            SLACK=select.slack,
            SURVIVORS=select.survivors,
            CHUNK=select.chunk,
            HAS_FIRST=self.has_first,
            PTX=self.ptx,
            PDL=dependent,
            num_warps=select.num_warps,
            num_stages=1,
            **self.select_options,
            **({"launch_pdl": True} if dependent else {}),
        )

    def select_cuda(
        self,
        select: tiles.CudaSelectTiles,
        begin: int,
        end: int,
        space: Workspace,
        dependent: bool,
    ) -> None:
        tensors = (
            space.scores,
            space.maxima,
            self.request_ids,
            self.visible,
            self.first,
            self.out,
        )
        numbers = (*space.widths[:2], self.out.stride(0), begin)
        limits = (self.width, self.page_table.shape[0])
        addresses = (tensor.data_ptr() for tensor in tensors)
        arguments = (*addresses, *numbers, *limits, self.admit_next)
        selector.launch_cuda(select, self.top_k, end - begin, dependent, self.has_first, arguments)
