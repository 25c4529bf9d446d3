"""Builds the row union: for every tile of consecutive rows, the blocks that any of them attends.

A tile's list holds cells: a cell is one block, named by its first token's physical place (page ·
unit_page + offset · unit_token), with one 16-bit mask a token that says which rows of the tile
attend it. The rows' open groups come first, then the selected blocks, ascending. An open group may
hold tokens that nobody attends and that were never written, so the first step must be loaded under
its masks. The list is padded to whole steps (PAD cells) with a selected block and masks of zero, so
the other steps can be loaded without.

With HALF, a list comes in sections of whole steps: what only the tile's first HALF rows attend,
what only the others do, the steps of both alternating; then what both attend; then open groups.

Ranks come from a bitmap over the causal range, one of each half: atomic OR commutes, so the list
does not depend on the order in which threads run. With the ranks every row writes its blocks where
they belong: rows that share a block write the same cell and OR their bits into its masks. A tile
that spans requests, lacks a page or exceeds the capacity is left to the per-row schedule: `shared`
is 0 for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.direct import direct
from flash_qsa.ops.sparse_attention.kernel_build_ranks import (
    FIRST,
    SECOND,
    count_in,
    counts_of,
    join_masks,
    load_halves,
    locate,
    section_slot,
)


@direct
@triton.jit(
    do_not_specialize=[
        "first_row",
        "end_row",
        "num_requests",
        "num_columns",
        "num_pages",
        "num_tiles",
        "page_size",
    ]
)
def build_kernel(
    ids_ptr,
    positions_ptr,
    requests_ptr,
    base_ptr,
    table_ptr,
    bitmap_ptr,
    ranks_ptr,
    cells_ptr,
    masks_ptr,
    counts_ptr,
    shared_ptr,
    sections_ptr,
    stride_ids_t,
    stride_table_r,
    first_row,
    end_row,
    num_ids,
    num_requests,
    num_columns,
    num_pages,
    num_tiles,
    num_words,
    capacity,
    unit_page,
    unit_token,
    page_size,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PAD: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BASE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [programs]; each loops over tiles with scratch of its own.

    bitmap: int32 [programs, 1 or with HALF 2, num_words]. ranks: int64 [programs, num_words], the
    `counts_of` before each word. Outputs: cells int32 [tiles, capacity], masks int16 [tiles,
    capacity, C], counts and shared int32 [tiles]; counts are whole multiples of PAD. sections:
    int32 [tiles, 2], steps of the two leading sections, where HALF is not 0. PAGE: tokens of a
    page, or 0 where page_size says it at run time.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    size = PAGE if PAGE > 0 else page_size
    program = tl.program_id(0)
    bitmap = bitmap_ptr + program.to(tl.int64) * num_words * (2 if HALF > 0 else 1)
    ranks = ranks_ptr + program.to(tl.int64) * num_words
    offs_r = tl.arange(0, BLOCK_R)
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_W)
    offs_c = tl.arange(0, RATIO)

    for turn in range((num_tiles - program + tl.num_programs(0) - 1) // tl.num_programs(0)):
        tile = program + turn * tl.num_programs(0)
        rows = first_row + tile * ROWS + offs_r
        real = (offs_r < ROWS) & (rows < end_row)
        position = tl.load(positions_ptr + rows, mask=real, other=-1).to(tl.int32)
        request = tl.load(requests_ptr + rows, mask=real, other=-1)
        known = real & (position >= 0) & (request >= 0) & (request < num_requests)
        owner = tl.max(tl.where(known, request, -1), 0)
        alone = tl.max(tl.where(known & (request != owner), 1, 0), 0) == 0
        position = tl.where(known, position, -1)
        limit = (position + 1) // RATIO
        base = 0
        if HAS_BASE:
            bases = tl.load(base_ptr + rows, mask=known, other=0).to(tl.int32)
            base = tl.sum(tl.where(offs_r == tl.argmax(tl.where(known, 1, 0), 0), bases, 0), 0)
            shifted = tl.where(known & ((bases != base) | (limit > num_words * 32)), 1, 0)
            alone = tl.where(tl.max(shifted, 0) == 0, alone, False)
        # Without a base, blocks behind the bitmap are behind the page table: they have no page.
        limit = tl.minimum(limit, num_words * 32)
        words = tl.where(alone, (tl.max(limit, 0) + 31) // 32, 0)
        page_row = table_ptr + tl.maximum(owner, 0).to(tl.int64) * stride_table_r
        table = (page_row, num_columns, num_pages, unit_page, unit_token)
        row_ids = ids_ptr + rows.to(tl.int64) * stride_ids_t

        tl.debug_barrier()
        for start in range(0, words, BLOCK_W):
            at = start + offs_w
            tl.store(bitmap + at, tl.zeros([BLOCK_W], tl.int32), mask=at < words)
            if HALF > 0:
                tl.store(bitmap + num_words + at, tl.zeros([BLOCK_W], tl.int32), mask=at < words)
        tl.debug_barrier()
        for start in range(0, num_ids, BLOCK_K):
            column = start + offs_k
            ids = tl.load(
                row_ids[:, None] + column[None, :],
                mask=known[:, None] & (column < num_ids)[None, :],
                other=-1,
            )
            valid = (ids >= 0) & (ids < limit[:, None]) & ((ids >> 5) < words)
            safe = tl.where(valid, ids, 0)
            word = safe >> 5
            if HALF > 0:
                word += tl.where(offs_r < HALF, 0, num_words)[:, None]
            tl.atomic_or(bitmap + word, 1 << (safe & 31), mask=valid, sem="relaxed")
        tl.debug_barrier()
        counts = tl.zeros([], tl.int64)
        for start in range(0, words, BLOCK_W):
            at = start + offs_w
            low, high = load_halves(bitmap, at, at < words, num_words, HALF)
            own = counts_of(low, high, HALF)
            tl.store(ranks + at, counts + tl.cumsum(own, 0) - own, mask=at < words)
            counts += tl.sum(own, 0)

        # Open groups: one cell for each, led by the first row that has it.
        group = (position + 1) // RATIO
        open_row = known & ((position + 1) % RATIO != 0)
        same = (group[:, None] == group[None, :]) & open_row[:, None] & open_row[None, :]
        earlier = same & (offs_r[None, :] < offs_r[:, None])
        leads = open_row & (tl.max(tl.where(earlier, 1, 0), 1) == 0)
        tails = tl.sum(tl.where(leads, 1, 0), 0)
        # Each section ends with an incomplete step.
        most = count_in(counts, 0) + tails + (3 * PAD if HALF > 0 else PAD) - 1
        # They must stay within the first step (the last two), whose loads are masked.
        most = tl.where(tails <= PAD, most, capacity + 1)
        fits = tl.where(alone, most, capacity + 1) <= capacity
        counts = tl.where(fits, counts, 0)
        union = count_in(counts, 0)
        first = count_in(counts, FIRST)
        second = count_in(counts, SECOND)
        first_steps = (first + PAD - 1) // PAD
        second_steps = (second + PAD - 1) // PAD
        # Without sections the open groups come first.
        lead = (first_steps + second_steps) * PAD if HALF > 0 else tails
        behind = lead + union - first - second
        cells = behind + tails if HALF > 0 else behind
        padded = tl.where(fits, (cells + PAD - 1) // PAD * PAD, 0)

        tile_cells = cells_ptr + tl.cast(tile, tl.int64) * capacity
        tile_masks = masks_ptr + tl.cast(tile, tl.int64) * capacity * RATIO
        for start in range(0, padded * RATIO, BLOCK_W):
            at = start + offs_w
            tl.store(tile_masks + at, tl.zeros([BLOCK_W], tl.int16), mask=at < padded * RATIO)
        tl.debug_barrier()
        lost = tl.zeros([BLOCK_R, BLOCK_K], tl.int32)
        filler = tl.zeros([BLOCK_R, BLOCK_K], tl.int32)
        for start in range(0, tl.where(fits, num_ids, 0), BLOCK_K):
            column = start + offs_k
            ids = tl.load(
                row_ids[:, None] + column[None, :],
                mask=known[:, None] & (column < num_ids)[None, :],
                other=-1,
            )
            valid = (ids >= 0) & (ids < limit[:, None])
            safe = tl.where(valid, ids, 0)
            word = safe >> 5
            below = (1 << (safe & 31)) - 1
            rank = tl.load(ranks + word, mask=valid, other=0, cache_modifier=".cg")
            low, high = load_halves(bitmap, word, valid, num_words, HALF)
            rank += counts_of(low & below, high & below, HALF)
            slot = lead + count_in(rank, 0)
            if HALF > 0:
                in_first = count_in(rank, FIRST)
                in_second = count_in(rank, SECOND)
                slot -= in_first + in_second
                at_first = section_slot(in_first, second_steps, 0, PAD)
                at_second = section_slot(in_second, first_steps, 1, PAD)
                slot = tl.where((high & (below + 1)) == 0, at_first, slot)
                slot = tl.where((low & (below + 1)) == 0, at_second, slot)
            place = safe * RATIO + base
            cell, missing = locate(table, place, place + RATIO - 1, valid, size)
            lost = tl.maximum(lost, missing)
            # a whole block, whose tokens may be read: an open group's may not
            filler = tl.maximum(filler, tl.where(valid, cell, 0))
            tl.store(tile_cells + slot, cell, mask=valid)
            join_masks(tile_masks, slot, (1 << offs_r)[:, None], valid, RATIO)
        lost = tl.max(tl.max(lost, 1), 0)
        filler = tl.max(tl.max(filler, 1), 0)

        placed = leads & (offs_r < tl.where(fits, BLOCK_R, 0))
        newest = tl.max(tl.where(same, position[None, :], -1), 1)
        cell, missing = locate(table, group * RATIO + base, newest + base, placed, size)
        lost = tl.maximum(lost, tl.max(missing, 0))
        at = (behind if HALF > 0 else 0) + tl.cumsum(tl.where(leads, 1, 0), 0) - 1
        tl.store(tile_cells + at, cell, mask=placed)
        # [leading row, attending row, token of the group]
        token = group[:, None] * RATIO + offs_c[None, :]
        attends = same[:, :, None] & (token[:, None, :] <= position[None, :, None])
        bits = tl.where(attends, (1 << offs_r)[None, :, None], 0)
        member = tl.sum(bits, 1).to(tl.int16)
        tl.store(
            tile_masks + at[:, None] * RATIO + offs_c[None, :],
            member,
            mask=placed[:, None] & (offs_c >= 0)[None, :],
        )

        offs_p = tl.arange(0, PAD)
        filler = tl.zeros([PAD], tl.int32) + filler
        tl.store(tile_cells + cells + offs_p, filler, mask=cells + offs_p < padded)
        if HALF > 0:
            at = first + offs_p
            slot = section_slot(at, second_steps, 0, PAD)
            tl.store(tile_cells + slot, filler, mask=at < first_steps * PAD)
            at = second + offs_p
            slot = section_slot(at, first_steps, 1, PAD)
            tl.store(tile_cells + slot, filler, mask=at < second_steps * PAD)
            tl.store(sections_ptr + 2 * tile, first_steps)
            tl.store(sections_ptr + 2 * tile + 1, second_steps)
        usable = tl.where(lost == 0, tl.where(fits, 1, 0), 0)
        tl.store(counts_ptr + tile, tl.where(usable == 1, padded, 0))
        tl.store(shared_ptr + tile, usable)
