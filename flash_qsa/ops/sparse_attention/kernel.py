"""sparse_attention on the GPU: chooses schedules and launches them.

Mirrors `reference.sparse_attention`. Launches, allocations and sizes follow from shapes and from
the plan's host integers alone, so that a call can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from flash_qsa import dispatch
from flash_qsa.checks import E4M3_DTYPES
from flash_qsa.ops.sparse_attention import tiles as choices
from flash_qsa.ops.sparse_attention.kernel_build import build_kernel
from flash_qsa.ops.sparse_attention.kernel_merge import merge_kernel
from flash_qsa.ops.sparse_attention.kernel_rows import rows_kernel
from flash_qsa.ops.sparse_attention.kernel_union import union_kernel
from flash_qsa.ops.sparse_attention.tiles import RowTiles, Segment, UnionTiles
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import Target, device_target

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

MAX_PROGRAMS = 32
"""Programs a processor in the per-row schedule; more rows than that share a program's scratch."""

PARTIALS_BYTES = 64 << 20
"""Deterministic splits are worked off in chunks of rows whose partials fit this."""


@dataclass(frozen=True)
class Tuning:
    """Overrides for experiments and tests; None keeps the choice of `tiles`.

    `rows` and `union` are field overrides of RowTiles and UnionTiles. share=False forbids unions,
    share=True allows them for any dtype; hopper=False forbids the sm_90 schedule, a dict
    overrides its fields. split_factor scales the number of splits.
    """

    rows: dict | None = None
    union: dict | None = None
    share: bool | None = None
    hopper: bool | dict = True
    split_factor: float = 1.0


@dataclass(frozen=True)
class _Call:
    """One call's tensors in the form kernels take them, and what follows from their dtypes."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_ids: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    request_ids: torch.Tensor
    gate: torch.Tensor | None
    tail_start: torch.Tensor | None
    token_base: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    ratio: int
    scale: float
    scales: dict
    scale_args: tuple
    compute: torch.dtype
    fp8_bytes: bool
    target: Target

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.keys.shape[1]

    @property
    def early_launch(self) -> bool:
        """Whether a kernel may start while its predecessor ends (programmatic dependent launch)."""
        newest = self.target.backend == "cuda" and self.target.capability >= (9, 0)
        return newest and not dispatch.interpreting()

    def launch_options(self) -> dict:
        return {"launch_pdl": True} if self.early_launch else {}

    def strides(self) -> tuple[int, ...]:
        """Of query, keys and values, as both attention kernels take them."""
        return (
            *self.query.stride()[:2],
            *self.keys.stride()[:3],
            *self.values.stride()[:3],
        )

    def output_strides(self) -> tuple[int, ...]:
        gate = self.query if self.gate is None else self.gate
        lse = (0, 0) if self.lse is None else self.lse.stride()
        return (*gate.stride()[:2], *self.out.stride()[:2], *lse)

    def or_dummy(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """A pointer for an argument that the kernel's flags say is absent."""
        return self.query if tensor is None else tensor


def launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_ids: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    request_ids: torch.Tensor,
    ratio: int,
    scale: float,
    gate: torch.Tensor | None,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    tail_start: torch.Tensor | None,
    token_base: torch.Tensor | None,
    plan: BatchPlan | None,
    deterministic: bool,
    out: torch.Tensor,
    lse_out: torch.Tensor | None,
    *,
    tuning: Tuning = Tuning(),
) -> None:
    """Fills out and lse_out; arguments as in `reference.sparse_attention`."""
    target = device_target(query.device)
    interpreted = dispatch.interpreting()
    # Without a native type, FP8 travels as bytes and BF16 products are done in FP32.
    fp8_bytes = keys.dtype in E4M3_DTYPES and (
        interpreted or target.backend == "hip" or not target.has_e4m3
    )
    if keys.dtype in E4M3_DTYPES:
        storage = torch.uint8 if fp8_bytes else torch.float8_e4m3fn
        keys, values = keys.view(storage), values.view(storage)
    narrow = query.dtype == torch.bfloat16 and (interpreted or not target.has_bf16)
    call = _Call(
        query,
        keys,
        values,
        _unit_stride(block_ids),
        positions.contiguous(),
        _unit_stride(page_table),
        request_ids.contiguous(),
        None if gate is None else _unit_stride(gate),
        None if tail_start is None else tail_start.contiguous(),
        None if token_base is None else token_base.contiguous(),
        out,
        lse_out,
        ratio,
        scale,
        {"K_SCALE": _scale_kind(k_scale), "V_SCALE": _scale_kind(v_scale)},
        tuple(1.0 if s is None else s for s in (k_scale, v_scale)),
        torch.float32 if narrow else query.dtype,
        fp8_bytes,
        target,
    )
    if plan is None:
        parts = choices.segments(query.shape[0], page_table.shape[0], -1, 0, 0)
    else:
        parts = choices.segments(
            query.shape[0],
            plan.num_requests,
            plan.num_decode_tokens,
            plan.decode_query_len,
            plan.max_query_len,
        )
    for segment in parts:
        union = None if deterministic else _choose_union(call, segment, tuning)
        if union is not None:
            _launch_union(call, segment, union, tuning)
            continue
        rows = _choose_rows(call, segment, deterministic, tuning)
        chunk = segment.end_row - segment.first_row
        if deterministic and rows.splits > 1:
            row_bytes = 4 * call.query.shape[1] * rows.splits * call.query.shape[2]
            chunk = max(PARTIALS_BYTES // row_bytes, 1)
        for first in range(segment.first_row, segment.end_row, chunk):
            part = Segment(first, min(first + chunk, segment.end_row), 1)
            partials = _partials(call, part, rows.splits)
            programs = (part.end_row - first) * call.keys.shape[1] * rows.splits
            rows_per_program = triton.cdiv(programs, MAX_PROGRAMS * call.target.processors)
            _launch_rows(call, part, rows, rows_per_program, None, partials)
            _launch_merge(call, part, rows.splits, partials)


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


def _scale_kind(scale: float | torch.Tensor | None) -> int:
    """0: none, 1: a float argument, 2: read on the device."""
    if scale is None:
        return 0
    return 2 if isinstance(scale, torch.Tensor) else 1


def _choose_union(call: _Call, segment: Segment, tuning: Tuning) -> UnionTiles | None:
    # Blocks of shifted sequences straddle pages unless there is one page a request.
    straddles = call.token_base is not None and call.page_table.shape[1] > 1
    if call.tail_start is not None or straddles or tuning.share is False:
        return None
    if tuning.hopper is not False and _hopper(call):
        hopper = choices.choose_hopper(
            segment,
            call.group,
            call.query.shape[2],
            call.block_ids.shape[1],
            call.ratio,
            call.target,
        )
        if hopper is not None:
            return replace(hopper, **tuning.hopper) if tuning.hopper is not True else hopper
    union = choices.choose_union(
        segment,
        call.group,
        call.keys.shape[1],
        call.query.shape[2],
        call.block_ids.shape[1],
        call.ratio,
        2 if tuning.share else call.compute.itemsize,
        call.query.dtype != torch.float16,
        call.target,
    )
    return replace(union, **tuning.union) if union and tuning.union else union


def _hopper(call: _Call) -> bool:
    """Whether the sm_90 schedule can read this call's tensors."""
    sixteen_byte_rows = all(
        tensor.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in tensor.stride()[:-1])
        for tensor in (call.keys, call.values)
    )
    return (
        not dispatch.interpreting()
        and call.target.name == "sm_90"
        and call.query.dtype == call.keys.dtype == torch.bfloat16
        and call.scale > 0
        and sixteen_byte_rows
    )


def _choose_rows(call: _Call, segment: Segment, deterministic: bool, tuning: Tuning) -> RowTiles:
    num_ids = call.block_ids.shape[1]
    rows = choices.choose_rows(
        segment.end_row - segment.first_row,
        call.keys.shape[1],
        call.query.shape[2],
        num_ids,
        call.ratio,
        call.keys.element_size(),
        call.compute.itemsize,
        call.target,
        deterministic,
    )
    if tuning.rows or tuning.split_factor != 1.0:
        rows = replace(rows, **(tuning.rows or {}))
        splits = max(1, min(int(rows.splits * tuning.split_factor), choices.MAX_SPLITS))
        rows = choices.split_ids(replace(rows, splits=splits), num_ids, call.ratio)
    return rows


