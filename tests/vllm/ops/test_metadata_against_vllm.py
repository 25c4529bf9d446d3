"""Claims: for mixed batches, draft windows, padded rows and padded requests, our builders give
vLLM's own numbers: requests, positions, visible blocks and slots of both side caches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness import Side, StockAttention, engine_config, text_config

from flash_qsa.integrations.vllm.metadata import SideMetadata
from flash_qsa.integrations.vllm.owner import QSAAttention
from flash_qsa.testing.inputs import Shape

STEPS = {
    "prefill": (0, ([2], [37], [37], {})),
    "mixed": (0, ([0, 3, 1, 2], [1, 1, 21, 6], [5, 96, 40, 60], {})),
    "decode": (0, ([0, 1, 2], [1, 1, 1], [48, 49, 4], {})),
    "padded decode": (0, ([1, 2], [1, 1], [48, 9], {"padded_rows": 2, "padded_requests": 2})),
    "drafts": (3, ([0, 1], [4, 4], [51, 8], {})),
    "drafts, padded": (3, ([0, 1], [4, 4], [51, 7], {"padded_rows": 4, "padded_requests": 1})),
    "drafts and prefill": (3, ([0, 1, 2], [4, 4, 17], [51, 7, 17], {})),
    "trailing padding": (0, ([0, 1], [9, 3], [9, 50], {"padded_rows": 4})),
}


@pytest.mark.parity("P10", "P19", "P20", "P40", "P45")
@pytest.mark.parametrize("name", STEPS)
def test_metadata_is_identical(name):
    drafts, (which, query_lens, seq_lens, padding) = STEPS[name]
    shape = Shape(
        heads=4, kv_heads=2, head_dim=128, index_heads=2, index_dim=128, page_size=48,
        ring_capacity=8 if drafts else 4,
    )  # fmt: skip
    sides = [
        Side(kind, engine_config(text_config(), drafts=drafts), shape, 4, 96)
        for kind in (StockAttention, QSAAttention)
    ]
    stock, ours = (side.metadata(which, query_lens, seq_lens, **padding) for side in sides)
    for cache in (sides[0].ring_name, sides[0].key_name):
        is_ring = cache == sides[0].ring_name
        theirs = SideMetadata.from_stock(stock[cache], is_ring)
        for field in dataclasses.fields(SideMetadata):
            one, other = getattr(ours[cache], field.name), getattr(theirs, field.name)
            if is_ring and field.name == "visible_blocks":
                continue  # of ratio 1 there, and read by neither side
            equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            assert equal, (cache, field.name, one, other)
