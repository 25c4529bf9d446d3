"""Builds the row union: for every tile of consecutive rows, the blocks that any of them attends.

A tile's list holds cells: a cell is one block, named by its first token's physical place (page ·
unit_page + offset · unit_token), with one 16-bit mask a token that says which rows of the tile
attend it. The rows' open
groups come first, then the selected blocks, ascending. An open group may hold tokens that nobody
attends and that were never written, so the first step must be loaded under its masks. The list is
padded to whole steps (PAD cells) with a selected block and masks of zero, so the other steps can be
loaded without.

With HALF, a list comes in sections of whole steps: what only the tile's first HALF rows attend,
what only the others do, the steps of both alternating; then what both attend; then open groups.

Ranks come from a bitmap over the causal range: atomic OR commutes, so the list does not depend on
the order in which threads run. A tile that spans requests, lacks a page or exceeds the capacity is
left to the per-row schedule: `shared` is 0 for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.direct import direct


@triton.jit
def _popcount(words):
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


@triton.jit
def _section_slot(index, other_steps, WHICH: tl.constexpr, PAD: tl.constexpr):
    """List position of the index-th cell of section WHICH: its steps alternate with the other's."""
    step = index // PAD
    return tl.where(step < other_steps, 2 * step + WHICH, other_steps + step) * PAD + index % PAD


@triton.jit
def _sides(entry, listed, HALF: tl.constexpr):
    """Whether listed entries are attended by the first half alone, and by the second alone."""
    low = (entry & ((1 << HALF) - 1)) != 0
    high = ((entry & 0xFFFF) >> HALF) != 0
    return tl.where(listed & low & (high == 0), 1, 0), tl.where(listed & high & (low == 0), 1, 0)


@triton.jit
def _pad_cells(
    tile_cells, tile_masks, at, slot, end, filler, RATIO: tl.constexpr, PAD: tl.constexpr
):
    """Fills list positions `slot`, where at < end, with a cell that nobody attends."""
    offs_c = tl.arange(0, RATIO)
    tl.store(tile_cells + slot, tl.zeros([PAD], tl.int32) + filler, mask=at < end)
    tl.store(
        tile_masks + slot[:, None] * RATIO + offs_c[None, :],
        tl.zeros([PAD, RATIO], tl.int16),
        mask=(at < end)[:, None] & (offs_c >= 0)[None, :],
    )


