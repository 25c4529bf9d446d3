"""Launches of the row-union schedules."""

from __future__ import annotations

import torch

from flash_qsa.ops.sparse_attention.call import TYPES, Call
from flash_qsa.ops.sparse_attention.kernel_build import build_kernel
from flash_qsa.ops.sparse_attention.kernel_union import union_kernel
from flash_qsa.ops.sparse_attention.launch_rows import (
    Partials,
    allocate_partials,
    launch_merge,
    launch_rows,
)
from flash_qsa.ops.sparse_attention.tiles import RowTiles, Segment
from flash_qsa.ops.sparse_attention.tiles_union import UnionTiles
from flash_qsa.targets import power_of_two


def launch_union(call: Call, segment: Segment, union: UnionTiles, rows: RowTiles) -> None:
    """Lists, attention over them, and the per-row schedule for the tiles that were left out.

    `rows` are that schedule's tiles, with the union's splits.
    """
    page_size = call.keys.shape[2]
    num_ids, num_columns = call.block_ids.shape[1], call.page_table.shape[1]
    tiles = -(-(segment.end_row - segment.first_row) // union.rows)
    # in whole sixteens, so that the compiler's classes of numbers do not tell them apart
    words = max(-(-num_columns * page_size // (512 * call.ratio)), 1) * 16

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return call.query.new_empty(shape, dtype=dtype)

    # a tensor each: allocating one takes the host less time than cutting it out of another
    bitmap = buffer(union.build_programs, 2 if union.half else 1, words)
    ranks = buffer(union.build_programs, words, dtype=torch.int64)
    # a step more than the lists hold, because the Hopper schedule reads a step ahead
    listed = tiles * union.capacity + union.block_n
    cells = buffer(listed)
    masks = buffer(listed, call.ratio, dtype=torch.int16)
    counts, shared = buffer(tiles), buffer(tiles)
    sections = buffer(tiles, 2)
    unit_page, unit_token, unit = call.cell_units()
    block = 4 * 32 * union.build_warps
    limited = union.build_regs is not None and call.target.backend == "cuda"
    build_kernel[(union.build_programs,)](
        call.block_ids,
        call.positions,
        call.request_ids,
        call.or_dummy(call.token_base),
        call.page_table,
        bitmap,
        ranks,
        cells,
        masks,
        counts,
        shared,
        sections,
        call.block_ids.stride(0),
        call.page_table.stride(0),
        segment.first_row,
        segment.end_row,
        num_ids,
        *call.page_table.shape,
        call.keys.shape[0],
        tiles,
        words,
        union.capacity,
        unit_page,
        unit_token,
        page_size,
        RATIO=call.ratio,
        PAGE=call.page,
        ROWS=union.rows,
        BLOCK_R=power_of_two(union.rows),
        BLOCK_K=min(power_of_two(num_ids), block // power_of_two(union.rows)),
        BLOCK_W=min(power_of_two(words), block),
        PAD=union.block_n // call.ratio,
        HALF=union.half,
        HAS_BASE=call.token_base is not None,
        PDL=call.early_launch,
        num_warps=union.build_warps,
        num_stages=1,
        **call.launch_options(),
        **({"maxnreg": union.build_regs} if limited else {}),
    )
    partials = allocate_partials(call, segment, union.splits)
    if union.half:
        lists = (cells, masks, counts, sections, shared)
        _launch_hopper(call, segment, union, lists, unit, partials)
    else:
        _attend_union(call, segment, union, (cells, masks, counts, shared), unit, partials)
    # Few rows a program, so that tiles left out spread over all processors.
    launch_rows(call, segment, rows, 2 - union.rows % 2, (shared, union.rows), partials)
    launch_merge(call, segment, union.splits, partials)


def _launch_hopper(
    call: Call,
    segment: Segment,
    union: UnionTiles,
    lists: tuple[torch.Tensor, ...],
    unit: int,
    partials: Partials | None,
) -> None:
    # Gluon is imported where it runs: older GPUs need only Triton.
    from flash_qsa.ops.sparse_attention.kernel_union_sm90 import union_sm90_kernel

    apart = (call.values.data_ptr() - call.keys.data_ptr()) // call.keys.element_size()
    union_sm90_kernel[(lists[2].shape[0], call.keys.shape[1], union.splits)](
        call.query,
        call.keys,
        call.values,
        *lists,
        call.or_dummy(call.gate),
        *call.scale_args,
        call.out,
        call.or_dummy(call.lse),
        *(partials or (call.query, call.query)),
        *call.query.stride()[:2],
        call.keys.stride(1),
        call.keys.stride(2),
        call.values.stride(1),
        *call.output_strides(),
        segment.first_row,
        segment.end_row,
        union.splits,
        union.capacity,
        call.scale,
        RATIO=call.ratio,
        UNIT=unit,
        VALUES_AT=apart if 0 < apart <= 4096 else 0,
        GROUP=call.group,
        DIM=call.query.shape[2],
        HALF=union.half,
        PRODUCER_REGS=union.producer_regs,
        SPLIT=union.splits > 1,
        HAS_GATE=call.gate is not None,
        HAS_LSE=call.lse is not None,
        **call.scales,
        num_warps=4,
    )


def _attend_union(
    call: Call,
    segment: Segment,
    union: UnionTiles,
    lists: tuple[torch.Tensor, ...],
    unit: int,
    partials: Partials | None,
) -> None:
    union_kernel[(lists[2].shape[0], call.keys.shape[1], union.splits)](
        call.query,
        call.keys,
        call.values,
        *lists,
        call.or_dummy(call.gate),
        *call.scale_args,
        call.out,
        call.or_dummy(call.lse),
        *(partials or (call.query, call.query)),
        *call.strides(),
        *call.output_strides(),
        segment.first_row,
        segment.end_row,
        union.capacity,
        call.scale,
        call.keys.shape[2],
        RATIO=call.ratio,
        PAGE=call.page,
        UNIT=unit,
        GROUP=call.group,
        DIM=call.query.shape[2],
        ROWS=union.rows,
        BLOCK_M=union.block_m,
        BLOCK_N=union.block_n,
        SPLIT=union.splits > 1,
        FIXED=union.fixed,
        COMPUTE=TYPES[call.compute],
        NARROW=call.narrow,
        FP8_BYTES=call.fp8_bytes,
        HAS_GATE=call.gate is not None,
        HAS_LSE=call.lse is not None,
        **call.scales,
        num_warps=union.num_warps,
        num_stages=union.num_stages,
    )
