"""The layer on Triton kernels in the interpreter.

Claims:
* mixed steps of prefill chunks and decodes select the reference's blocks and give its outputs and
  state, fused and by separate ops, reused selections included;
* gradients with a kernel's forward pass are the reference's.
"""

from __future__ import annotations

import pytest
import torch
from layer_engine import Engine, small_config

from flash_qsa import dispatch
from flash_qsa.layers import QSAAttention
from flash_qsa.ops import sparse_attention
from flash_qsa.testing.inputs import Shape, make_problem


def steps(backend: str, **options) -> tuple[list[torch.Tensor], Engine, QSAAttention, list]:
    """Prefill, a mixed step, and one that reuses its first rows."""
    torch.manual_seed(1)
    config = small_config(index_heads=4, token_budget=8)
    layer = QSAAttention(config, max_batched_tokens=64, backend=backend, **options)
    layer.requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    engine, outs = Engine(config, draft_tokens=2), []
    hidden, at = torch.randn(2, 30, config.hidden_size), torch.randint(0, 200, (2, 3, 30))
    with dispatch.trace() as ran:
        for rows, reuse in (
            ({0: 13}, False),
            ({0: 1, 1: 3}, False),
            ({0: 1, 1: 1}, True),
        ):
            spans = {r: slice(engine.lengths[r], engine.lengths[r] + n) for r, n in rows.items()}
            x = torch.cat([hidden[r, span] for r, span in spans.items()])
            p = torch.cat([at[r][:, span] for r, span in spans.items()], 1)
            plan = engine.plan(rows, backend="reference")
            outs.append(layer(x, p, plan=plan, caches=engine.caches, reuse=reuse))
    return outs, engine, layer, [pair for pair in ran if pair[0] != "batch_plan"]


@pytest.mark.parity("P15", "P17", "P38")
@pytest.mark.parametrize("fused", [True, False])
def test_steps_equal_the_reference(fused: bool) -> None:
    expected, state, layer, _ = steps("reference")
    got, other_state, other, ran = steps("triton", fused_preparation=fused)
    assert {backend for _, backend in ran} == {"triton"}
    assert torch.equal(layer.indexer.selection, other.indexer.selection)
    for a, b in zip(expected, got):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    for a, b in zip(state.caches, other_state.caches):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_gradients_of_a_kernels_forward_pass() -> None:
    p = make_problem([40, 21], [3, 9], Shape(), padding=1)
    grads = []
    for backend in ("reference", "triton"):
        leaves = [t.clone().requires_grad_() for t in (p.query, p.kv_cache, p.gate)]
        with dispatch.trace() as ran:
            out = sparse_attention(
                leaves[0],
                leaves[1],
                p.block_ids(),
                p.plan.positions,
                p.plan.page_table,
                p.plan.request_ids,
                compress_ratio=4,
                gate=leaves[2],
                plan=p.plan,
                backend=backend,
            )
        assert ran == [("sparse_attention", backend)]
        out[p.plan.request_ids >= 0].square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for a, b in zip(*grads):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def test_whole_sequences() -> None:
    torch.manual_seed(2)
    config = small_config(index_heads=4, token_budget=8)
    layers = [QSAAttention(config, backend=backend) for backend in ("reference", "triton")]
    layers[1].load_state_dict(layers[0].state_dict())
    x, start = torch.randn(18, config.hidden_size), torch.tensor([0, 4, 18], dtype=torch.int32)
    outs = []
    for layer in layers:
        out = layer(x, query_start=start)
        out.square().sum().backward()
        outs.append([out.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert len(outs[0]) == len(outs[1]) == 7
    for a, b in zip(*outs):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
