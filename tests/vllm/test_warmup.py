"""Warm-up: which batches it runs, and that they are padding alone.

Claims: shapes cover decodes, draft windows and prefill chunks within the engine's limits, without
repeats; running one writes nothing to any cache and reads no page; it reuses the serving code.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flash_qsa import dispatch
from flash_qsa.config import QSAConfig, RopeConfig
from flash_qsa.integrations.vllm import selection, warmup
from flash_qsa.integrations.vllm.step import StepOptions, select_step
from flash_qsa.integrations.vllm.warmup import StepShape, padding_plan, run_padding, step_shapes
from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.vllm_layout import PagedEngine


@pytest.mark.parametrize(
    "limits", [(1, 16, 1, 64), (256, 8192, 4, 262_144), (3, 2048, 2, 5000), (8, 3, 4, 64)]
)
def test_shapes_stay_within_the_engines_limits(limits):
    max_requests, max_tokens, draft_rows, max_len = limits
    shapes = step_shapes(*limits)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert 1 <= shape.requests <= max_requests
        assert shape.rows <= max_tokens
        assert shape.query_len <= shape.seq_len <= max(max_len, shape.query_len)
    decodes = {(s.requests, s.query_len) for s in shapes if s.decode}
    assert {query for _, query in decodes} == {n for n in (1, draft_rows) if n <= max_tokens}
    assert (min(max_requests, max_tokens), 1) in decodes
    assert {s.rows for s in shapes if not s.decode} >= {min(64, max_tokens), max_tokens}


def test_names_say_what_ran():
    assert str(StepShape(8, 4, 16_384, True)) == "decode 8 × 4 rows, 16384 tokens"
    mixed = StepShape(8, 4, 16_384, True, 512)
    assert str(mixed) == "decode 8 × 4 + 512 rows, 16384 tokens"
    assert str(StepShape(1, 512, 1024, False)) == "prefill 1 × 512 rows, 1024 tokens"


@pytest.fixture
def layer() -> SimpleNamespace:
    """What warm-up reads of our attention layer, over memory that starts as NaN."""
    shape = Shape(ring_capacity=8)
    memory = PagedEngine(shape, 2, 64)
    norms = Norms(*(torch.zeros(dim) for dim in (16, 16, 32, 32)), 1e-6)
    rope = RopeTable.from_config(RopeConfig(rotary_dim=8, max_positions=64), torch.float32)
    indexer = SimpleNamespace(
        raw_key_cache=SimpleNamespace(kv_cache=memory.ring),
        compressed_key_cache=SimpleNamespace(kv_cache=memory.compressed),
        row_width=selection.row_width(shape.top_k),
        reusable=True,
        config=QSAConfig(64, 4, 2, 32, 2, 1, 16, 16, 4, rope=RopeConfig(rotary_dim=8)),
    )
    return SimpleNamespace(
        memory=memory,
        kv_cache=memory.main,
        options=StepOptions(shape.top_k, shape.ratio, 32**-0.5),
        indexer=indexer,
        impl=SimpleNamespace(typed_cache=lambda cache: cache, scales=lambda layer: (None, None)),
        q_norm=SimpleNamespace(weight=norms.query),
        q_size=4 * 32,
        kv_size=2 * 32,
        index_qk_size=3 * 16,
        norms=lambda: norms,
        rope_table=lambda dtype: rope,
    )


@pytest.mark.parity("P38", "P48")
@pytest.mark.parametrize("shape", [StepShape(3, 4, 64, True), StepShape(1, 20, 64, False)], ids=str)
def test_a_warm_up_step_runs_every_op_and_writes_nothing(layer, shape, monkeypatch):
    before = layer.memory.pool.clone()
    tables = []
    monkeypatch.setattr(
        warmup, "select_step", lambda *given: tables.append(given[3].shape) or select_step(*given)
    )
    with dispatch.trace() as ran:
        run_padding(layer, shape, 1000)
    assert tables == [(shape.requests, 63)]  # the engine's width, whatever the step's length
    names = [op for op, _ in ran]
    assert names[:2] == ["prepare", "select_blocks"]
    assert names[2:] == ["sparse_attention"] * 2  # fresh rows, then reused ones
    assert torch.equal(layer.memory.pool, before)
    assert layer.memory.ring.isnan().all()


def test_the_plan_describes_the_shape_to_schedules():
    sizes = {"ratio": 4, "page_size": 16, "ring_capacity": 8, "device": torch.device("cpu")}
    plan = padding_plan(StepShape(3, 4, 60, True), 5, **sizes)
    assert (plan.num_rows, plan.num_decodes, plan.decode_query_len) == (12, 3, 4)
    assert plan.page_table.shape == (3, 5) and plan.ring_capacity == 8
    assert (plan.request_ids == -1).all() and (plan.visible_blocks == 0).all()
    mixed = padding_plan(StepShape(3, 4, 60, True, 7), 5, **sizes)
    assert (mixed.num_rows, mixed.num_requests, mixed.num_decodes) == (19, 4, 3)
    assert (mixed.num_decode_tokens, mixed.decode_query_len, mixed.max_query_len) == (12, 4, 7)
    assert mixed.page_table.shape == (4, 5)
    plan = padding_plan(StepShape(1, 20, 64, False), 5, **sizes)
    assert (plan.num_decodes, plan.decode_query_len, plan.max_query_len) == (0, 0, 20)
