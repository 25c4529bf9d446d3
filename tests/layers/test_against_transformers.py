"""QSAAttention with transformers' weights is transformers' Qwen4-Exp attention.

Claims, in FP32 within 1e-5:
* the stock state dict loads, and one prefill over paged state gives the stock output, for text and
  for image-like rotary positions, with own weights, packed ones and whole sequences;
* chunks and single-token decoding give the stock layer's output over the whole prompt;
* gradients of every parameter and of the input are the stock layer's.
"""

from __future__ import annotations

import pytest
import torch
from layer_engine import Engine

from flash_qsa.config import QSAConfig
from flash_qsa.layers import QSAAttention

stock = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
pytestmark = pytest.mark.hf
TOKENS = 61


@pytest.fixture(scope="module")
def oracle():
    """A stock layer, its configuration, an input, positions and the output."""
    from flash_qsa.testing.tiny_models import tiny_text_config

    torch.manual_seed(11)
    # eight heads: with two, many scores are exactly zero and the stock order of ties is arbitrary
    config = tiny_text_config(indexer_n_heads=8)
    config._attn_implementation = "sdpa"
    layer = stock.Qwen4ExpTextAttention(config, 1).float().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return config, layer, torch.randn(TOKENS, config.hidden_size)


def image_positions() -> torch.Tensor:
    """Text, then a 4 × 5 image whose axes run apart, then text behind its largest position."""
    at = torch.arange(TOKENS).expand(3, -1).clone()
    patch = torch.arange(20)
    at[:, 20:40] = 20 + torch.stack([torch.zeros_like(patch), patch // 5, patch % 5])
    at[:, 40:] = 25 + torch.arange(TOKENS - 40)
    return at


def text_positions() -> torch.Tensor:
    return torch.arange(TOKENS).expand(3, -1)


def stock_output(oracle, positions: torch.Tensor, hidden=None) -> torch.Tensor:
    config, layer, x = oracle
    x = x if hidden is None else hidden
    rotary = stock.Qwen4ExpTextRotaryEmbedding(config)(x[None], positions[:, None])
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    return layer(x[None], rotary, causal, None)[0][0]


def ours(oracle, **options) -> QSAAttention:
    config, layer, _ = oracle
    mine = QSAAttention(QSAConfig.from_hf(config), **options)
    mine.load_state_dict(layer.state_dict())
    return mine


@pytest.mark.parity("P02", "P03", "P04", "P16", "P26", "P28", "P29", "P49")
@pytest.mark.parametrize("positions", [text_positions, image_positions])
@pytest.mark.parametrize("options", [{}, {"pack_projections": True}, {"fused_preparation": False}])
def test_prefill_chunks_and_decode(oracle, positions, options) -> None:
    at, hidden = positions(), oracle[2]
    with torch.no_grad():
        expected = stock_output(oracle, at)
        layer = ours(oracle, **options)
        whole = layer(hidden, at, query_start=torch.tensor([0, TOKENS], dtype=torch.int32))
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)
        for cuts in ([TOKENS], [5, 1, 30, 22], [40] + [1] * (TOKENS - 40)):
            engine, outs = Engine(layer.config), []
            cuts = cuts if sum(cuts) == TOKENS else [*cuts, TOKENS - sum(cuts)]
            for count in cuts:
                start = engine.lengths[0]
                rows = slice(start, start + count)
                plan = engine.plan({0: count}, padding=1)
                x = torch.cat([hidden[rows], torch.full_like(hidden[:1], float("nan"))])
                p = torch.cat([at[:, rows], torch.full((3, 1), -1)], 1)
                outs.append(layer(x, p, plan=plan, caches=engine.caches)[:count])
            torch.testing.assert_close(torch.cat(outs), expected, rtol=0, atol=1e-5)


def test_gradients(oracle) -> None:
    _, layer, x = oracle
    at, weight = image_positions(), torch.randn(TOKENS, x.shape[1])
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    layer.zero_grad()
    (stock_output(oracle, at, inputs[0]) * weight).sum().backward()
    mine = ours(oracle)
    out = mine(inputs[1], at, query_start=torch.tensor([0, TOKENS], dtype=torch.int32))
    (out * weight).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    assert set(grads) == {name for name, _ in mine.named_parameters()}
    for name, parameter in mine.named_parameters():
        if name.startswith("indexer"):
            assert parameter.grad is None and grads[name] is None  # selections have no gradient
            continue
        scale = grads[name].abs().max()
        torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=float(1e-5 * scale))
    scale = inputs[0].grad.abs().max()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=float(1e-5 * scale))
