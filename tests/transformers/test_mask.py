"""The compact mask says what transformers' dense masks say, and gives way where it cannot.

Claims:
- For causal, padded, holed and packed batches `to_dense` equals transformers' own mask.
- Layouts put each query at its rank among visible tokens and each block in a slot of its own.
- Masks with other rules (windows, prefixes, vmap, other models) come back dense.
- A static cache's counter is read once: advancing it later changes nothing.
- No tensor of the mask grows with queries times keys.
"""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from flash_qsa.integrations.transformers.layout import TokenLayout
from flash_qsa.integrations.transformers.mask import CompactMask, qsa_mask
from flash_qsa.testing.tiny_models import tiny_text_config

CONFIG = tiny_text_config()
RATIO = CONFIG.indexer_compress_ratio


def both(**arguments):
    ours = qsa_mask(config=CONFIG, allow_is_causal_skip=False, dtype=torch.float32, **arguments)
    theirs = sdpa_mask(allow_is_causal_skip=False, **arguments)
    assert isinstance(ours, CompactMask)
    return ours, theirs


def holes(batch, length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, length, generator=generator) < 0.6


PADDING = {
    "none": None,
    "all ones": torch.ones(3, 29, dtype=torch.bool),
    "left": torch.arange(29) >= torch.tensor([0, 7, 29])[:, None],
    "right": torch.arange(29) < torch.tensor([29, 11, 0])[:, None],
    "holes": holes(3, 29),
    "short": torch.ones(3, 20, dtype=torch.bool),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("queries", [29, 5, 1])
def test_dense_form_equals_transformers(padding, queries):
    ours, theirs = both(
        batch_size=3,
        q_length=queries,
        kv_length=29,
        q_offset=29 - queries,
        attention_mask=PADDING[padding],
    )
    assert torch.equal(ours.to_dense(), theirs)
    check_layout(ours.layout, theirs[:, 0])


@pytest.mark.parametrize("length", [1, 3, 4, 29])
def test_packed_sequences(length):
    generator = torch.Generator().manual_seed(length)
    ids = (torch.rand(3, length, generator=generator) < 0.2).long().cumsum(1)
    function = and_masks(causal_mask_function, packed_sequence_mask_function(ids))
    ours, theirs = both(batch_size=3, q_length=length, kv_length=length, mask_function=function)
    assert torch.equal(ours.to_dense(), theirs)
    check_layout(ours.layout, theirs[:, 0])


def check_layout(layout: TokenLayout, dense: torch.Tensor) -> None:
    """Against the definition: groups of C visible tokens, query by query."""
    batch, queries, cells = dense.shape
    for row in range(batch * queries):
        b = row // queries
        visible = dense[b, row % queries].nonzero().flatten().tolist()
        assert layout.request_ids[row] == b
        assert layout.positions[row] == len(visible) - 1
        base = int(layout.token_base[row])
        token = (lambda c: c) if layout.order is None else (lambda c: int(layout.order[b, c]))  # noqa: B023
        assert [token(base + rank) for rank in range(len(visible))] == visible
        first = 0 if layout.first_block is None else int(layout.first_block[row])
        complete = len(visible) // RATIO
        assert layout.visible_blocks[row] == first + complete
        for block in range(complete):
            slot = first + block
            start = slot * RATIO if layout.block_start is None else layout.block_start[b, slot]
            assert token(int(start)) == visible[block * RATIO]
    assert layout.page_table.flatten().tolist() == list(range(batch))


def test_offset_is_a_copy_of_the_caches_counter():
    counter = torch.tensor(12)
    mask = qsa_mask(batch_size=1, q_length=2, kv_length=64, q_offset=counter, config=CONFIG)
    counter.add_(100)
    assert mask.layout.positions.tolist() == [12, 13]
    assert mask.query_index.tolist() == [12, 13]


def _prefix(batch_idx, head_idx, q_idx, kv_idx):
    return (kv_idx <= q_idx) | (kv_idx < 5)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"mask_function": _prefix}, id="bidirectional prefix"),
        pytest.param({"use_vmap": True}, id="vmap"),
        pytest.param({"kv_offset": 3}, id="offset keys"),
        pytest.param({"config": None}, id="another model"),
        pytest.param(
            {"config": None, "mask_function": sliding_window_causal_mask_function(4)}, id="window"
        ),
    ],
)
def test_rules_that_do_not_fit_stay_dense(arguments):
    mask = qsa_mask(batch_size=2, q_length=9, kv_length=9, **{"config": CONFIG, **arguments})
    assert isinstance(mask, torch.Tensor) and mask.shape == (2, 1, 9, 9)


def test_moves_between_devices_and_pretends_to_be_contiguous():
    mask = qsa_mask(
        batch_size=2, q_length=9, kv_length=9, attention_mask=holes(2, 9), config=CONFIG
    )
    assert mask.contiguous() is mask
    moved = mask.to("meta", non_blocking=True)
    assert moved.valid.is_meta and moved.layout.order.is_meta and moved.layout.positions.is_meta


@pytest.mark.bug("O-54")
@pytest.mark.parametrize("padding", [None, "left", "holes"])
def test_size_is_linear(padding):
    """2,048 queries against 131,072 keys: a matrix would have 2^28 elements."""
    cells = 131_072
    valid = {"left": torch.arange(cells)[None] >= 77, "holes": holes(1, cells)}.get(padding)
    mask = qsa_mask(
        batch_size=1,
        q_length=2048,
        kv_length=cells,
        q_offset=cells - 2048,
        attention_mask=valid,
        config=CONFIG,
    )
    tensors = [*vars(mask).values(), *vars(mask.layout).values()]
    assert max(t.numel() for t in tensors if isinstance(t, torch.Tensor)) <= cells
