"""The transformers integration on a GPU.

Claims:
- In FP32 logits and gradients equal transformers' own, for every layout, on Triton kernels.
- In BF16 prefill and decode run on Triton kernels and agree with transformers' outputs up to
  rounding; keys and values are not moved between steps.
- A QSA layer compiles with Inductor as one graph.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers.models.qwen4_exp")

import flash_qsa.hf  # noqa: E402, F401  (registers "qsa")
from flash_qsa import dispatch  # noqa: E402
from flash_qsa.integrations.transformers.cache import GrowingIndexedLayer  # noqa: E402
from flash_qsa.testing.ties import lower_ids_first  # noqa: E402
from flash_qsa.testing.tiny_models import tiny_text_model  # noqa: E402

DEVICE = "cuda"
SHAPE = {
    "full_attention_interval": 1,
    "num_hidden_layers": 2,
    "ple_layer_ids": [],
    "head_dim": 64,
    "indexer_n_heads": 4,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
}
TRITON = {("select_blocks", "triton"), ("sparse_attention", "triton")}
LENGTH = 333


def models(dtype: torch.dtype, **shape):
    return tuple(
        tiny_text_model(attn_implementation=name, **{**SHAPE, **shape}).to(DEVICE, dtype)
        for name in ("sdpa", "qsa")
    )


def tokens(length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, 259, (2, length), generator=generator).to(DEVICE)


def layouts() -> dict[str, dict[str, torch.Tensor]]:
    token = torch.arange(LENGTH, device=DEVICE)
    starts = torch.tensor([0, 41], device=DEVICE)[:, None]
    return {
        "plain": {},
        "left": {"attention_mask": (token >= starts).long()},
        "right": {"attention_mask": (token < LENGTH - starts).long()},
        "holes": {"attention_mask": ((token * 7) % 5 != starts % 2).long()},
        "packed": {"position_ids": token.remainder(130).expand(2, -1)},
    }


@pytest.mark.parametrize("layout", ["plain", "left", "right", "holes", "packed"])
def test_logits_equal_transformers(layout):
    stock, ours = models(torch.float32)
    kwargs = {"use_cache": False, **layouts()[layout]}
    with torch.no_grad(), lower_ids_first(near=0):
        expected = stock(tokens(), **kwargs).logits
        with dispatch.trace() as ran:
            got = ours(tokens(), **kwargs).logits
    assert set(ran) == TRITON
    # A near-tie may choose another block in a few rows; all others agree to rounding.
    wrong = ((got - expected).abs().amax(-1) > 1e-4).float().mean()
    assert wrong < 0.01, f"{wrong:.1%} of rows differ"


def test_gradients_equal_transformers():
    stock, ours = models(torch.float32, num_hidden_layers=1, indexer_budget=512)
    grads = []
    for model in (stock, ours):
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, expected in grads[0].items():
        bound = 1e-3 * float(expected.abs().max()) + 1e-7
        torch.testing.assert_close(grads[1][name], expected, atol=bound, rtol=0, msg=name)


def test_generation_in_bf16(monkeypatch):
    stock, ours = models(torch.bfloat16)
    seen = []
    update = GrowingIndexedLayer.update

    def spy(self, *args, **kwargs):
        result = update(self, *args, **kwargs)
        seen.append((id(self), result[0].data_ptr()))
        return result

    monkeypatch.setattr(GrowingIndexedLayer, "update", spy)
    how = {
        "attention_mask": layouts()["left"]["attention_mask"],
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with dispatch.trace() as ran:
        got = ours.generate(tokens(), **how).logits[0]
    assert set(ran) == TRITON
    assert len(seen) == 16 and len(set(seen)) == 2  # one place per layer, through all steps
    expected = stock.generate(tokens(), **how).logits[0]
    assert (got - expected).abs().mean() < 0.1 * expected.std()


def attention_call(model, **kwargs):
    """The model's attention module and what its forward is called with."""
    module = next(m for m in model.modules() if type(m).__name__.endswith("TextAttention"))
    seen = []
    hook = module.register_forward_pre_hook(lambda m, *call: seen.append(call), with_kwargs=True)
    model(tokens(), use_cache=False, **kwargs)
    hook.remove()
    return module, *seen[0]


def test_one_inductor_graph():
    """The attention module alone: experts and norms of a compiled model round otherwise."""
    torch._dynamo.reset()
    _, ours = models(torch.float32, num_hidden_layers=1)
    with torch.no_grad():
        for layout in ({}, layouts()["left"]):
            module, args, kwargs = attention_call(ours.model, **layout)
            compiled = torch.compile(module, fullgraph=True)
            expected, got = module(*args, **kwargs)[0], compiled(*args, **kwargs)[0]
            wrong = ((got - expected).abs().amax(-1) > 1e-4 * expected.abs().max()).float().mean()
            assert wrong < 0.01, f"{wrong:.1%} of rows differ"
