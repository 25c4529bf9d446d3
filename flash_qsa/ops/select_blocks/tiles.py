"""Choice of schedule and tile for select_blocks: pure functions of numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import Target, power_of_two

BLOCK_N = 64
"""Keys of a tile in every schedule: the M side of the product, a whole Hopper warp group."""

MAX_GROUP = BLOCK_N
MAX_UNITS = 16_384
MAX_BLOCKS = MAX_GROUP * MAX_UNITS
"""Longest row: 1,048,576 blocks, the units of 64 keys that one program holds in registers."""

DECODE_ROWS = 16
"""Rows of one request up to which keys are streamed once for few queries."""


DECODE_PROGRAMS, FP8_DECODE_PROGRAMS = 3, 4
"""Programs of the decode scorer per multiprocessor: keys of half the bytes are as many
instructions."""

KEPT_BYTES = 16 << 20
"""Scores of a decode step that may claim a place in the last cache, 40 MB and more on data-centre
GPUs, until they are selected from."""


@dataclass(frozen=True)
class Phase:
    """Consecutive rows that share a schedule; `query_len` rows of a request lie side by side."""

    begin: int
    end: int
    decode: bool
    query_len: int


@dataclass(frozen=True)
class ScoreTiles:
    """One program scores `rows` rows against every `splits`-th tile of BLOCK_N keys.

    `rows_pad` rows of `heads_pad` heads are the columns of the product; `block_d` channels are
    multiplied at a time.
    """

    rows: int
    rows_pad: int
    heads_pad: int
    dim_pad: int
    block_d: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class SelectTiles:
    """One program selects one row.

    group: keys behind one maximum; 1 reads the row itself, 0 scores nothing.
    units: maxima (keys, where group is 1) of a row, held in registers.
    slack: groups above K that may be listed. survivors: keys of the exact search.
    chunk: listed groups examined at a time.
    """

    group: int
    units: int
    slack: int
    survivors: int
    chunk: int
    num_warps: int

    def scratch(self, top_k: int) -> int:
        """int32 words of a row's lists: survivors, groups, and their quads."""
        if self.group <= 1:
            return 0
        groups = top_k + self.slack
        return self.survivors + groups + (groups * self.group // 4 if self.group > 4 else 0)


@dataclass(frozen=True)
class CudaSelectTiles:
    """One block of `threads` threads selects one row in CUDA C++; see select.cu.

    group, units, slack: as in SelectTiles. capacity: candidates that are held, exceeded only at a
    cost of time. blocks: of a multiprocessor, as far as registers go.
    """

    group: int
    units: int
    slack: int
    capacity: int
    threads: int
    blocks: int

    def scratch(self, top_k: int) -> int:
        """Its lists are in shared memory."""
        return 0

    def shared_bytes(self, top_k: int) -> int:
        """Bytes of its `Shared`."""
        words = 4 * self.threads + 64 + 3 * (self.threads // 32) + 8
        if self.group > 1:
            listed = top_k + self.slack
            words += listed + 2 * self.capacity + 2 * (-(-listed * self.group // 32))
        else:
            words += 1 + 2 + 2
        return -(-words // 4) * 16


def phases(rows: int, requests: int, plan: BatchPlan | None) -> list[Phase]:
    """Splits a step's rows into decode and prefill; correct for any rows, fast for these."""
    decodes, decode_rows, query_len = 0, 0, 1
    if plan is not None:
        decodes = min(plan.num_decodes, requests)
        decode_rows = min(plan.num_decode_tokens, rows)
        query_len = max(plan.decode_query_len, 1)
    found = []
    if decode_rows:
        found.append(Phase(0, decode_rows, query_len <= DECODE_ROWS, query_len))
    rest, requests = rows - decode_rows, max(requests - decodes, 1)
    if rest:
        each = -(-rest // requests)
        few = each <= DECODE_ROWS
        if few and (plan is not None or rest % requests):
            each = 1
        found.append(Phase(decode_rows, rows, few, each))
    return found


def product_dtype(dtype: torch.dtype, target: Target) -> torch.dtype:
    """What the product multiplies: FP8 as FP16, FP32 where no matrix unit takes 16 bits."""
    if dtype == torch.float32 or not target.has_bf16:
        return torch.float32
    return torch.float16 if is_fp8(dtype) else dtype


@functools.lru_cache(1024)
def choose_score(
    phase: Phase,
    width: int,
    heads: int,
    dim: int,
    itemsize: int,
    target: Target,
    programs: int = DECODE_PROGRAMS,
) -> ScoreTiles:
    """Tiles of the scorer for rows of up to `width` keys; `itemsize` is the product's."""
    heads_pad, dim_pad = max(2, power_of_two(heads)), max(32, power_of_two(dim))
    key_tiles = -(-width // BLOCK_N)
    rows = phase.end - phase.begin
    block_d = min(dim_pad, 16) if itemsize == 4 else dim_pad
    if phase.decode:
        tile_rows = max(1, min(phase.query_len, rows))
        rows_pad = max(4, power_of_two(tile_rows))
        row_tiles = -(-rows // tile_rows)
        splits = max(1, min(key_tiles, programs * target.processors // row_tiles))
    else:
        columns = 256 if target.shared_memory > (128 << 10) else 128
        if itemsize == 4:
            columns = 32
        while columns > 4 * heads_pad and columns * dim_pad * itemsize > 64 << 10:
            columns //= 2
        tile_rows = rows_pad = max(4, columns // heads_pad)
        splits = max(1, -(-key_tiles // 16))
    fixed = rows_pad * heads_pad * block_d * itemsize
    stage = BLOCK_N * block_d * itemsize
    room = target.shared_memory - (4 << 10) - fixed
    # FP32 steps through channels inside a tile and is bound by arithmetic
    stages = 1 if itemsize == 4 else max(1, min(3, room // stage))
    return ScoreTiles(tile_rows, rows_pad, heads_pad, dim_pad, block_d, splits, 4, stages)


@dataclass(frozen=True)
class DenseTiles:
    """The prefill scorer: `rows` rows against `pairs` pairs of 64-key tiles a program."""

    rows: int
    heads_pad: int
    dim_pad: int
    pairs: int
    num_warps: int
    num_stages: int

    def splits(self, width: int) -> int:
        return -(-width // (2 * BLOCK_N * self.pairs))


DENSE_MAX_GROUP = 32
"""Its groups stay inside a warp."""


@functools.lru_cache(1024)
def choose_dense(
    phase: Phase, width: int, heads: int, dim: int, itemsize: int, target: Target
) -> DenseTiles | None:
    """Tiles of the prefill scorer, or None where it does not fit: little shared memory, FP32."""
    heads_pad, dim_pad = max(2, power_of_two(heads)), max(32, power_of_two(dim))
    if phase.decode or itemsize == 4 or width > DENSE_MAX_GROUP * MAX_UNITS:
        return None
    columns = 256
    while columns >= 4 * heads_pad and columns >= 64:
        held = (columns + 3 * BLOCK_N) * dim_pad * itemsize
        if held <= target.shared_memory - (4 << 10):
            return DenseTiles(columns // heads_pad, heads_pad, dim_pad, 8, 4, 3)
        columns //= 2
    return None


@functools.lru_cache(1024)
def choose_select(
    rows: int, width: int, top_k: int, target: Target, max_group: int = MAX_GROUP
) -> SelectTiles:
    """Tiles of the selection for rows of up to `width` keys."""
    few = rows <= 2 * target.processors
    if width <= top_k:
        return SelectTiles(0, 0, 0, 0, 0, 1)
    slack = max(64, top_k // 8)
    survivors = power_of_two(top_k + slack)
    if survivors < top_k * 3 // 2:
        survivors *= 2
    if width <= max(8192 if few else 2048, survivors):
        units = power_of_two(width)
        return SelectTiles(1, units, 0, 0, 0, _warps(units, few))
    # few rows wait for one program each: finer groups leave it less to look at
    limit, group = max(MAX_UNITS if few else 4096, 8 * top_k), 16 if few else 4
    while group < max_group and -(-width // group) > limit:
        group = min(4 * group, max_group)
    units = max(16, power_of_two(-(-width // group)))
    warps = _warps(max(units, survivors), few)
    chunk = max(1, 512 * warps // group)
    if few:
        # all listed groups at once, as far as registers hold their keys
        warps = max(warps, 8)
        chunk = min(power_of_two(top_k + slack), 2048 * warps // group)
    return SelectTiles(group, units, slack, survivors, chunk, warps)


def admits_next(rows: int, fp8: bool, target: Target) -> bool:
    """Whether a selection of so many rows, a block each, lets the next kernel start before it ends.

    The next one's blocks then share the processors that the selection leaves free: no loss where
    those are nearly all, and a start of the next kernel is saved. Behind the scorer of FP8 keys,
    which takes other programs, the same blocks lie unevenly already for eight rows.
    """
    return (64 if fp8 else 8) * rows <= target.processors


def _warps(held: int, few: bool) -> int:
    """Warps for `held` elements in registers: few rows want latency, many want throughput."""
    return min(16, max(4, held // (1024 if few else 2048)))


@functools.lru_cache(1024)
def choose_cuda_select(
    rows: int, width: int, top_k: int, target: Target, max_group: int = MAX_GROUP
) -> CudaSelectTiles | None:
    """Tiles of the selection in CUDA C++; None for a K that it does not hold, or no search."""
    few = rows <= 2 * target.processors
    slack = max(64, top_k // 8)
    if width <= top_k or top_k + slack >= 8192:
        return None
    group = 1
    # where most groups of four would be listed there is no use in groups
    if width > max(8192 if few else 2048, min(6 * (top_k + slack), MAX_UNITS)):
        # a maximum costs about two keys: finding the bound takes longer than keeping to it
        group = min(
            (group for group in (4, 16, 32, 64) if group <= max_group),
            key=lambda group: (-(-width // group) > MAX_UNITS, 2 * width // group + top_k * group),
        )
    if (top_k + slack) * group >= 1 << 18:
        return None
    units = power_of_two(-(-width // group))
    # few rows want latency, many want throughput; a thread holds 4 to 32 units in registers
    threads = 512 if few else min(512, max(128, units // 16))
    units = max(4 * threads, units)
    blocks = 1
    if not few and units <= 16 * threads:
        # compilers for Blackwell take more registers
        blocks = max(1, (1024 if target.capability < (10, 0) else 640) // threads)
    capacity = max(256, (4 if few else 2) * power_of_two(top_k)) if group > 1 else 0
    while True:
        chosen = CudaSelectTiles(group, units, slack, capacity, threads, blocks)
        if chosen.shared_bytes(top_k) <= target.shared_memory - (2 << 10):
            return chosen
        if capacity <= 256:
            return None
        capacity //= 2
