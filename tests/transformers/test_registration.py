"""Switching models on and off, and what happens where QSA's fast path cannot go.

Claims:
- By name, at construction, at loading and later, and back; `patch` and `unpatch` do the same.
- A model that does not say "qsa" runs transformers' own forward, bit for bit.
- accelerate-style hooks that captured the old forward are seen by `patch` and given back.
- `output_attentions` and attention dropout run transformers' dense path and say so.
- The fast path really runs: the ops are called once per layer, and no dense mask is built.
"""

from __future__ import annotations

import types

import pytest
import torch
from transformers import AutoModelForCausalLM

import flash_qsa.hf
from flash_qsa import dispatch
from flash_qsa.integrations.transformers import mask as mask_module
from flash_qsa.testing.tiny_models import tiny_text_model

SMALL = {"full_attention_interval": 1, "num_hidden_layers": 1, "ple_layer_ids": []}


@pytest.fixture
def small():
    return tiny_text_model(**SMALL)


@pytest.fixture
def ids():
    return torch.randint(3, 259, (1, 26))


def ops_of(model, ids):
    with torch.no_grad(), dispatch.trace() as ran:
        model(ids, use_cache=False)
    return [op for op, _ in ran]


BOTH = ["select_blocks", "sparse_attention"]


def test_by_name(small, ids):
    assert not flash_qsa.hf.is_enabled(small)
    assert ops_of(small, ids) == []
    small.set_attn_implementation("qsa")
    assert flash_qsa.hf.is_enabled(small)
    assert ops_of(small, ids) == BOTH
    small.set_attn_implementation("sdpa")
    assert not flash_qsa.hf.is_enabled(small)
    assert ops_of(small, ids) == []


def test_at_loading(small, ids, tmp_path):
    small.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="qsa", dtype=torch.float32
    )
    assert flash_qsa.hf.is_enabled(loaded)
    assert ops_of(loaded, ids) == BOTH


def test_patch_and_unpatch(small, ids):
    small.set_attn_implementation("eager")
    assert flash_qsa.hf.patch(small) is small
    assert flash_qsa.hf.is_enabled(small) and ops_of(small, ids) == BOTH
    flash_qsa.hf.patch(small)  # harmless to repeat
    assert flash_qsa.hf.unpatch(small) is small
    assert small.config._attn_implementation == "eager"
    assert not flash_qsa.hf.is_enabled(small) and ops_of(small, ids) == []


def test_patch_several_layers_restores_all(ours):
    model = tiny_text_model(attn_implementation="eager")
    flash_qsa.hf.unpatch(flash_qsa.hf.patch(model))
    assert model.config._attn_implementation == "eager"


def test_unpatch_of_a_model_switched_by_name(ids):
    model = tiny_text_model(attn_implementation="qsa", **SMALL)
    flash_qsa.hf.unpatch(model)
    assert model.config._attn_implementation == "sdpa"


def test_patch_refuses_other_models():
    with pytest.raises(ValueError, match="Linear has no Qwen4-Exp QSA layer"):
        flash_qsa.hf.patch(torch.nn.Linear(2, 2))
    assert not flash_qsa.hf.is_enabled(torch.nn.Linear(2, 2))


def test_patch_reaches_behind_hooks(small, ids):
    """accelerate keeps the forward it replaced in `_old_forward` and calls that."""
    attention = small.model.layers[0].self_attn
    stock = types.MethodType(type(attention).forward.stock, attention)
    attention._old_forward = stock
    attention.forward = lambda *args, **kwargs: attention._old_forward(*args, **kwargs)
    small.set_attn_implementation("qsa")
    assert not flash_qsa.hf.is_enabled(small)
    flash_qsa.hf.patch(small)
    assert flash_qsa.hf.is_enabled(small) and ops_of(small, ids) == BOTH
    flash_qsa.hf.unpatch(small)
    assert attention._old_forward is stock


def test_other_models_are_untouched(small, ids):
    stock = type(small.model.layers[0].self_attn).forward.stock
    hooked = type(small.model.layers[0].self_attn)
    with torch.no_grad():
        with_hook = small(ids).logits
        dispatching = hooked.forward
        hooked.forward = stock
        try:
            without = small(ids).logits
        finally:
            hooked.forward = dispatching
    assert torch.equal(with_hook, without)


def test_attention_weights_come_from_the_dense_path(ids):
    eager = tiny_text_model(attn_implementation="eager", **SMALL)
    ours = tiny_text_model(attn_implementation="qsa", **SMALL)
    with torch.no_grad():
        expected = eager(ids, output_attentions=True)
        with pytest.warns(UserWarning, match="output_attentions"):
            got = ours(ids, output_attentions=True)
    assert len(got.attentions) == 1
    torch.testing.assert_close(got.attentions[0], expected.attentions[0])
    torch.testing.assert_close(got.logits, expected.logits)


def test_dropout_in_training_is_honoured(ids):
    ours = tiny_text_model(attn_implementation="qsa", attention_dropout=0.5, **SMALL).train()
    stock = tiny_text_model(attention_dropout=0.5, **SMALL).train()
    torch.manual_seed(0)
    expected = stock(ids, use_cache=False).logits
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="attention_dropout = 0.5"):
        got = ours(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected)
    assert ops_of(ours.eval(), ids) == BOTH


@pytest.mark.bug("O-54")
def test_no_dense_mask_is_built(ours, prompt, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a dense mask was built")

    monkeypatch.setattr(mask_module, "sdpa_mask", refuse)
    monkeypatch.setattr(mask_module.CompactMask, "to_dense", refuse)
    padding = torch.ones_like(prompt)
    padding[0, :9] = 0
    with torch.no_grad():
        ours(prompt, attention_mask=padding)
        ours(prompt, position_ids=torch.arange(46).remainder(30)[None], use_cache=False)
