"""Draft windows: verify several rows, keep some, and lose nothing that the rest needs.

Claims: blocks that close inside a verify step are seen by its later rows; whatever number of
drafts is rejected, the continuation equals a from-scratch run, keys, ring rows and outputs; a
frozen selection attends everything behind it up to each draft row, once; layers select apart.
"""

from __future__ import annotations

import pytest
import torch
from paged_model import PagedModel

from flash_qsa.ops import sparse_attention


@pytest.mark.bug("O-17")
@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("accepted", range(8))
def test_a_window_of_seven_is_right_inside_and_after(accepted: int, mrope: bool) -> None:
    """Prefix 10, rows 10 … 16: rows from 11 need block 2, from 15 block 3; then 8 other tokens."""
    model = PagedModel(draft_tokens=6, budget=8, mrope=mrope, num_layers=2)
    model.admit("a")
    model.forward({"a": model.draw_tokens(10)})
    model.poison()
    model.forward({"a": model.draw_tokens(7, 10)}, num_decodes=1)
    model.check_state("a")
    model.truncate("a", 10 + accepted)
    model.poison()
    model.forward({"a": model.draw_tokens(8, 10 + accepted)})
    model.check_state("a")
    assert model.cache.export("a").tensors["layers.0.compressed"].shape[0] == (18 + accepted) // 4


@pytest.mark.bug("O-18")
@pytest.mark.parametrize("start", range(8))
def test_eight_drafts_a_round_leave_no_stale_ring_row(start: int) -> None:
    model = PagedModel(draft_tokens=8, budget=12)
    model.admit("a")
    if start:
        model.forward({"a": model.draw_tokens(start)})
    length = start
    for accepted in (1, 0, 8, 3, 0, 5, 2, 7):
        model.poison()
        model.forward({"a": model.draw_tokens(9, length)}, num_decodes=1)
        length += accepted
        model.truncate("a", length)
        model.check_state("a")
    assert length == start + 26


@pytest.mark.bug("O-17", "O-18")
def test_drafts_of_several_requests_reject_apart() -> None:
    model = PagedModel(draft_tokens=3, budget=8, num_layers=2)
    lengths = {"a": 9, "b": 14, "c": 3}
    for request, length in lengths.items():
        model.admit(request)
        model.forward({request: model.draw_tokens(length)})
    for accepted in ((4, 0, 2), (1, 3, 0), (0, 1, 4), (2, 2, 2)):
        drafts = {request: model.draw_tokens(4, lengths[request]) for request in lengths}
        model.forward(drafts, num_decodes=3, padding=4)
        for request, kept in zip(lengths, accepted):
            lengths[request] += kept
            model.truncate(request, lengths[request])
            model.check_state(request)
        model.poison()


@pytest.mark.bug("O-19")
def test_a_frozen_selection_attends_all_tokens_since_it_was_made() -> None:
    """Captured at 41 (10 blocks, tail 40, 41); rows 42 … 44 attend the blocks and 40 … p, once.

    Keys are zero, so weights are uniform; values carry the token id, and NaN beyond p = 44.
    """
    cache = torch.zeros(7, 1, 8, 4)
    cache[..., 2:] = torch.nan
    pages = [3, 0, 6, 2, 5, 1]
    for token in range(45):
        cache[pages[token // 8], 0, token % 8, 2:] = torch.tensor([float(token), 1.0])
    frozen = [1, 4, 9]
    rows = torch.tensor([42, 43, 44])
    out = sparse_attention(
        torch.zeros(3, 1, 2),
        cache,
        torch.tensor([[*frozen, -1]] * 3, dtype=torch.int32),
        rows,
        torch.tensor([pages], dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        compress_ratio=4,
        tail_start=torch.tensor([40, 40, 40]),
    )
    for row, position in enumerate(rows.tolist()):
        tokens = [4 * block + i for block in frozen for i in range(4)]
        tokens += range(40, position + 1)
        expected = sum(tokens) / len(tokens)
        assert abs(float(out[row, 0, 0]) - expected) < 1e-4, position
        assert abs(float(out[row, 0, 1]) - 1) < 1e-6


@pytest.mark.bug("O-19")
def test_layers_select_by_their_own_index_weights() -> None:
    """Other index keys in layer 1 change layer 1's rows, and layer 0's not by one bit."""
    one, other = (PagedModel(num_layers=2, budget=8) for _ in range(2))
    other.index_qk[1] = other.index_qk[1].flip(0)
    outputs = []
    for model in (one, other):
        model.admit("a")
        outputs.append(model.forward({"a": model.draw_tokens(40)}))
    assert torch.equal(outputs[0][0], outputs[1][0])
    changed = (outputs[0][1] != outputs[1][1]).any(-1).any(-1)
    assert not changed[:11].any() and changed[12:].any()
