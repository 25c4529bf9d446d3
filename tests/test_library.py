"""Operators: every op as torch.compile sees it.

Claims:
* every op of the dispatch table has an operator, and every operator is called here or by the tests
  of gradients;
* every public op has an operator whose schema, fake and autograd registration pass opcheck, on
  strided inputs, with every optional argument given and with none;
* a compiled public function is one graph and gives the eager bits;
* an eager call never reaches an operator, unless it needs gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

import flash_qsa.ops as ops
from flash_qsa import dispatch
from flash_qsa.config import RopeConfig
from flash_qsa.library import registry
from flash_qsa.ops.compress_keys.ring_rows import ring_width
from flash_qsa.ops.fp8 import to_storage
from flash_qsa.ops.prepare.api import Caches, Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.testing.inputs import Problem, Shape, make_problem, scattered_view

SHAPE = Shape()


class Recorder(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flash_qsa":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def problem(index_dtype: torch.dtype = torch.float32) -> Problem:
    return make_problem([40, 70, 33], [1, 5, 33], SHAPE, padding=3, index_dtype=index_dtype)


def as_e4m3_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes rather than the type itself, which opcheck's comparisons cannot multiply."""
    return scattered_view(to_storage(tensor, torch.uint8))


def call_plan_rows(p: Problem):
    plan = p.plan
    return lambda: ops.plan_rows(
        plan.query_start,
        plan.seq_lens,
        plan.page_table,
        plan.ring_table,
        plan.num_rows,
        compress_ratio=SHAPE.ratio,
        page_size=SHAPE.page_size,
        ring_capacity=SHAPE.ring_capacity,
    ), []


def call_store_rows(p: Problem):
    rows = scattered_view(torch.randn(p.plan.num_rows, 1, SHAPE.index_dim))
    return lambda: ops.store_rows(p.key_cache, p.plan.compressed_slots, rows), [p.key_cache]


def ring(with_positions: bool = True) -> torch.Tensor:
    width = ring_width(SHAPE.index_dim, torch.float32, with_positions)
    return scattered_view(torch.zeros(3, SHAPE.ring_capacity, 1, width))


def call_compress_keys(p: Problem):
    raw = scattered_view(torch.randn(p.plan.num_rows, SHAPE.index_dim))
    at, kept = p.plan.positions.clamp(min=0), ring()
    return lambda: ops.compress_keys(raw, at, kept, p.plan.ring_table, p.plan), []


def call_prepare(p: Problem, fp8: bool):
    plan, s = p.plan, SHAPE
    rows, dim = plan.num_rows, s.head_dim
    qkv = scattered_view(torch.randn(rows, 2 * (s.heads + s.kv_heads) * dim))
    index_qk = scattered_view(torch.randn(rows, (s.index_heads + 1) * s.index_dim))
    section = None if fp8 else (3, 3, 2)
    config = RopeConfig(rotary_dim=16, max_positions=128, mrope_section=section)
    rope = RopeTable.from_config(config, torch.float32)
    norms = Norms(*(torch.randn(n) for n in (s.index_dim, s.index_dim, dim, dim)), 1e-6)
    main = p.kv_cache.nan_to_num(0)
    if fp8:
        caches = Caches(as_e4m3_bytes(main), as_e4m3_bytes(p.key_cache), ring(False))
        scales = {"k_scale": torch.tensor([0.5]), "v_scale": 2.0}
    else:
        caches = Caches(main, p.key_cache, ring())
        scales = {}
    positions = torch.randint(0, 128, (3, rows))
    return (
        lambda: ops.prepare(qkv, index_qk, positions, rope, norms, caches, plan, **scales),
        list(caches),
    )


def call_select_blocks(p: Problem, everything: bool):
    plan = p.plan
    extra = {}
    if everything:
        extra = {
            "first_block": torch.ones_like(plan.visible_blocks),
            "workspace": torch.empty(1 << 20, dtype=torch.uint8),
            "out": torch.zeros(plan.num_rows, SHAPE.top_k + 3, dtype=torch.int32)[:, :-3],
            "plan": plan,
        }
    return lambda: ops.select_blocks(
        p.index_query,
        p.key_cache,
        plan.page_table,
        plan.request_ids,
        plan.visible_blocks,
        SHAPE.top_k,
        **extra,
    ), [extra["out"]] if everything else []


