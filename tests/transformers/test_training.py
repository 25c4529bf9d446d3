"""Training and compilation of models with attention implementation "qsa".

Claims:
- Gradients equal those through transformers' own layer, and the indexer gets none there either.
- Both kinds of gradient checkpointing give the same gradients.
- `torch.compile(fullgraph=True)` traces a QSA layer, with and without a padding mask, forward and
  backward, and gives the eager answer.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.testing.tiny_models import tiny_text_model

ONE_LAYER = {"full_attention_interval": 1, "num_hidden_layers": 1, "ple_layer_ids": []}


def gradients(model, ids):
    model.zero_grad()
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.eval()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert got[name] is None, name
            continue
        bound = 1e-4 * float(gradient.abs().max()) + 1e-8
        torch.testing.assert_close(got[name], gradient, atol=bound, rtol=0, msg=name)


def test_gradients_equal_transformers(prompt):
    expected = gradients(tiny_text_model(), prompt)
    ours = tiny_text_model(attn_implementation="qsa")
    assert_close(gradients(ours, prompt), expected)
    without = [name for name, gradient in expected.items() if gradient is None]
    assert without and all("indexer" in name for name in without)
    for reentrant in (False, True):
        ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_close(gradients(ours, prompt), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_one_graph(prompt, padded):
    """A padding mask under tracing takes the layout that gathers: nothing reads the device."""
    torch._dynamo.reset()
    model = tiny_text_model(attn_implementation="qsa", **ONE_LAYER).model
    mask = None
    if padded:
        mask = torch.ones_like(prompt)
        mask[0, :9] = 0
        mask[1, 20:23] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(prompt, attention_mask=mask, use_cache=False).last_hidden_state
        got = compiled(prompt, attention_mask=mask, use_cache=False).last_hidden_state
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_compiled_gradients(prompt):
    torch._dynamo.reset()
    model = tiny_text_model(attn_implementation="qsa", **ONE_LAYER).model
    weight = model.layers[0].self_attn.q_proj.weight

    def gradient(run):
        model.zero_grad()
        run(prompt, use_cache=False).last_hidden_state.square().sum().backward()
        return weight.grad.clone()

    expected = gradient(model)
    got = gradient(torch.compile(model, fullgraph=True, backend="aot_eager"))
    bound = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(got, expected, atol=bound, rtol=0)
