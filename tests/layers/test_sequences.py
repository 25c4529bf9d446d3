"""Whole sequences without caches: the differentiable form of the layer.

Claims:
* sequences packed together equal each alone and an engine's prefill, for lengths around a group
  and a page of keys, whatever the order, and whether or not positions are given;
* a token's output depends on no later token and on no other sequence, gradients likewise;
* it compiles to one graph, gradients included; training lowers a loss.
"""

from __future__ import annotations

import pytest
import torch
from layer_engine import Engine, small_config

from flash_qsa.layers import QSAAttention


def make_layer(**options) -> QSAAttention:
    torch.manual_seed(2)
    layer = QSAAttention(small_config(), **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


LENGTHS = [1, 3, 64, 0, 40, 45, 130, 63, 4]


@pytest.mark.bug("O-32")
def test_packed_sequences_equal_each_alone_and_an_engine() -> None:
    layer = make_layer().requires_grad_(False)
    x = torch.randn(sum(LENGTHS), layer.config.hidden_size)
    together = layer(x, query_start=starts(LENGTHS)).split(LENGTHS)
    for length, rows, got in zip(LENGTHS, x.split(LENGTHS), together):
        alone = layer(rows, query_start=starts([length]))
        torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)
        at = torch.arange(length)
        torch.testing.assert_close(alone, layer(rows, at, query_start=starts([length])))
        engine = Engine(layer.config, requests=1, max_tokens=136)
        paged = layer(rows, at, plan=engine.plan({0: length}), caches=engine.caches)
        torch.testing.assert_close(got, paged, rtol=1e-4, atol=1e-5)


@pytest.mark.bug("O-06")
def test_no_leak_from_later_tokens_or_other_sequences() -> None:
    layer = make_layer().requires_grad_(False)
    x = torch.randn(90, layer.config.hidden_size)
    before = layer(x, query_start=starts([50, 40]))
    changed = x.clone()
    changed[41:50] = torch.randn(9, x.shape[1]) * 5
    after = layer(changed, query_start=starts([50, 40]))
    torch.testing.assert_close(after[:41], before[:41], rtol=0, atol=1e-6)
    torch.testing.assert_close(after[50:], before[50:], rtol=0, atol=1e-6)
    assert (after[41:50] != before[41:50]).any()

    leaf = x.clone().requires_grad_()
    layer(leaf, query_start=starts([50, 40]))[30].sum().backward()
    assert (leaf.grad[31:] == 0).all() and (leaf.grad[:31] != 0).any()


@pytest.mark.parity("P38")
def test_compiles_with_gradients() -> None:
    grads = []
    x = torch.randn(40, 48)
    for compiled in (False, True):
        layer = make_layer(pack_projections=True)
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        run(x, query_start=starts([25, 15])).square().sum().backward()
        grads.append({n: p.grad for n, p in layer.named_parameters()})
    for name, grad in grads[0].items():
        assert (grad is None) == (grads[1][name] is None) == name.startswith("indexer")
        if grad is not None:
            torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-5)


def test_training_lowers_a_loss() -> None:
    layer = make_layer()
    x, target = torch.randn(60, 48), torch.randn(60, 48)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = (layer(x, query_start=starts([35, 25])) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_no_rows() -> None:
    layer = make_layer()
    assert layer(torch.empty(0, 48), query_start=starts([0, 0])).shape == (0, 48)
