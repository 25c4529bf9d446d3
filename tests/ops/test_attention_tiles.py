"""The choice of attention schedules: a pure function that always answers with what fits.

* Shared memory stays 2 KiB below any device's limit, whatever the number of rows.
* There is never a split without ids, and never none; deterministic splits ignore the batch.
* Decode rows, draft windows and prefill rows get the schedule made for them.
"""

from __future__ import annotations

import dataclasses

import pytest

from flash_qsa.ops.sparse_attention.tiles import (
    Segment,
    cell_width,
    choose_rows,
    even_splits,
    row_shared_bytes,
    segments,
)
from flash_qsa.ops.sparse_attention.tiles_union import choose_hopper, choose_union, offset_unit
from flash_qsa.targets import TARGETS


def rows_tiles(rows, *, dim=256, num_ids=512, ratio=4, kv=2, compute=2, target, fixed=False):
    segment = Segment(0, rows, 1)
    return choose_rows(segment, 2, dim, num_ids, ratio, kv, compute, target, fixed)


@pytest.mark.bug("O-44")
@pytest.mark.parity("P44")
@pytest.mark.parametrize("limit", [48, 64, 96, 99, 163, 227])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 65, 4096])
def test_shared_memory_fits_every_limit(limit, rows):
    target = dataclasses.replace(TARGETS["sm_90"], shared_memory=limit << 10)
    for dim in (16, 64, 96, 128, 256):
        # No supported device has less than 64 KiB; FP32 needs more than 48.
        for kv, compute in ((2, 2), (1, 2), (4, 4), (1, 4)) if limit >= 64 else ((2, 2), (1, 2)):
            tiles = rows_tiles(rows, dim=dim, kv=kv, compute=compute, target=target)
            need = row_shared_bytes(dim, tiles.block_n, tiles.num_stages, kv, compute, target)
            assert need + 2048 <= limit << 10, (dim, kv, compute, tiles)


@pytest.mark.parity("P44")
@pytest.mark.parametrize("num_ids", [0, 1, 3, 64, 511, 512, 4096])
@pytest.mark.parametrize("rows", [1, 8, 31, 128, 8192])
@pytest.mark.parametrize("fixed", [False, True])
def test_splits_cover_the_ids_exactly(num_ids, rows, fixed):
    for name in ("sm_75", "sm_90", "gfx942"):
        for ratio in (1, 3, 4, 16):
            tiles = rows_tiles(
                rows, num_ids=num_ids, ratio=ratio, target=TARGETS[name], fixed=fixed
            )
            assert tiles.splits >= 1 and tiles.ids_per_split >= 1
            assert tiles.splits * tiles.ids_per_split >= num_ids
            assert (tiles.splits - 1) * tiles.ids_per_split < max(num_ids, 1)


def test_deterministic_splits_ignore_the_batch_and_others_fill_the_device():
    target = TARGETS["sm_90"]
    fixed = {rows_tiles(rows, target=target, fixed=True) for rows in (1, 7, 300)}
    assert len(fixed) == 1
    assert rows_tiles(1, target=target).splits > rows_tiles(32, target=target).splits > 1
    assert rows_tiles(8192, target=target).splits == 1


