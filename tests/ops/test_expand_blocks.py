"""expand_blocks.

Claims:
* a row holds its complete blocks' tokens in the order given, then the open group's first C - 1
  tokens up to its position, then -1, then the count of tokens;
* holes and ids that are not visible are closed up, never copied;
* rows before the first token, and padding, hold -1 and count 0;
* the answer is that of a list built token by token;
* shapes and dtypes that do not fit are refused by name.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.checks import UnsupportedError
from flash_qsa.ops import expand_blocks


def by_hand(ids: list[int], position: int, visible: int, ratio: int) -> list[int]:
    """The packed row, token by token."""
    tokens = []
    if position >= 0:
        for block in ids:
            if 0 <= block < visible:
                tokens += range(block * ratio, (block + 1) * ratio)
        tail = range(visible * ratio, visible * ratio + ratio - 1)
        tokens += [token for token in tail if token <= position and visible >= 0]
    width = len(ids) * ratio + ratio - 1
    return tokens + [-1] * (width - len(tokens)) + [len(tokens)]


def expand(ids: list[list[int]], positions: list[int], ratio: int = 4) -> list[list[int]]:
    at = torch.tensor(positions)
    visible = torch.div(at + 1, ratio, rounding_mode="floor").int()
    return expand_blocks(torch.tensor(ids, dtype=torch.int32), at, visible, ratio).tolist()


@pytest.mark.parity("P08", "P21")
@pytest.mark.bug("O-09")
def test_hand_worked() -> None:
    # ten tokens: blocks 1 and 0, and tokens 8, 9 of the open group
    (row,) = expand([[1, 0, -1, -1]], [9])
    assert row == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9] + [-1] * 9 + [10]
    (row,) = expand([[-1] * 4], [2])
    assert row == [0, 1, 2] + [-1] * 16 + [3]
    (row,) = expand([[0, 1, 2, 3]], [15])
    assert row == [*range(16), -1, -1, -1, 16]
    (row,) = expand([[3, -1, 0, -1]], [18])
    assert row == [12, 13, 14, 15, 0, 1, 2, 3, 16, 17, 18] + [-1] * 8 + [11]


@pytest.mark.parity("P10", "P21")
def test_padding_and_ids_out_of_sight_contribute_nothing() -> None:
    rows = expand([[0, 1, 2, 3], [5, -7, 1, 1 << 30]], [-1, 8])
    assert rows[0] == [-1] * 19 + [0]
    assert rows[1] == [4, 5, 6, 7, 8] + [-1] * 14 + [5]


@pytest.mark.bug("O-06", "O-27")
def test_visible_blocks_and_tails_of_the_first_tokens() -> None:
    rows = expand([[0, 1, 2, -1]] * 12, list(range(12)))
    assert [row[-1] for row in rows] == list(range(1, 13))
    for position, row in enumerate(rows):
        assert row[: position + 1] == list(range(position + 1))  # everything, nothing later
    assert {len(row) for row in rows} == {20}


@pytest.mark.parity("P21")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_a_list_built_token_by_token(data: st.DataObject) -> None:
    ratio = data.draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    top_k = data.draw(st.integers(1, 9))
    rows = data.draw(st.integers(1, 4))
    ids = [
        data.draw(st.lists(st.integers(-3, 12), min_size=top_k, max_size=top_k))
        for _ in range(rows)
    ]
    positions = [data.draw(st.integers(-2, 60)) for _ in range(rows)]
    visible = [(position + 1) // ratio for position in positions]
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    out = torch.full((rows, top_k * ratio + ratio), 0x7FFFFFFF, dtype=torch.int32)
    got = expand_blocks(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(positions, dtype=dtype),
        torch.tensor(visible, dtype=torch.int32),
        ratio,
        out=out,
    )
    assert got is out
    want = [by_hand(*row, ratio) for row in zip(ids, positions, visible)]
    assert got.tolist() == want


def test_a_reused_selection_expands_with_its_own_tail() -> None:
    # drafted rows 42 … 44 reuse the blocks of row 41, whose open group began at 40
    frozen = torch.tensor([[0, 3, 9]] * 3, dtype=torch.int32)
    visible = torch.full((3,), 10, dtype=torch.int32)
    got = expand_blocks(frozen, torch.tensor([42, 43, 44]), visible, 4)
    assert got[0, 12:15].tolist() == [40, 41, 42]


@pytest.mark.parity("P21")
def test_refusals() -> None:
    ids, at = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    visible = torch.zeros(2, dtype=torch.int32)
    for arguments, error, message in (
        ((ids[0], at, visible, 4), ValueError, "block_ids: expected shape"),
        ((ids, at[:1], visible, 4), ValueError, "positions: expected shape"),
        ((ids, at, visible[:1], 4), ValueError, "visible_blocks: expected shape"),
        ((ids.long(), at, visible, 4), UnsupportedError, "block_ids: dtype int64"),
        ((ids, at, visible.long(), 4), UnsupportedError, "visible_blocks: dtype int64"),
        ((ids, at, visible, 0), ValueError, "compress_ratio: expected a positive integer"),
    ):
        with pytest.raises(error, match=message):
            expand_blocks(*arguments)
    with pytest.raises(ValueError, match="out: expected shape"):
        expand_blocks(ids, at, visible, 4, out=torch.zeros(2, 19, dtype=torch.int32))
