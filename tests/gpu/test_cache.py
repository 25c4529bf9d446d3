"""The state and the kernels together on a CUDA device.

Claims: the scheduler soak holds with every kernel, in FP32, FP16 and BF16; pages that are loaded
back on another stream are read only after the copy, keys and compressed keys together; what is
exported from the device continues bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from paged_model import PagedModel
from test_soak import DRAFTS, Scheduler

from flash_qsa import dispatch
from flash_qsa.cache import read_pages, write_pages


@pytest.mark.bug("O-18", "O-20", "O-23", "O-30", "O-31")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_random_steps_on_kernels_equal_the_oracle(dtype: torch.dtype) -> None:
    model = PagedModel(
        num_layers=2,
        num_pages=40,
        num_ring_slots=7,
        draft_tokens=DRAFTS,
        head_dim=64,
        dtype=dtype,
        device="cuda",
        seed=23,
    )
    with dispatch.trace() as ran:
        Scheduler(model).run(60)
    assert {backend for _, backend in ran} == {"triton"}


@pytest.mark.bug("O-26")
def test_pages_loaded_back_on_a_side_stream_select_as_before() -> None:
    """Pages 3 … go to the host, are overwritten, and come back elsewhere behind a delay."""
    sizes = {"page_size": 16, "num_pages": 12, "head_dim": 64, "deterministic": True}
    model = PagedModel(device="cuda", budget=16, **sizes)
    tokens = model.draw_tokens(68)
    model.fill("a", tokens[:61])
    model.fork("a", "kept")
    (before,) = model.forward({"kept": tokens[61:]})
    model.free("kept")

    old = model.cache.pages("a")
    free = [page for page in range(1, 12) if model.cache.ledger.pages.references(page) == 0]
    new = free[: len(old)]
    contents = read_pages(model.cache.layers, old, device="cpu")
    model.cache.ledger.relocate(dict(zip(old, new)))
    for layer in model.cache.layers:
        layer.main.copy_(torch.randn_like(layer.main))
        layer.compressed.copy_(torch.randn_like(layer.compressed))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        write_pages(model.cache.layers, new, contents)
    torch.cuda.current_stream().wait_stream(side)
    (after,) = model.forward({"a": tokens[61:]})
    assert model.cache.pages("a")[: len(new)] == tuple(new)
    assert torch.equal(before, after)


@pytest.mark.bug("O-25", "O-29")
def test_exported_and_forked_state_continues_bit_for_bit() -> None:
    sizes = {"page_size": 16, "num_pages": 40, "head_dim": 64, "num_layers": 2}
    model = PagedModel(device="cuda", deterministic=True, dtype=torch.bfloat16, **sizes)
    tokens = model.draw_tokens(109)
    model.fill("a", tokens[:101])
    saved = model.cache.export("a", device="cpu")
    model.fork("a", "forked")
    expected = model.forward({"a": tokens[101:]})
    model.restore("restored", saved, model.texts["a"])
    model.poison()
    for request in ("forked", "restored"):
        for one, other in zip(model.forward({request: tokens[101:]}), expected):
            assert torch.equal(one, other)
        model.check_state(request)
