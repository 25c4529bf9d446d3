"""Device functions of the list builder: ranks of blocks in bitmaps, places in a list, masks."""

from __future__ import annotations

import triton
import triton.language as tl

FIRST, SECOND = tl.constexpr(21), tl.constexpr(42)
COUNT_MASK = tl.constexpr((1 << 21) - 1)
"""Three counts of blocks share an int64, 21 bits each: 16 rows of 131,071 ids."""


@triton.jit
def _popcount(words):
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


@triton.jit
def section_slot(index, other_steps, WHICH: tl.constexpr, PAD: tl.constexpr):
    """List position of the index-th cell of section WHICH: its steps alternate with the other's."""
    step = index // PAD
    return tl.where(step < other_steps, 2 * step + WHICH, other_steps + step) * PAD + index % PAD


@triton.jit
def load_halves(bitmap, at, wanted, num_words, HALF: tl.constexpr):
    """Words `at` of the first half's bitmap, or of all rows', and of the second's (0 without)."""
    low = tl.load(bitmap + at, mask=wanted, other=0, cache_modifier=".cg")
    high = tl.zeros_like(low)
    if HALF > 0:
        high = tl.load(bitmap + num_words + at, mask=wanted, other=0, cache_modifier=".cg")
    return low, high


@triton.jit
def counts_of(low, high, HALF: tl.constexpr):
    """Blocks of bitmap words: of either half; with HALF, behind FIRST bits of the first alone, and
    behind SECOND bits of the second alone."""
    counts = _popcount(low | high).to(tl.int64)
    if HALF > 0:
        counts |= _popcount(low & ~high).to(tl.int64) << FIRST
        counts |= _popcount(high & ~low).to(tl.int64) << SECOND
    return counts


@triton.jit
def count_in(counts, BEHIND: tl.constexpr):
    return ((counts >> BEHIND) & COUNT_MASK).to(tl.int32)


@triton.jit
def join_masks(tile_masks, slot, member, wanted, RATIO: tl.constexpr):
    """ORs `member` into the masks of a cell's tokens, as many at a time as a word holds."""
    if RATIO >= 4:
        words = tile_masks.to(tl.pointer_type(tl.int64)) + slot * (RATIO // 4)
        for i in tl.static_range(RATIO // 4):
            every = member.to(tl.int64) * 0x0001000100010001
            tl.atomic_or(words + i, every, mask=wanted, sem="relaxed")
    elif RATIO == 2:
        words = tile_masks.to(tl.pointer_type(tl.int32)) + slot
        tl.atomic_or(words, member * 0x00010001, mask=wanted, sem="relaxed")
    else:
        words = tile_masks.to(tl.pointer_type(tl.int32)) + slot // 2
        tl.atomic_or(words, member << (16 * (slot % 2)), mask=wanted, sem="relaxed")


@triton.jit
def locate(table, place, last, wanted, page_size):
    """Physical cells of logical places, and 1 for a wanted one that lacks a page up to `last`.

    table: a request's row of the page table, its columns, the cache's pages, and the units.
    """
    page_row, num_columns, num_pages, unit_page, unit_token = table
    column = place // page_size
    inside = wanted & (place >= 0) & (column < num_columns)
    page = tl.load(page_row + column, mask=inside, other=-1)
    found = (page >= 0) & (page < num_pages) & (last // page_size == column)
    lost = tl.where(wanted & (found == 0), 1, 0)
    return page * unit_page + (place - column * page_size) * unit_token, lost
