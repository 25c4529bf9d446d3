"""store_rows.

Claims:
* rows[t] lands in cell slots[t] = page · S + offset and nothing else changes, whatever the strides;
* slots below 0 and past the last cell are skipped, the very first and last cell included;
* rows [T, W] and [T, 1, W] are the same; no rows do nothing;
* values are rounded to the cache's dtype, FP8 bytes and equal dtypes are moved bit for bit;
* whatever one writer stores, a plain gather reads back; moving rows moves just the named cells;
* shapes, dtypes and strides that do not fit are refused by name.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.checks import UnsupportedError
from flash_qsa.ops import store_rows
from flash_qsa.ops.fp8 import as_bytes, from_storage, to_storage
from flash_qsa.testing.inputs import scattered_view


def cells(cache: torch.Tensor) -> torch.Tensor:
    """Bytes of every cell [P · S, W], in slot order."""
    return as_bytes(cache).flatten(0, 1)[:, 0]


def checksums(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return to_storage(torch.arange(0.0, torch.Size(shape).numel()).view(shape) % 97, dtype)


@pytest.mark.parity("P47")
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_hand_worked(slot_dtype: torch.dtype) -> None:
    cache = torch.zeros(2, 3, 1, 2)
    slots = torch.tensor([4, -1, 0, 6, 5], dtype=slot_dtype)
    rows = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8], [9, 10]])
    store_rows(cache, slots, rows)
    want = [[5, 6], [0, 0], [0, 0], [0, 0], [1, 2], [9, 10]]
    assert cells(cache).tolist() == want
    again = torch.zeros(2, 3, 1, 2)
    store_rows(again, slots, rows[:, None])
    assert torch.equal(again, cache)
    store_rows(again, slots[:0], rows[:0])
    assert torch.equal(again, cache)


@pytest.mark.parity("P47")
@pytest.mark.bug("O-36")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_skipped_slots_touch_nothing(dtype: torch.dtype) -> None:
    cache = scattered_view(checksums(9, 16, 1, 8, dtype=dtype))
    before = cache.clone()
    slots = torch.full((128,), -1)
    slots[::2] = torch.randperm(142)[:64] + 1  # neither the first nor the last cell
    slots[1], slots[3], slots[5] = 9 * 16, 1 << 40, -(1 << 40)
    rows = torch.randn(128, 8)
    store_rows(cache, slots, rows)
    named = slots[::2]
    assert torch.equal(cells(cache)[named], as_bytes(to_storage(rows[::2], dtype)))
    others = torch.ones(144, dtype=torch.bool)
    others[named] = False
    assert torch.equal(cells(cache)[others], cells(before)[others])


@pytest.mark.bug("O-40")
@pytest.mark.parametrize("layout", ["plain", "scattered", "heads first"])
def test_a_plain_gather_reads_what_was_written(layout: str) -> None:
    blocks, pages, per_page, width = 40, 3, 16, 32
    cache = torch.full((pages, per_page, 1, width), torch.nan)
    if layout == "scattered":
        cache = scattered_view(cache)
    elif layout == "heads first":
        cache = torch.full((per_page, 1, pages, width), torch.nan).permute(2, 0, 1, 3)
    table = torch.randperm(pages)
    block = torch.arange(blocks)
    slots = table[block // per_page] * per_page + block % per_page
    rows = 1000.0 * block[:, None] + torch.arange(width)
    store_rows(cache, slots, rows)
    for b in range(blocks):
        cell = cache[int(table[b // per_page]), b % per_page, 0]
        assert cell.tolist() == [1000.0 * b + channel for channel in range(width)]


@pytest.mark.bug("O-34")
def test_moving_tokens_moves_the_named_cells() -> None:
    cache = checksums(4, 64, 1, 8)
    before = cells(cache).clone()
    source, target = [62, 63, 64, 65, 191], [7, 200, 128, 0, 63]
    store_rows(cache, torch.tensor(target), before[source])
    want = before.clone()
    want[target] = before[source]
    assert torch.equal(cells(cache), want)
    index = checksums(4, 16, 1, 8)
    before = cells(index).clone()
    store_rows(index, torch.tensor([3]), before[16:17])
    want = before.clone()
    want[3] = before[16]
    assert torch.equal(cells(index), want)


@pytest.mark.bug("O-42")
def test_rounding_and_bits() -> None:
    x = torch.randn(5, 8) * 300
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        cache = torch.zeros(1, 5, 1, 8).to(dtype)
        store_rows(cache, torch.arange(5), x)
        assert torch.equal(cells(cache), as_bytes(to_storage(x, dtype)))
    codes = torch.arange(256, dtype=torch.uint8).view(32, 8)
    cache = torch.zeros(32, 1, 1, 8, dtype=torch.uint8)
    store_rows(cache, torch.arange(32), codes)
    assert torch.equal(cells(cache), codes)
    wide = torch.zeros(32, 1, 1, 8)
    store_rows(wide, torch.arange(32), codes.view(torch.float8_e4m3fn))
    assert torch.equal(cells(wide).nan_to_num(9), from_storage(codes).nan_to_num(9))


@pytest.mark.parity("P47")
@pytest.mark.parametrize(
    ("cache", "slots", "rows", "error", "message"),
    [
        ((2, 4, 2, 8), (3,), (3, 8), ValueError, "cache: expected shape"),
        ((2, 4, 8), (3,), (3, 8), ValueError, "cache: expected shape"),
        ((2, 4, 1, 8), (3, 1), (3, 8), ValueError, "slots: expected shape"),
        ((2, 4, 1, 8), (3,), (4, 8), ValueError, "rows: expected shape"),
        ((2, 4, 1, 8), (3,), (3, 7), ValueError, "rows: expected shape"),
        ((2, 4, 1, 8), (3,), (3, 2, 8), ValueError, "rows: expected shape"),
    ],
)
def test_shapes_are_refused(cache, slots, rows, error, message) -> None:
    with pytest.raises(error, match=message):
        store_rows(torch.zeros(cache), torch.zeros(slots, dtype=torch.int64), torch.zeros(rows))


@pytest.mark.parity("P47")
def test_dtypes_and_strides_are_refused() -> None:
    cache, slots, rows = (
        torch.zeros(2, 4, 1, 8),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, 8),
    )
    for arguments, message in (
        ((cache.double(), slots, rows), "cache: dtype float64"),
        ((cache, slots.short(), rows), "slots: dtype int16"),
        ((cache, slots, rows.int()), "rows: dtype int32"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            store_rows(*arguments)
    with pytest.raises(ValueError, match="cache: the last axis must be contiguous"):
        store_rows(torch.zeros(2, 4, 1, 16)[..., ::2], slots, rows)
    with pytest.raises(ValueError, match="rows: the last axis must be contiguous"):
        store_rows(cache, slots, torch.zeros(3, 16)[:, ::2])