def _partials(
    call: _Call, segment: Segment, splits: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """FP32 outputs [rows, Hq, splits, D] and peaks with sums [rows, Hq, splits, 2]."""
    if splits == 1:
        return None
    shape = (segment.end_row - segment.first_row, call.query.shape[1], splits)
    device = call.query.device
    acc = torch.empty((*shape, call.query.shape[2]), dtype=torch.float32, device=device)
    return acc, torch.empty((*shape, 2), dtype=torch.float32, device=device)


def _launch_rows(
    call: _Call,
    segment: Segment,
    rows: RowTiles,
    rows_per_program: int,
    shared: torch.Tensor | None,
    partials: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    heads, dim = call.query.shape[1:]
    kv_heads, page_size = call.keys.shape[1:3]
    acc, stats = partials or (call.query, call.query)
    tiles = triton.cdiv(segment.end_row - segment.first_row, rows_per_program)
    straddles = call.token_base is not None or page_size % call.ratio != 0
    width = choices.cell_width(call.ratio, straddles)
    same = call.keys.stride()[:3] == call.values.stride()[:3]
    list_size = max(rows.ids_per_split * call.ratio // width, 1)
    strides = (*call.keys.stride()[:3], *call.values.stride()[:3])
    align = 16 if all(stride % 16 == 0 for stride in strides) else 1
    reach = max(call.keys.shape[0] * max(strides), 1) // align
    lists = torch.empty(
        tiles * kv_heads * rows.splits * list_size * (1 if same else 2),
        dtype=torch.int32 if reach < 2**31 else torch.int64,
        device=call.query.device,
    )
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
        call.or_dummy(shared),
        lists,
        call.out,
        call.or_dummy(call.lse),
        acc,
        stats,
        *call.strides(),
        call.block_ids.stride(0),
        call.page_table.stride(0),
        *call.output_strides(),
        segment.first_row,
        segment.end_row,
        call.block_ids.shape[1],
        rows.ids_per_split,
        list_size,
        *call.page_table.shape,
        call.keys.shape[0],
        call.scale,
        RATIO=call.ratio,
        WIDTH=width,
        PAGE=page_size,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_M=max(16, choices.next_power(heads // kv_heads)),
        BLOCK_N=rows.block_n,
        BLOCK_D=max(16, choices.next_power(dim)),
        CHUNK=min(max(choices.next_power(list_size), 16), 1024),
        ROWS=rows_per_program,
        SPLITS=rows.splits,
        SAME=same,
        ALIGN=align,
        COMPUTE=_TYPES[call.compute],
        FP8_BYTES=call.fp8_bytes,
        HAS_TAIL=call.tail_start is not None,
        HAS_BASE=call.token_base is not None,
        HAS_GATE=call.gate is not None,
        HAS_LSE=call.lse is not None,
        **call.scales,
        SKIP_SHARED=shared is not None,
        PDL=call.early_launch,
        num_warps=rows.num_warps,
        num_stages=rows.num_stages,
        **call.launch_options(),
    )


def _launch_merge(
    call: _Call,
    segment: Segment,
    splits: int,
    partials: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    if partials is None:
        return
    heads, dim = call.query.shape[1:]
    block_s = choices.next_power(splits)
    block_d = min(max(16, choices.next_power(dim)), max(16, 4096 // block_s))
    merge_kernel[(segment.end_row - segment.first_row, heads, triton.cdiv(dim, block_d))](
        *partials,
        call.or_dummy(call.gate),
        call.out,
        call.or_dummy(call.lse),
        *call.output_strides(),
        segment.first_row,
        heads,
        DIM=dim,
        BLOCK_D=block_d,
        SPLITS=splits,
        BLOCK_S=block_s,
        HAS_GATE=call.gate is not None,
        HAS_LSE=call.lse is not None,
        PDL=call.early_launch,
        num_warps=4,
        **call.launch_options(),
    )


def _launch_union(call: _Call, segment: Segment, union: UnionTiles, tuning: Tuning) -> None:
    """Lists, attention over them, and the per-row schedule for the tiles that were left out."""
    heads, dim = call.query.shape[1:]
    kv_heads, page_size = call.keys.shape[1:3]
    num_ids, num_columns = call.block_ids.shape[1], call.page_table.shape[1]
    tiles = triton.cdiv(segment.end_row - segment.first_row, union.rows)
    words = max(triton.cdiv(num_columns * page_size, 32 * call.ratio), 1)

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=call.query.device)

    bitmap, prefix = buffer(2, union.build_programs, words).unbind(0)
    packed = buffer(union.build_programs, union.capacity, dtype=torch.int64)
    cells = buffer(tiles, union.capacity)
    masks = buffer(tiles, union.capacity, call.ratio, dtype=torch.int16)
    counts, shared = buffer(2, tiles).unbind(0)
    sections = buffer(tiles, 2)
    build_kernel[(union.build_programs,)](
        call.block_ids,
        call.positions,
        call.request_ids,
        call.or_dummy(call.token_base),
        call.page_table,
        bitmap,
        prefix,
        packed,
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
        RATIO=call.ratio,
        PAGE=page_size,
        ROWS=union.rows,
        BLOCK_R=choices.next_power(union.rows),
        BLOCK_K=min(choices.next_power(num_ids), 1024 // choices.next_power(union.rows)),
        BLOCK_W=min(choices.next_power(words), 1024),
        BLOCK_E=256,
        PAD=union.block_n // call.ratio,
        HALF=union.half,
        HAS_BASE=call.token_base is not None,
        num_warps=union.build_warps,
        num_stages=1,
        # Four programs a processor: the builder waits for memory most of the time.
        **({"maxnreg": 64} if call.target.backend == "cuda" else {}),
    )
    if union.half:
        _launch_hopper(call, segment, union, cells, masks, counts, sections, shared)
    partials = _partials(call, segment, union.splits)
    if not union.half:
        _attend_union(call, segment, union, cells, masks, counts, shared, partials)
    rows = _choose_rows(call, segment, False, tuning)
    rows = choices.split_ids(replace(rows, splits=union.splits), num_ids, call.ratio)
    rows = replace(rows, splits=union.splits)
    _launch_rows(call, segment, rows, union.rows, shared, partials)
    _launch_merge(call, segment, union.splits, partials)


def _launch_hopper(
    call: _Call,
    segment: Segment,
    union: UnionTiles,
    cells: torch.Tensor,
    masks: torch.Tensor,
    counts: torch.Tensor,
    sections: torch.Tensor,
    shared: torch.Tensor,
) -> None:
    # Gluon is imported where it runs: older GPUs need only Triton.
    from flash_qsa.ops.sparse_attention.kernel_union_sm90 import union_sm90_kernel

    union_sm90_kernel[(counts.shape[0], call.keys.shape[1])](
        call.query,
        call.keys,
        call.values,
        cells,
        masks,
        counts,
        sections,
        shared,
        call.or_dummy(call.gate),
        call.out,
        call.or_dummy(call.lse),
        *call.strides(),
        *call.output_strides(),
        segment.first_row,
        segment.end_row,
        union.capacity,
        call.scale,
        RATIO=call.ratio,
        PAGE=call.keys.shape[2],
        GROUP=call.group,
        DIM=call.query.shape[2],
        HALF=union.half,
        HAS_GATE=call.gate is not None,
        HAS_LSE=call.lse is not None,
        num_warps=4,
    )


def _attend_union(
    call: _Call,
    segment: Segment,
    union: UnionTiles,
    cells: torch.Tensor,
    masks: torch.Tensor,
    counts: torch.Tensor,
    shared: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    dim, kv_heads = call.query.shape[2], call.keys.shape[1]
    acc, stats = partials or (call.query, call.query)
    union_kernel[(counts.shape[0], kv_heads, union.splits)](
        call.query,
        call.keys,
        call.values,
        cells,
        masks,
        counts,
        shared,
        call.or_dummy(call.gate),
        *call.scale_args,
        call.out,
        call.or_dummy(call.lse),
        acc,
        stats,
        *call.strides(),
        *call.output_strides(),
        segment.first_row,
        segment.end_row,
        union.capacity,
        call.scale,
        RATIO=call.ratio,
        PAGE=call.keys.shape[2],
        GROUP=call.group,
        DIM=dim,
        ROWS=union.rows,
        BLOCK_M=union.block_m,
        BLOCK_N=union.block_n,
        SPLITS=union.splits,
        FIXED=union.fixed,
        COMPUTE=_TYPES[call.compute],
        FP8_BYTES=call.fp8_bytes,
        HAS_GATE=call.gate is not None,
        HAS_LSE=call.lse is not None,
        **call.scales,
        num_warps=union.num_warps,
        num_stages=union.num_stages,
    )