def test_no_processor_has_much_more_than_its_share():
    measured = {48: 4, 64: 2, 96: 2, 128: 1, 256: 1}
    assert {programs: even_splits(programs, 132, 32) for programs in measured} == measured
    for processors in (16, 80, 132):
        for programs in range(processors // 4 + 1, 5 * processors):
            splits = even_splits(programs, processors, 64)
            largest = -(-programs * splits // processors)
            assert largest * processors <= 1.4 * programs * splits < 1.4 * 6 * processors
    assert even_splits(40, 132, 2) == 2 and even_splits(40, 132, 0) == 1


@pytest.mark.parity("P39")
def test_segments_follow_the_plan_and_cover_all_rows():
    assert segments(8, 8, 8, 1, 1) == [Segment(0, 8, 1)]
    assert segments(9, 8, 8, 1, 1) == [Segment(0, 9, 1)]
    assert segments(32, 8, 32, 4, 4) == [Segment(0, 32, 4)]
    assert segments(108, 9, 8, 1, 100) == [Segment(0, 8, 1), Segment(8, 108, 0)]
    assert segments(100, 1, 0, 0, 100) == [Segment(0, 100, 0)]
    assert segments(5, 8, -1, 0, 0) == [Segment(0, 5, 1)]
    assert segments(32, 8, -1, 0, 0) == [Segment(0, 32, 4)]
    assert segments(100, 3, -1, 0, 0) == [Segment(0, 100, 0)]


def union(segment, *, group=12, dim=256, ids=512, ratio=4, compute=2, target="sm_90"):
    return choose_union(segment, group, 2, dim, ids, ratio, compute, True, TARGETS[target])


def test_unions_share_rows_where_that_can_pay():
    assert union(Segment(0, 8, 1)) is None
    assert union(Segment(0, 32, 4)) is None and union(Segment(0, 128, 4)).rows == 4
    assert union(Segment(0, 8192, 0)).rows == 5
    assert union(Segment(0, 8192, 0), group=6).rows <= 16
    too_many = {"ids": 1 << 17}
    for refused in ({"ratio": 3}, {"dim": 96}, {"compute": 4}, {"target": "sm_75"}, too_many):
        assert union(Segment(0, 8192, 0), **refused) is None


@pytest.mark.parametrize("group", range(1, 17))
def test_a_union_tile_holds_its_rows_and_its_mask(group):
    for segment in (Segment(0, 8192, 0), Segment(0, 100, 0), Segment(0, 128, 4)):
        tiles = union(segment, group=group)
        if tiles is not None:
            assert tiles.rows * group <= tiles.block_m and 2 <= tiles.rows <= 16
            assert tiles.splits >= 1 and tiles.capacity >= 512 + tiles.rows


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("ratio", [1, 2, 4, 16])
def test_a_hopper_tile_holds_its_rows_and_never_crosses_windows(group, ratio):
    for window, count in ((0, 8192), (0, 300), (4, 128), (6, 192), (5, 160)):
        segment = Segment(0, count, window)
        tiles = choose_hopper(segment, group, 2, 256, 512, ratio, TARGETS["sm_90"])
        if ratio == 1 or window == 5:
            assert tiles is None
        elif tiles is not None:
            assert tiles.rows == 2 * tiles.half <= 16 and tiles.half * group <= 64
            assert window in (0, tiles.rows) and tiles.splits >= 1
            # every row's own blocks, open groups, and an incomplete step of each section
            assert tiles.capacity >= tiles.rows * (512 + 1) + 3 * (64 // ratio)
    assert choose_hopper(Segment(0, 40, 0), group, 2, 256, 512, 4, TARGETS["sm_90"]) is None


def test_fp8_prefills_whose_rows_share_little_are_left_to_the_per_row_schedule():
    def capacity(window, kv_bytes):
        segment = Segment(0, 8192, window)
        return choose_hopper(segment, 12, 2, 256, 512, 4, TARGETS["sm_90"], kv_bytes).capacity

    assert capacity(0, 2) >= 10 * 512 > capacity(0, 1) >= 5 * 512
    assert capacity(4, 1) == capacity(4, 2) >= 4 * 512


def test_offsets_count_the_largest_power_of_two_in_the_strides():
    assert offset_unit((65536, 32768, 512, 1)) == 512
    assert offset_unit((65536 + 64, 1, 512, 1)) == 64
    assert offset_unit((3 * 7, 1, 5, 1)) == 1
    assert offset_unit((1 << 20, 1, 1 << 12, 1)) == 512


def test_cells_are_powers_of_two_that_divide_a_block():
    assert [cell_width(ratio, False) for ratio in (1, 2, 3, 4, 6, 8, 12, 64)] == [
        1, 2, 1, 4, 2, 8, 4, 8,
    ]  # fmt: skip
    assert cell_width(4, True) == 1
