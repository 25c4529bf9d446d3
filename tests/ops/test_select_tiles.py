"""select_blocks' choice of schedule: pure functions that answer for every shape and target.

Claims: every row belongs to one phase; tiles are powers of two that fit the target; lists have room
for what the selection may put there.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flash_qsa.ops.select_blocks import tiles
from flash_qsa.targets import TARGETS

WIDTHS = (1, 64, 513, 2048, 8192, 9001, 32768, 262144, 1 << 20)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("top_k", (1, 64, 512, 1000, 4096))
@pytest.mark.bug("O-44")
def test_selection_tiles_hold_what_they_list(target, top_k):
    for width in WIDTHS:
        for rows in (1, 128, 8192):
            for max_group in (tiles.MAX_GROUP, tiles.DENSE_MAX_GROUP):
                if width > max_group * tiles.MAX_UNITS:
                    continue
                chosen = tiles.choose_select(rows, width, top_k, target, max_group)
                if chosen.group == 0:
                    assert width <= top_k
                    continue
                assert is_power_of_two(chosen.units) and chosen.units <= tiles.MAX_UNITS
                assert chosen.units * chosen.group >= width
                if chosen.group > 1:
                    assert chosen.survivors >= top_k + chosen.slack
                    assert is_power_of_two(chosen.survivors) and is_power_of_two(chosen.chunk)
                    groups = top_k + chosen.slack
                    assert chosen.scratch(top_k) >= chosen.survivors + groups


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parity("P44")
@pytest.mark.bug("O-44")
def test_scorer_tiles_fit_and_never_split_more_than_there_are_keys(target):
    for itemsize in (2, 4):
        for heads, dim in ((4, 128), (1, 64), (16, 128), (3, 96), (4, 256)):
            for width in WIDTHS:
                for rows in (1, 15, 4096):
                    decode = tiles.Phase(0, rows, True, 1)
                    score = tiles.choose_score(decode, width, heads, dim, itemsize, target)
                    assert 1 <= score.splits <= -(-width // tiles.BLOCK_N)
                    assert score.rows <= score.rows_pad and is_power_of_two(score.rows_pad)
                    prefill = tiles.Phase(0, rows, False, rows)
                    dense = tiles.choose_dense(prefill, width, heads, dim, itemsize, target)
                    if dense is None:
                        continue
                    columns = dense.rows * dense.heads_pad
                    held = (columns + 3 * tiles.BLOCK_N) * dense.dim_pad * itemsize
                    assert held + (2 << 10) <= target.shared_memory
                    assert dense.splits(width) * dense.pairs * 2 * tiles.BLOCK_N >= width


def test_phases_cover_every_row_once():
    plan = SimpleNamespace(num_decodes=3, num_decode_tokens=12, decode_query_len=4)
    assert [(p.begin, p.end, p.decode, p.query_len) for p in tiles.phases(500, 5, plan)] == [
        (0, 12, True, 4),
        (12, 500, False, 244),
    ]
    for rows in (1, 7, 64, 4096):
        for requests in (1, 3, 128):
            found = tiles.phases(rows, requests, None)
            assert found[0].begin == 0 and found[-1].end == rows
            assert all(a.end == b.begin for a, b in zip(found, found[1:]))
            assert all(p.query_len >= 1 for p in found)


@pytest.mark.parametrize("target", ("sm_80", "sm_86", "sm_90", "sm_120"))
@pytest.mark.parametrize("top_k", (1, 64, 512, 1000, 2048, 4096))
@pytest.mark.bug("O-44")
def test_selection_blocks_in_cuda_hold_their_rows_and_fit(target, top_k):
    for width in WIDTHS:
        for rows in (1, 128, 8192):
            for max_group in (tiles.MAX_GROUP, tiles.DENSE_MAX_GROUP):
                if width > max_group * tiles.MAX_UNITS:
                    continue
                chosen = tiles.choose_cuda_select(rows, width, top_k, TARGETS[target], max_group)
                if chosen is None:
                    assert width <= top_k or top_k == 4096
                    continue
                assert chosen.group <= max_group and tiles.BLOCK_N % chosen.group == 0
                assert chosen.units * chosen.group >= width
                assert chosen.units % (4 * chosen.threads) == 0
                assert chosen.units <= 32 * chosen.threads and 64 <= chosen.threads <= 1024
                assert chosen.threads & (chosen.threads - 1) == 0
                assert chosen.shared_bytes(top_k) + (2 << 10) <= TARGETS[target].shared_memory


def test_few_rows_let_the_next_kernel_start_early_and_fewer_over_fp8_keys():
    target = TARGETS["sm_90"]
    assert [tiles.admits_next(rows, False, target) for rows in (1, 16, 17, 8192)] == [1, 1, 0, 0]
    assert [tiles.admits_next(rows, True, target) for rows in (1, 2, 3, 16)] == [1, 1, 0, 0]
