"""The layer on a GPU.

Claims:
* a step never waits for the host, and a captured one, replayed with other lengths, pages and
  numbers of live rows, gives the eager step's bits and state;
* compiled by Inductor it is one graph with the eager selection and output;
* fused and separate preparation agree, and both equal the reference on the CPU;
* gradients of the BF16 kernels stay within rounding of FP32 autograd, and repeat bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from layer_engine import Engine, same_bits

from flash_qsa import dispatch
from flash_qsa.cache import PlanBuffers
from flash_qsa.config import QSAConfig, RopeConfig
from flash_qsa.layers import QSAAttention
from flash_qsa.ops.prepare.api import Caches

DTYPE = torch.bfloat16
CONFIG = QSAConfig(
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    index_heads=4,
    index_head_dim=128,
    token_budget=64,
    rope=RopeConfig(rotary_dim=64, max_positions=4096, mrope_section=(11, 11, 10)),
)


def make_layer(dtype: torch.dtype = DTYPE, **options) -> QSAAttention:
    torch.manual_seed(1)
    layer = QSAAttention(CONFIG, dtype=dtype, device="cuda", **options).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return layer


def make_engine(requests: int = 4, **options) -> Engine:
    options = {"max_tokens": 600, "page_size": 16, "dtype": DTYPE, **options}
    return Engine(CONFIG, requests=requests, device="cuda", **options)


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(rows, CONFIG.hidden_size, device="cuda", dtype=DTYPE)
    return hidden, torch.randint(0, 4096, (3, rows), device="cuda")


@pytest.mark.parity("P38")
@pytest.mark.bug("O-21", "O-39")
@pytest.mark.parametrize("fused", [True, False])
def test_captured_decode_replays_like_eager(fused: bool) -> None:
    layer = make_layer(max_batched_tokens=8, fused_preparation=fused)
    engine = make_engine(requests=8)
    for request in range(8):
        hidden, at = inputs(40 + 31 * request)
        plan = engine.plan({request: len(hidden)})
        rows = torch.empty(len(hidden), CONFIG.top_k + 1, dtype=torch.int32, device="cuda")
        layer(hidden, at, plan=plan, caches=engine.caches, selection=rows)
    buffers = PlanBuffers.allocate(8, 8, 40, "cuda")
    hidden, at = inputs(8)

    def refill(live: dict[int, int]):
        return engine.plan(live, num_rows=8, max_seq_len=600, num_decodes=len(live), out=buffers)

    plan = refill(dict.fromkeys(range(8), 1))
    static = Caches(*(t.clone() for t in engine.caches))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layer(hidden, at, plan=plan, caches=static)  # compile outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(hidden, at, plan=plan, caches=static)
    for target, source in zip(static, engine.caches):
        target.copy_(source)
    eager = Caches(*(t.clone() for t in engine.caches))
    for live in ([0, 1, 2, 3, 4, 5, 6, 7], [5], [1, 3, 6], [7, 0, 2, 4, 6, 1, 5, 3]) * 3:
        refill(dict.fromkeys(live, 1))  # new lengths, pages and rows under the captured plan
        fresh_hidden, fresh_at = inputs(8)
        hidden.copy_(fresh_hidden)
        at.copy_(fresh_at)
        graph.replay()
        selected = layer.indexer.selection.clone()
        expected = layer(hidden, at, plan=plan, caches=eager)
        assert same_bits(captured, expected)
        assert torch.equal(selected[: len(live)], layer.indexer.selection[: len(live)])
        assert all(same_bits(a, b) for a, b in zip(static, eager))


@pytest.mark.parity("P38")
@pytest.mark.parametrize("options", [{}, {"fused_preparation": False}, {"pack_projections": True}])
def test_a_step_never_waits_for_the_host(options: dict) -> None:
    layer, engine = make_layer(**options), make_engine()
    for rows in ({0: 100, 1: 37}, {0: 1, 1: 1, 2: 65}, {0: 1, 1: 1}):
        hidden, at = inputs(sum(rows.values()))
        plan = engine.plan(rows)
        layer(hidden, at, plan=plan, caches=engine.snapshot())  # compiles kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = layer(hidden, at, plan=plan, caches=engine.caches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert out.isfinite().all()


@pytest.mark.parity("P38")
def test_compiled_by_inductor() -> None:
    layer = make_layer(max_batched_tokens=256, pack_projections=True)
    compiled = torch.compile(layer, fullgraph=True)
    engine = make_engine()
    other = engine.snapshot()
    for rows in ({0: 100, 1: 37}, {0: 1, 1: 1}, {0: 1, 1: 1}):
        hidden, at = inputs(sum(rows.values()))
        plan = engine.plan(rows)
        expected = layer(hidden, at, plan=plan, caches=engine.caches)
        selected = layer.indexer.selection.clone()
        got = compiled(hidden, at, plan=plan, caches=other)
        assert torch.equal(selected, layer.indexer.selection)
        torch.testing.assert_close(got, expected, rtol=0, atol=2**-6 * float(expected.abs().max()))
        assert all(same_bits(a, b) for a, b in zip(engine.caches, other))


@pytest.mark.parity("P15")
@pytest.mark.parametrize("fused", [True, False])
def test_equals_the_reference_on_the_cpu(fused: bool) -> None:
    layer = make_layer(torch.float32, fused_preparation=fused)
    reference = QSAAttention(CONFIG, backend="reference").requires_grad_(False)
    reference.load_state_dict({n: t.cpu() for n, t in layer.state_dict().items()})
    torch.manual_seed(5)
    mine = make_engine(dtype=torch.float32)
    torch.manual_seed(5)
    theirs = Engine(CONFIG, requests=4, max_tokens=600, page_size=16)
    for rows in ({0: 100, 1: 37}, {0: 1, 1: 1, 2: 65}, {0: 1, 1: 1}):
        count = sum(rows.values())
        hidden, at = torch.randn(count, 256), torch.randint(0, 4096, (3, count))
        with dispatch.trace() as ran:
            got = layer(hidden.cuda(), at.cuda(), plan=mine.plan(rows), caches=mine.caches)
        assert {backend for _, backend in ran} == {"triton"}
        expected = reference(hidden, at, plan=theirs.plan(rows), caches=theirs.caches)
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_gradients() -> None:
    layer = make_layer().requires_grad_(True)
    truth = QSAAttention(CONFIG, dtype=torch.float32, backend="reference")
    truth.load_state_dict({n: t.float().cpu() for n, t in layer.state_dict().items()})
    # at most 64 tokens: every block is selected, so that rounding cannot change the selection
    start = torch.tensor([0, 60, 124, 125], dtype=torch.int32)
    hidden = torch.randn(125, 256, dtype=DTYPE)
    weight = torch.randn(125, 256)
    (truth(hidden.float(), query_start=start) * weight).sum().backward()
    runs = []
    for _ in range(2):
        layer.zero_grad()
        out = layer(hidden.cuda(), query_start=start.cuda())
        (out.float() * weight.cuda()).sum().backward()
        runs.append({n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None})
    for name, parameter in truth.named_parameters():
        assert (parameter.grad is None) == (name not in runs[0])
        if parameter.grad is not None:
            got = runs[0][name]
            assert same_bits(got, runs[1][name])
            error = (got.float().cpu() - parameter.grad).norm() / parameter.grad.norm()
            assert error < 2**-6, f"{name}: {error}"
