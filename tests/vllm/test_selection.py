"""The selection buffer.

Claims: a row is K ids and, in its last column, a count that is never an id; rows start at aligned
addresses; cleared rows select nothing; expanding gives vLLM's token lists, those of reused rows by
their own count; another shape or dtype is refused.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.integrations.vllm import selection


@pytest.mark.parity("P08", "P33")
@pytest.mark.parametrize(("top_k", "width"), [(1, 16), (15, 16), (16, 32), (512, 528), (700, 704)])
def test_rows_hold_the_ids_and_the_count_at_aligned_addresses(top_k, width):
    assert selection.row_width(top_k) == width
    rows = torch.arange(2 * width, dtype=torch.int32).view(2, width)
    assert selection.blocks(rows, top_k).tolist()[1] == list(range(width, width + top_k))
    assert selection.visible(rows).tolist() == [width - 1, 2 * width - 1]
    assert selection.blocks(rows, top_k).data_ptr() == rows.data_ptr()


@pytest.mark.parity("P09")
def test_cleared_rows_select_nothing():
    rows = torch.full((3, 16), 99, dtype=torch.int32)
    selection.clear(rows)
    assert (rows[:, :-1] == -1).all() and (rows[:, -1] == 0).all()
    tokens = selection.expand(rows, torch.tensor([-1, -1, -1]), 4, 5)
    assert (tokens[:, :-1] == -1).all() and (tokens[:, -1] == 0).all()


@pytest.mark.parity("P08", "P21")
def test_expanding_gives_blocks_then_the_open_group_then_the_count():
    rows = torch.full((3, 16), -1, dtype=torch.int32)
    rows[0, :2], rows[0, -1] = torch.tensor([0, 3]), 4
    rows[1, -1] = 0
    rows[2, :3], rows[2, -1] = torch.tensor([1, 2, 5]), 6
    tokens = selection.expand(rows, torch.tensor([17, 1, 23]), 4, 3)
    assert tokens.shape == (3, 3 * 4 + 4)
    assert tokens[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17] + [-1] * 5 + [10]
    assert tokens[1].tolist() == [0, 1] + [-1] * 13 + [2]
    assert tokens[2].tolist() == [*range(4, 12), *range(20, 24)] + [-1] * 3 + [12]


@pytest.mark.parity("P18")
@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(4, 16, dtype=torch.int32),
        torch.zeros(3, 17, dtype=torch.int32),
        torch.zeros(3, 16, dtype=torch.int64),
    ],
    ids=["rows", "width", "dtype"],
)
def test_another_buffer_is_refused(rows):
    with pytest.raises(ValueError, match=r"selection rows: expected int32 \[3, 16\]"):
        selection.require_rows(rows, 3, 5)
