"""Schedules and tiles of sparse_attention: pure functions of numbers.

Nothing here looks at a tensor, a device or a clock. Timings behind the H200 choices are in
`benchmarks/results/`; other devices get what fits their shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flash_qsa.targets import Target, power_of_two

SPLIT_TOKENS = 256
"""Tokens of a split in deterministic mode, whatever the batch."""

LISTED_TAIL_GROUPS = 4
"""Groups of an open part that the caller makes longer which the per-row schedule lists: enough for
a draft window's reused selection. Longer parts take more time."""

MAX_SPLITS = 128
MAX_SHARED = 1 << 30
MARGIN = 2 << 10

MAX_SHARE = 16
"""Rows that a 16-bit mask can tell apart."""


@dataclass(frozen=True)
class Segment:
    """Rows that one schedule serves; rows_per_request is 0 where it is not uniform."""

    first_row: int
    end_row: int
    rows_per_request: int


@dataclass(frozen=True)
class RowTiles:
    """The per-row schedule: tokens a tile, launch options, and how a row's ids are split."""

    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    ids_per_split: int


def cell_width(ratio: int, straddles: bool) -> int:
    """Consecutive tokens looked up together: the largest power of two, up to 8, in a block."""
    return 1 if straddles else min(ratio & -ratio, 8)


def choose_rows(
    segment: Segment,
    kv_heads: int,
    dim: int,
    num_ids: int,
    ratio: int,
    kv_bytes: int,
    compute_bytes: int,
    target: Target,
    deterministic: bool,
) -> RowTiles:
    """Tiles of the per-row schedule.

    Args:
        kv_heads: a program each, times rows and splits. dim: D. num_ids: K. ratio: C.
        kv_bytes, compute_bytes: element sizes of the cache and of the products' operands.
        deterministic: decide by num_ids alone, so that a row's bits never depend on the batch.
    """
    tokens = num_ids * ratio
    programs = max((segment.end_row - segment.first_row) * kv_heads, 1)
    num_warps = 4
    # FP8 halves the bytes, but not the instructions: two programs of four warps a processor.
    packed = kv_bytes < compute_bytes == 2
    slots = target.processors * (2 if packed else 1)
    # Half of the stages hold keys and values: three load one step ahead, five two, seven three.
    block_n, num_stages = 32, 5
    if deterministic:
        splits = -(-tokens // SPLIT_TOKENS)
    elif programs <= 2:
        # Latency is all: small steps, and a step or two a split.
        block_n = 16
        splits = min(target.processors // programs, -(-tokens // 32))
    elif segment.rows_per_request > 1 and programs <= target.processors:
        # A draft window's rows find each other's tokens in the cache: no need to load far ahead.
        num_stages, waves = 3, 2
        if packed:
            num_warps, waves = 2, 4
        else:
            block_n = 64
        splits = min(waves * target.processors // programs, -(-tokens // 64))
    elif 4 * programs <= target.processors:
        splits = min(slots // programs, -(-tokens // 32))
    else:
        splits = even_splits(programs, slots, -(-tokens // 64))
        if packed:
            block_n = 64
        elif programs * splits <= target.processors:
            block_n, num_warps = 64, 8
        if programs > 8 * target.processors:
            # Prefills without row unions: many small programs of a processor hide their waits.
            wide = packed and target.shared_memory > (200 << 10)
            block_n, num_stages, num_warps = 64 if wide else 32, 3, 2
    # Without matrix units (FP32; Turing, for which Triton has none) large tiles spill registers.
    if compute_bytes > 2 or not target.has_bf16:
        block_n, num_warps = 16, 4
    if target.backend == "hip":
        num_stages = 1  # its buffers grow faster with stages than its shared memory allows
    sizes = (kv_bytes, compute_bytes, target)
    # Two programs of long loops should fit a processor where there are so many; one always must.
    many = programs > target.processors and splits <= 1 and not deterministic
    roomy = target.shared_memory // 2 if many else MAX_SHARED
    while row_shared_bytes(dim, block_n, num_stages, *sizes) > min(
        roomy, target.shared_memory - MARGIN
    ):
        if num_stages > 1:
            num_stages -= 2
        elif block_n > 16:
            block_n //= 2
        else:
            break
    splits = max(1, min(splits, MAX_SPLITS, max(num_ids, 1)))
    return split_ids(RowTiles(block_n, num_warps, num_stages, splits, num_ids), num_ids, ratio)


def even_splits(programs: int, processors: int, most: int) -> int:
    """The fewest splits, up to `most`, that leave at most a tenth of the processors idle and give
    none more than 1.4 times its share: a processor alone does not draw the memory's full rate."""
    for splits in range(1, most):
        largest = -(-programs * splits // processors)
        busy = 10 * programs * splits >= 9 * processors
        if busy and 5 * largest * processors <= 7 * programs * splits:
            return splits
    return max(most, 1)


def split_ids(tiles: RowTiles, num_ids: int, ratio: int) -> RowTiles:
    """Shares num_ids among the splits in whole tiles where that is possible."""
    if tiles.splits == 1:
        return replace(tiles, ids_per_split=max(num_ids, 1))
    per_tile = max(tiles.block_n // ratio, 1)
    per_split = -(-max(num_ids, 1) // tiles.splits)
    if per_split > per_tile:
        per_split = -(-per_split // per_tile) * per_tile
    return replace(tiles, splits=-(-num_ids // per_split), ids_per_split=per_split)


def row_shared_bytes(
    dim: int, block_n: int, num_stages: int, kv_bytes: int, compute_bytes: int, target: Target
) -> int:
    """Upper bound of the per-row kernel's shared memory."""
    tile = block_n * power_of_two(dim)
    rest = 16 * power_of_two(dim) * compute_bytes + 64 * block_n + 1024
    if target.backend == "hip" or target.capability < (8, 0):
        # No asynchronous copies: one buffer, a wider one where products leave the matrix units.
        return (2 if target.backend == "hip" else 4) * tile * compute_bytes + rest
    # Cells are loaded ahead of what they point at, so half of the stages hold keys and values.
    buffers = 2 * max(1, (num_stages - 1) // 2) * tile * kv_bytes
    return buffers + (tile * compute_bytes if kv_bytes < compute_bytes else 0) + rest


def segments(
    rows: int, requests: int, num_decode_tokens: int, decode_query_len: int, max_query_len: int
) -> list[Segment]:
    """Decode rows, then the others. Without a plan pass num_decode_tokens = -1."""
    if num_decode_tokens < 0:
        uniform = rows // requests if requests and rows % requests == 0 else 0
        if rows <= requests:
            uniform = 1
        return [Segment(0, rows, uniform if uniform <= MAX_SHARE else 0)]
    decodes = min(max(num_decode_tokens, 0), rows)
    parts = [Segment(0, decodes, decode_query_len), Segment(decodes, rows, 0)]
    if max_query_len == 1:
        parts = [Segment(0, rows, 1)]
    return [part for part in parts if part.end_row > part.first_row]