def call_expand_blocks(p: Problem):
    ids = p.block_ids()
    return lambda: ops.expand_blocks(ids, p.plan.positions, p.plan.visible_blocks, SHAPE.ratio), []


def call_sparse_attention(p: Problem, everything: bool):
    plan, ids, extra, cache = p.plan, p.block_ids(), {}, p.kv_cache
    if everything:
        cache = as_e4m3_bytes(cache)
        extra = {
            "gate": p.gate,
            "k_scale": torch.tensor([0.5]),
            "v_scale": 2.0,
            "tail_start": plan.visible_blocks.long() * SHAPE.ratio,
            "token_base": torch.zeros_like(plan.positions),
            "plan": plan,
            "return_lse": True,
            "deterministic": True,
        }
    return lambda: ops.sparse_attention(
        p.query,
        cache,
        ids,
        plan.positions,
        plan.page_table,
        plan.request_ids,
        compress_ratio=SHAPE.ratio,
        **extra,
    ), []


# each builds (a call, the tensors that it writes beside its results)
CALLS = {
    "plan_rows": lambda: call_plan_rows(problem()),
    "store_rows": lambda: call_store_rows(problem()),
    "compress_keys": lambda: call_compress_keys(problem()),
    "prepare": lambda: call_prepare(problem(), fp8=False),
    "prepare fp8": lambda: call_prepare(problem(), fp8=True),
    "select_blocks": lambda: call_select_blocks(problem(), everything=False),
    "select_blocks everything": lambda: call_select_blocks(problem(), everything=True),
    "select_blocks fp8": lambda: call_select_blocks(problem(torch.uint8), everything=False),
    "expand_blocks": lambda: call_expand_blocks(problem()),
    "sparse_attention": lambda: call_sparse_attention(problem(), everything=False),
    "sparse_attention everything": lambda: call_sparse_attention(problem(), everything=True),
}


def test_no_op_without_an_operator() -> None:
    assert set(registry._TRACED) == set(dispatch.OPS)
    registered = {
        name.removeprefix("flash_qsa::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("flash_qsa::")
    }
    called = {name.split()[0] for name in CALLS} | {"sparse_attention_out"}
    assert registered == called | {"sparse_attention_backward"}


def recorded(call, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """The operator and arguments that a traced `call` reaches."""
    with monkeypatch.context() as patch, Recorder() as recorder:
        # an operator that runs is no longer being traced
        patch.setattr(torch.compiler, "is_compiling", lambda: not recorder.calls)
        call()
    (found,) = recorder.calls
    return found


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = CALLS[name]()
    operator, args = recorded(call, monkeypatch)
    assert operator.name().startswith(f"flash_qsa::{name.split()[0]}")
    torch.library.opcheck(operator, args)


def bits(*tensors: torch.Tensor | None) -> list:
    return [t if t is None else t.contiguous().view(torch.uint8).tolist() for t in tensors]


def results(outcome) -> tuple:
    return outcome if isinstance(outcome, tuple) else (outcome,)


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_with_the_eager_bits(name: str) -> None:
    torch.manual_seed(0)
    call, written = CALLS[name]()
    with Recorder() as recorder:
        expected = results(call())
    assert not recorder.calls

    torch.manual_seed(0)
    again, rewritten = CALLS[name]()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    got = results(torch.compile(again, fullgraph=True, backend=graphs)())
    assert graphs.frame_count == 1
    assert bits(*got, *rewritten) == bits(*expected, *written)


@pytest.mark.parity("P38")
def test_steps_of_other_lengths_do_not_recompile_forever() -> None:
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def step(p: Problem):
        plan = p.plan
        ids = ops.select_blocks(
            p.index_query,
            p.key_cache,
            plan.page_table,
            plan.request_ids,
            plan.visible_blocks,
            SHAPE.top_k,
            plan=plan,
        )
        return ops.sparse_attention(
            p.query,
            p.kv_cache,
            ids,
            plan.positions,
            plan.page_table,
            plan.request_ids,
            compress_ratio=SHAPE.ratio,
            plan=plan,
        )

    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for length in (33, 34, 35, 36, 37):
        p = make_problem([length, length + 20], [1, 1], SHAPE)
        assert bits(compiled(p)) == bits(step(p))
    assert graphs.frame_count <= 2, "the plan's integers must become symbolic"
