"""Lists of the row-union schedules: every cell that a tile's rows attend, once, with their masks.

Claims, against a list made token by token: cells and masks are right with and without sections; a
section holds what only its half attends; cells that pad a step outside the masked ones are whole
selected blocks, never an open group, whose tokens may not have been written; open groups stay
within the steps that are loaded under masks; units of any size name the same places.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.ops.sparse_attention.kernel_build import build_kernel

PAGE, RATIO, PAD = 16, 4, 4
PAGES = torch.tensor([[7, 2, 5, 0, 6, 1, 3, 4]], dtype=torch.int32)


def build(ids: torch.Tensor, positions: list[int], half: int, capacity: int = 200, unit=(PAGE, 1)):
    """One tile's list: cells [n], masks [n, C], steps of the leading sections, whether shared."""
    rows, num_ids = ids.shape
    words = 4
    cells = torch.full((capacity,), -7, dtype=torch.int32)
    masks = torch.full((capacity, RATIO), -7, dtype=torch.int16)
    counts, shared = torch.zeros(2, 1, dtype=torch.int32).unbind(0)
    sections = torch.zeros(1, 2, dtype=torch.int32)
    bitmap = torch.full((2 if half else 1, words), -7, dtype=torch.int32)
    build_kernel[(1,)](
        ids,
        torch.tensor(positions),
        torch.zeros(rows, dtype=torch.int32),
        ids,
        PAGES,
        bitmap,
        torch.full((1, words), -7),
        cells,
        masks,
        counts,
        shared,
        sections,
        ids.stride(0),
        PAGES.stride(0),
        0,
        rows,
        num_ids,
        *PAGES.shape,
        PAGES.shape[1],
        1,
        words,
        capacity,
        *unit,
        PAGE,
        RATIO=RATIO,
        PAGE=PAGE if half else 0,
        ROWS=rows,
        BLOCK_R=8,
        BLOCK_K=8,
        BLOCK_W=4,
        PAD=PAD,
        HALF=half,
        HAS_BASE=False,
        PDL=False,
    )
    count = int(counts)
    assert count % PAD == 0 and (cells[count:] == -7).all()
    return cells[:count], masks[:count], sections[0].tolist(), bool(shared)


def place(token: int, unit=(PAGE, 1)) -> int:
    return int(PAGES[0, token // PAGE]) * unit[0] + token % PAGE * unit[1]


def expected(ids: torch.Tensor, positions: list[int]) -> dict[int, list[int]]:
    """Cell → mask of each token."""
    found: dict[int, list[int]] = {}
    for row, position in enumerate(positions):
        tail = (position + 1) // RATIO
        tokens = [b * RATIO + t for b in ids[row].tolist() if 0 <= b < tail for t in range(RATIO)]
        for token in tokens + list(range(tail * RATIO, position + 1)):
            cell = place(token // RATIO * RATIO)
            found.setdefault(cell, [0] * RATIO)[token % RATIO] |= 1 << row
    return found


IDS = torch.tensor(
    [
        [0, 3, 4, 9, 12, 17, 20, -1],
        [0, 3, 5, 9, 13, 17, 21, 22],
        [1, 3, 4, 9, 14, 17, 23, 25],
        [1, 2, 4, 10, 15, 17, 24, 26],
    ],
    dtype=torch.int32,
)
TAILS = {
    "one open group": [108, 109, 110, 111],
    "two open groups": [109, 110, 111, 112],
    "none": [107, 107, 107, 107],
    "scattered": [105, 109, 113, 117],
}


@pytest.mark.parametrize("half", [0, 2])
@pytest.mark.parametrize("tails", TAILS)
def test_a_list_holds_every_attended_token_once_and_pads_with_whole_blocks(half, tails):
    positions = TAILS[tails]
    cells, masks, sections, shared = build(IDS, positions, half)
    assert shared
    want = expected(IDS, positions)
    # a block that is one row's open group and another row's choice has two cells
    found: dict[int, list[int]] = {}
    for cell, mask in zip(cells.tolist(), masks.tolist()):
        if any(mask):
            before = found.setdefault(cell, [0] * RATIO)
            assert not any(a & b for a, b in zip(before, mask))
            found[cell] = [a | b for a, b in zip(before, mask)]
    assert found == want
    whole = {place(int(b) * RATIO) for b in IDS.flatten() if b >= 0}
    steps = len(cells) // PAD
    masked = range(max(steps - 2, 0), steps) if half else range(1)
    for at, cell in enumerate(cells.tolist()):
        if at // PAD not in masked:
            assert cell in whole
    if half:
        first, second = sections
        paired = 2 * min(first, second)
        for at in range((first + second) * PAD):
            step = at // PAD
            which = step % 2 if step < paired else int(second > first)
            assert not masks[at].int().bitwise_and(0b1100 if which == 0 else 0b0011).any()


def test_pads_are_whole_blocks_wherever_the_open_group_lies():
    """The open group's page is the last one, so its cell is the largest of all."""
    table = PAGES.clone()
    try:
        for last in range(8):
            order = [page for page in range(8) if page != last]
            PAGES[0] = torch.tensor([*order[:6], last, order[6]], dtype=torch.int32)
            test_a_list_holds_every_attended_token_once_and_pads_with_whole_blocks(
                2, "one open group"
            )
    finally:
        PAGES.copy_(table)


def test_more_open_groups_than_a_step_holds_are_left_to_the_per_row_schedule():
    ids = IDS[[0, 1, 2, 3, 0, 1]].contiguous()
    positions = [100, 104, 108, 112, 116, 120]
    for half in (0, 3):
        assert not build(ids, positions, half)[-1]
    assert build(ids, [100, 101, 102, 103, 104, 105], 3)[-1]


@pytest.mark.parametrize("half", [0, 2])
def test_a_list_that_does_not_fit_is_left_to_the_per_row_schedule(half):
    cells, *_, shared = build(IDS, TAILS["none"], half, capacity=12)
    assert not shared and not len(cells)


def test_units_name_the_same_places():
    unit = (1 << 20, 3)
    plain, masks, *_ = build(IDS, TAILS["two open groups"], 2)
    units, unit_masks, *_ = build(IDS, TAILS["two open groups"], 2, unit=unit)
    assert torch.equal(masks, unit_masks)
    assert units.tolist() == [c // PAGE * unit[0] + c % PAGE * unit[1] for c in plain.tolist()]
