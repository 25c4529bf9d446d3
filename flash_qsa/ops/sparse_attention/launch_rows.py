"""Launches of the per-row schedule and of the merge of its splits."""

from __future__ import annotations

import functools

import torch

from flash_qsa.ops.sparse_attention import tiles as choices
from flash_qsa.ops.sparse_attention.call import TYPES, Call
from flash_qsa.ops.sparse_attention.kernel_merge import merge_kernel
from flash_qsa.ops.sparse_attention.kernel_rows import rows_kernel
from flash_qsa.ops.sparse_attention.tiles import RowTiles, Segment
from flash_qsa.targets import power_of_two

Partials = tuple[torch.Tensor, torch.Tensor]
"""FP32 outputs [rows, Hq, splits, D] and peaks with sums [rows, Hq, splits, 2]: flat tensors that
begin with them."""


@functools.lru_cache(maxsize=64)
def cell_layout(
    pages: int, page_size: int, ratio: int, based: bool, keys: tuple, values: tuple
) -> tuple[int, bool, int, torch.dtype]:
    """How the per-row kernel stores where tokens lie.

    Args:
        based: rows have token bases. keys, values: strides of pages, heads and tokens.

    Returns:
        Tokens looked up together; whether keys and values lie alike; the unit of offsets, in
        elements; the integers that hold them.
    """
    width = choices.cell_width(ratio, based or page_size % ratio != 0)
    align = 16 if all(stride % 16 == 0 for stride in (*keys, *values)) else 1
    reach = max(pages * s[0] + page_size * s[2] for s in (keys, values)) // align
    return width, keys == values, align, torch.int32 if reach < 2**31 else torch.int64


def allocate_partials(call: Call, segment: Segment, splits: int) -> Partials | None:
    """Room for the partials of a segment, where there is more than one split."""
    if splits == 1:
        return None
    heads, dim = call.query.shape[1:]
    count = (segment.end_row - segment.first_row) * heads * splits
    room = call.query.new_empty(count * (dim + 2), dtype=torch.float32)
    return room, room[count * dim :]


def launch_rows(
    call: Call,
    segment: Segment,
    rows: RowTiles,
    rows_per_program: int,
    shared: tuple[torch.Tensor, int] | None,
    partials: Partials | None,
) -> None:
    """Attends a segment's rows. `shared` are the flags of a union's tiles and their rows: tiles
    with a flag were attended already. A program's rows must belong to one tile."""
    heads, dim = call.query.shape[1:]
    kv_heads, page_size = call.keys.shape[1:3]
    acc, stats = partials or (call.query, call.query)
    tiles = -(-(segment.end_row - segment.first_row) // rows_per_program)
    pages, based = call.keys.shape[0], call.token_base is not None
    strides = call.strides()
    width, same, align, integers = cell_layout(
        pages, page_size, call.ratio, based, strides[2:5], strides[5:]
    )
    room = call.ratio * (1 if call.tail_start is None else choices.LISTED_TAIL_GROUPS)
    entries = (rows.ids_per_split * call.ratio + room) // width
    # one class of numbers for the compiler, which tells multiples of 16 from others
    list_size = -(-entries // 16) * 16
    count = tiles * kv_heads * rows.splits * list_size * (1 if same else 2)
    lists = call.query.new_empty(count, dtype=integers)
    rows_kernel[(tiles, kv_heads, rows.splits)](
        call.query,
        call.keys,
        call.values,
        call.block_ids,
        call.positions,
        call.page_table,
        call.request_ids,
        call.or_dummy(call.tail_start),
        call.or_dummy(call.token_base),
        call.or_dummy(call.gate),
        *call.scale_args,
        call.query if shared is None else shared[0],
        lists,
        call.out,
        call.or_dummy(call.lse),
        acc,
        stats,
        *strides,
        call.block_ids.stride(0),
        call.page_table.stride(0),
        *call.output_strides(),
        segment.first_row,
        segment.end_row,
        rows_per_program,
        call.block_ids.shape[1],
        rows.ids_per_split,
        list_size,
        *call.page_table.shape,
        pages,
        call.scale,
        page_size,
        RATIO=call.ratio,
        WIDTH=width,
        PAGE=call.page,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_M=max(16, power_of_two(heads // kv_heads)),
        BLOCK_N=rows.block_n,
        BLOCK_D=max(16, power_of_two(dim)),
        CHUNK=128 if entries <= 128 else 256 if entries <= 256 else 1024,
        MANY=rows_per_program > 1,
        SPLIT=rows.splits > 1,
        SAME=same,
        ALIGN=align,
        COMPUTE=TYPES[call.compute],
        NARROW=call.narrow,
        FP8_BYTES=call.fp8_bytes,
        WORDS=align == 16 and call.words_fit(),
        HAS_TAIL=call.tail_start is not None,
        ROOM=room,
        HAS_BASE=based,
        HAS_GATE=call.gate is not None,
        HAS_LSE=call.lse is not None,
        **call.scales,
        SHARED_ROWS=0 if shared is None else shared[1],
        PDL=call.early_launch,
        num_warps=rows.num_warps,
        num_stages=rows.num_stages,
        **call.launch_options(),
    )


def launch_merge(
    call: Call,
    segment: Segment,
    splits: int,
    partials: Partials | None,
    deterministic: bool = False,
) -> None:
    if partials is None:
        return
    heads, dim = call.query.shape[1:]
    block_s = power_of_two(splits)
    # One warp, which meets no barrier, of at most 64 partial sums a thread. Many heads fill the
    # device with longer rows, few want more programs; the order of the sums differs.
    many = (segment.end_row - segment.first_row) * heads >= 16 * call.target.processors
    many &= not deterministic
    block_d = max(16, min(power_of_two(dim), 256 if many else 64, 2048 // block_s))
    merge_kernel[(segment.end_row - segment.first_row, heads, -(-dim // block_d))](
        *partials,
        call.or_dummy(call.gate),
        call.out,
        call.or_dummy(call.lse),
        *call.output_strides(),
        segment.first_row,
        splits,
        heads,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_S=block_s,
        HAS_GATE=call.gate is not None,
        HAS_LSE=call.lse is not None,
        PDL=call.early_launch,
        num_warps=1,
        **call.launch_options(),
    )