@triton.jit
def _locate(table, place, last, wanted, page_size):
    """Physical cells of logical places, and 1 if any wanted one lacks a page up to `last`.

    table: a request's row of the page table, its columns, the cache's pages, and the units.
    """
    page_row, num_columns, num_pages, unit_page, unit_token = table
    column = place // page_size
    inside = wanted & (place >= 0) & (column < num_columns)
    page = tl.load(page_row + column, mask=inside, other=-1)
    found = (page >= 0) & (page < num_pages) & (last // page_size == column)
    lost = tl.max(tl.where(wanted & (found == 0), 1, 0), 0)
    return page * unit_page + (place - column * page_size) * unit_token, lost


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
    prefix_ptr,
    packed_ptr,
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
    BLOCK_E: tl.constexpr,
    PAD: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BASE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [programs]; each loops over tiles with scratch of its own.

    bitmap, prefix: int32 [programs, num_words]. packed: int64 [programs, capacity], id · 2^16 +
    row mask. Outputs: cells int32 [tiles, capacity], masks int16 [tiles, capacity, C], counts and
    shared int32 [tiles]; counts are whole multiples of PAD. sections: int32 [tiles, 2], steps of
    the two leading sections, where HALF is not 0. PAGE: tokens of a page, or 0 where page_size says
    it at run time.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    size = PAGE if PAGE > 0 else page_size
    program = tl.program_id(0)
    bitmap = bitmap_ptr + program.to(tl.int64) * num_words
    prefix = prefix_ptr + program.to(tl.int64) * num_words
    packed = packed_ptr + program.to(tl.int64) * capacity
    offs_r = tl.arange(0, BLOCK_R)
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_W)
    offs_e = tl.arange(0, BLOCK_E)
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
            tl.atomic_or(bitmap + (safe >> 5), 1 << (safe & 31), mask=valid, sem="relaxed")
        tl.debug_barrier()
        union = 0
        for start in range(0, words, BLOCK_W):
            at = start + offs_w
            word = tl.load(bitmap + at, mask=at < words, other=0, cache_modifier=".cg")
            ones = _popcount(word)
            before = tl.cumsum(ones, 0) - ones
            tl.store(prefix + at, union + before, mask=at < words)
            union += tl.sum(ones, 0)

        # Open groups: one cell for each, led by the first row that has it.
        group = (position + 1) // RATIO
        open_row = known & ((position + 1) % RATIO != 0)
        same = (group[:, None] == group[None, :]) & open_row[:, None] & open_row[None, :]
        earlier = same & (offs_r[None, :] < offs_r[:, None])
        leads = open_row & (tl.max(tl.where(earlier, 1, 0), 1) == 0)
        tails = tl.sum(tl.where(leads, 1, 0), 0)
        # Each section ends with an incomplete step.
        most = union + tails + (3 * PAD if HALF > 0 else PAD) - 1
        # They must stay within the first step (the last two), whose loads are masked.
        most = tl.where(tails <= PAD, most, capacity + 1)
        fits = tl.where(alone, most, capacity + 1) <= capacity
        union = tl.where(fits, union, 0)

        for start in range(0, union, BLOCK_E):
            at = start + offs_e
            tl.store(packed + at, tl.zeros([BLOCK_E], tl.int64), mask=at < union)
        tl.debug_barrier()
        for start in range(0, tl.where(fits, num_ids, 0), BLOCK_K):
            column = start + offs_k
            ids = tl.load(
                row_ids[:, None] + column[None, :],
                mask=known[:, None] & (column < num_ids)[None, :],
                other=-1,
            )
            valid = (ids >= 0) & (ids < limit[:, None])
            safe = tl.where(valid, ids, 0)
            word = tl.load(bitmap + (safe >> 5), mask=valid, other=0, cache_modifier=".cg")
            before = tl.load(prefix + (safe >> 5), mask=valid, other=0, cache_modifier=".cg")
            rank = before + _popcount(word & ((1 << (safe & 31)) - 1))
            entry = (safe.to(tl.int64) << 16) | (1 << offs_r).to(tl.int64)[:, None]
            tl.atomic_or(packed + rank, entry, mask=valid, sem="relaxed")
        tl.debug_barrier()

        first = 0
        second = 0
        if HALF > 0:
            for start in range(0, union, BLOCK_E):
                at = start + offs_e
                entry = tl.load(packed + at, mask=at < union, other=0, cache_modifier=".cg")
                in_first, in_second = _sides(entry, at < union, HALF)
                first += tl.sum(in_first, 0)
                second += tl.sum(in_second, 0)
        first_steps = (first + PAD - 1) // PAD
        second_steps = (second + PAD - 1) // PAD
        # Without sections the open groups come first.
        lead = (first_steps + second_steps) * PAD if HALF > 0 else tails
        behind = lead + union - first - second
        cells = behind + tails if HALF > 0 else behind
        padded = (cells + PAD - 1) // PAD * PAD

        tile_cells = cells_ptr + tl.cast(tile, tl.int64) * capacity
        tile_masks = masks_ptr + tl.cast(tile, tl.int64) * capacity * RATIO
        missing = 0
        filler = 0
        placed_first = 0
        placed_second = 0
        for start in range(0, union, BLOCK_E):
            at = start + offs_e
            listed = at < union
            entry = tl.load(packed + at, mask=listed, other=0, cache_modifier=".cg")
            place = (entry >> 16).to(tl.int32) * RATIO + base
            cell, lost = _locate(table, place, place + RATIO - 1, listed, size)
            missing = tl.maximum(missing, lost)
            # a whole block, whose tokens may be read: an open group's may not
            filler = tl.max(tl.where(listed, cell, 0), 0)
            slot = lead + at
            if HALF > 0:
                in_first, in_second = _sides(entry, listed, HALF)
                upto_first = placed_first + tl.cumsum(in_first, 0)
                upto_second = placed_second + tl.cumsum(in_second, 0)
                slot = lead + at - upto_first - upto_second
                at_first = _section_slot(upto_first - 1, second_steps, 0, PAD)
                at_second = _section_slot(upto_second - 1, first_steps, 1, PAD)
                slot = tl.where(in_first == 1, at_first, slot)
                slot = tl.where(in_second == 1, at_second, slot)
                placed_first += tl.sum(in_first, 0)
                placed_second += tl.sum(in_second, 0)
            tl.store(tile_cells + slot, cell, mask=listed)
            member = (entry & 0xFFFF).to(tl.int16)
            tl.store(
                tile_masks + slot[:, None] * RATIO + offs_c[None, :],
                tl.broadcast_to(member[:, None], [BLOCK_E, RATIO]),
                mask=listed[:, None] & (offs_c >= 0)[None, :],
            )

        placed = leads & (offs_r < tl.where(fits, BLOCK_R, 0))
        newest = tl.max(tl.where(same, position[None, :], -1), 1)
        cell, lost = _locate(table, group * RATIO + base, newest + base, placed, size)
        missing = tl.maximum(missing, lost)
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
        end = tl.where(fits, padded, 0)
        _pad_cells(tile_cells, tile_masks, cells + offs_p, cells + offs_p, end, filler, RATIO, PAD)
        if HALF > 0:
            at = first + offs_p
            slot = _section_slot(at, second_steps, 0, PAD)
            _pad_cells(tile_cells, tile_masks, at, slot, first_steps * PAD, filler, RATIO, PAD)
            at = second + offs_p
            slot = _section_slot(at, first_steps, 1, PAD)
            _pad_cells(tile_cells, tile_masks, at, slot, second_steps * PAD, filler, RATIO, PAD)
            tl.store(sections_ptr + 2 * tile, first_steps)
            tl.store(sections_ptr + 2 * tile + 1, second_steps)
        usable = tl.where(missing == 0, tl.where(fits, 1, 0), 0)
        tl.store(counts_ptr + tile, tl.where(usable == 1, padded, 0))
        tl.store(shared_ptr + tile, usable)
