"""Budgets, ratios, dtypes and rotary forms other than Qwen's, from tokens to outputs.

Claims: nothing is wired to 2,048 tokens or ratio 4; a budget that is not a multiple of the ratio
rounds down to whole blocks; ratio 1 works token by token; 16-bit activations keep their bound;
chunks, decodes and drafts agree with the oracle in each.
"""

from __future__ import annotations

import pytest
import torch
from paged_model import PagedModel


@pytest.mark.bug("O-51")
@pytest.mark.parity("P02")
@pytest.mark.parametrize(
    ("budget", "ratio", "length"),
    [
        (2048, 4, 2100),
        (8192, 4, 8300),
        (4096, 2, 4200),
        (1000, 4, 1100),
        (16, 4, 90),
        (2050, 4, 2100),
    ],
)
def test_budgets_and_ratios_equal_the_oracle_past_the_budget(
    budget: int, ratio: int, length: int
) -> None:
    sizes = {"page_size": 64, "num_pages": length // 64 + 4, "max_positions": 16_384}
    model = PagedModel(budget=budget, ratio=ratio, draft_tokens=3, **sizes)
    assert model.config.top_k == budget // ratio
    assert model.config.selection_width == budget + ratio - 1
    assert length // ratio > model.config.top_k
    model.fill("a", model.draw_tokens(length))
    model.forward({"a": model.draw_tokens(1)}, num_decodes=1)
    model.forward({"a": model.draw_tokens(4)}, num_decodes=1)
    model.truncate("a", length + 3)
    model.forward({"a": model.draw_tokens(6)}, num_decodes=0)
    model.check_state("a")


@pytest.mark.bug("O-51")
@pytest.mark.parametrize(("ratio", "budget"), [(1, 5), (2, 7), (3, 10), (8, 16)])
@pytest.mark.parametrize("mrope", [False, True])
def test_every_ratio_chunks_drafts_and_forks(ratio: int, budget: int, mrope: bool) -> None:
    model = PagedModel(
        ratio=ratio, budget=budget, page_size=24, draft_tokens=2, num_layers=2, mrope=mrope
    )
    model.admit("a")
    length = 0
    for chunk in (1, 7, 2, 13, 5):
        model.forward({"a": model.draw_tokens(chunk, length)})
        length += chunk
    for accepted in (0, 3, 1, 2):
        model.poison()
        model.forward({"a": model.draw_tokens(3, length)}, num_decodes=1)
        length += accepted
        model.truncate("a", length)
    model.fork("a", "b")
    model.forward({name: model.draw_tokens(11, length) for name in "ab"})
    for name in "ab":
        model.check_state(name)


@pytest.mark.parity("P01", "P06")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_activations_keep_their_bound(dtype: torch.dtype) -> None:
    model = PagedModel(dtype=dtype, draft_tokens=3, num_layers=2, max_positions=256)
    assert model.cache.layers[0].ring.dtype == dtype
    for request, length in (("a", 45), ("b", 3)):
        model.admit(request)
        model.forward({request: model.draw_tokens(length)})
    for accepted in (1, 4, 2):
        lengths = {request: model.length(request) for request in "ab"}
        model.forward({request: model.draw_tokens(4) for request in "ab"}, num_decodes=2)
        for request in "ab":
            model.truncate(request, lengths[request] + accepted)
            model.check_state(request)
        model.poison()
