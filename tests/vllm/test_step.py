"""A layer's step on vLLM's memory layout, driven without vLLM.

Claims: requests of different lengths, fed in chunks, with decode batches, padded rows and padded
requests, give what the float64 oracle gives on the whole token list; padded rows come out as
zeros; nothing is written to the null blocks; NaN in unused memory never shows; buffers reused for
the next step do not leak the last one.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_qsa.integrations.vllm.step import prepare_step
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.vllm_layout import PagedEngine
from flash_qsa.testing.vllm_step import ROPE, StepLayer


def assert_close(result: torch.Tensor, truth: torch.Tensor) -> None:
    """FP32 through norm, rotation and softmax of unit-scale values: 2^-24 times some hundreds."""
    torch.testing.assert_close(result.double(), truth, atol=2e-5, rtol=2e-5)


@pytest.mark.parity("P08", "P10", "P13", "P15", "P16", "P33", "P38")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("page", [16, 48])
def test_chunks_decodes_and_padding_give_the_oracles_rows(fused, page):
    lengths = [41, 18, 30]
    shape = dataclasses.replace(Shape(), page_size=page)
    layer = StepLayer.make(shape, lengths, fused=fused)
    engine = PagedEngine(shape, 3, 64)
    truth = [layer.truth(request) for request in range(3)]
    steps = [
        ([0], [21], [21], 0),
        ([1, 0], [10, 9], [10, 30], 5),
        ([0, 1, 2], [10, 1, 17], [40, 11, 17], 0),
        ([0, 1, 2], [1, 1, 1], [41, 12, 18], 1),
        ([1, 2], [6, 12], [18, 30], 2),
    ]
    for which, query_lens, seq_lens, padded in steps:
        output, _ = layer.run(engine, which, query_lens, seq_lens, padded=padded)
        at = 0
        for request, count, length in zip(which, query_lens, seq_lens):
            assert_close(output[at : at + count], truth[request][length - count : length])
            at += count
        assert (output[at:] == 0).all()
    assert engine.null_block_untouched()


@pytest.mark.parity("P06", "P16", "P49")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_mrope_positions_come_back_from_the_ring(fused):
    rope = dataclasses.replace(ROPE, rotary_dim=12, mrope_section=(2, 2, 2))
    layer = StepLayer.make(Shape(), [33], rope=rope, fused=fused)
    engine = PagedEngine(Shape(), 1, 48, with_positions=True)
    truth = layer.truth(0)
    for first, last in [(0, 7), (7, 8), (8, 9), (9, 30), (30, 33)]:
        output, _ = layer.run(engine, [0], [last - first], [last])
        assert_close(output[: last - first], truth[first:last])


@pytest.mark.parity("P11")
def test_positions_of_every_rank_that_vllm_passes_mean_the_same():
    layer = StepLayer.make(Shape(), [9])
    outputs = []
    for shape in ((12,), (1, 12), (3, 12)):
        engine = PagedEngine(Shape(), 1, 16)
        plan = engine.step([0], [9], [9])
        qkv, index_qk, _ = layer.rows_of([0], [9], [9], 3)  # more rows than the plan has
        positions = torch.arange(12).expand(shape)
        prepared = prepare_step(
            layer.options, qkv, index_qk, positions, layer.rope, layer.norms, engine.caches, plan
        )
        outputs.append((prepared.query, prepared.index_query, engine.main))
    for other in outputs[1:]:
        for one, two in zip(outputs[0], other):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="positions"):
        prepare_step(
            layer.options, qkv, index_qk, torch.arange(24).view(2, 12), layer.rope, layer.norms,
            engine.caches, plan,
        )  # fmt: skip


@pytest.mark.parity("P17", "P33")
def test_reused_rows_keep_the_tokens_in_between_and_move_as_wholes():
    lengths = [27, 34]
    layer = StepLayer.make(Shape(), lengths)
    engine = PagedEngine(Shape(), 2, 48)
    _, rows = layer.run(engine, [0, 1], [22, 29], [22, 29])
    rows = rows.index_select(0, torch.tensor([21, 50]))  # each request's last row, as vLLM does
    frozen = rows.clone()
    for step in range(1, 6):
        seq_lens = [22 + step, 29 + step]
        output, kept = layer.run(engine, [0, 1], [1, 1], seq_lens, rows, reused=True)
        assert torch.equal(kept, frozen)
        for request, length in enumerate(seq_lens):
            expected = layer.reused_truth(request, length - 1, frozen[request])
            assert_close(output[request], expected)


@pytest.mark.parity("P17")
def test_reused_rows_still_update_both_caches():
    layer = StepLayer.make(Shape(), [24])
    fresh, reused = PagedEngine(Shape(), 1, 32), PagedEngine(Shape(), 1, 32)
    _, rows = layer.run(fresh, [0], [20], [20])
    layer.run(reused, [0], [20], [20])
    rows = rows[19:20]
    for length in range(21, 25):
        layer.run(fresh, [0], [1], [length])
        layer.run(reused, [0], [1], [length], rows, reused=True)
    assert torch.equal(fresh.pool, reused.pool)
    assert torch.equal(fresh.ring.view(torch.int32), reused.ring.view(torch.int32))


@pytest.mark.parity("P05", "P15", "P28", "P42")
@pytest.mark.parametrize("storage", [torch.uint8, torch.float8_e4m3fn])
def test_fp8_caches_hold_the_same_bytes_on_both_paths(storage):
    layers = [StepLayer.make(Shape(), [29], fused=fused) for fused in (True, False)]
    engines = [
        PagedEngine(Shape(), 1, 32, main_dtype=storage, index_dtype=torch.float8_e4m3fn)
        for _ in layers
    ]
    scales = torch.tensor(0.5), torch.tensor(2.0)
    for layer, engine in zip(layers, engines):
        for first, last in [(0, 13), (13, 29)]:
            plan = engine.step([0], [last - first], [last])
            rows = layer.rows_of([0], [last - first], [last], 0)
            prepare_step(
                layer.options, *rows, layer.rope, layer.norms, engine.caches, plan, *scales
            )
    assert torch.equal(engines[0].pool, engines[1].pool)
    assert (engines[0].pool != 0xFF).any()


@pytest.mark.parity("P14")
@pytest.mark.parametrize("missing", ["qkv", "slot_mapping"])
def test_a_step_without_its_inputs_is_refused_by_name(missing):
    layer = StepLayer.make(Shape(), [8])
    engine = PagedEngine(Shape(), 1, 16)
    plan = engine.step([0], [8], [8])
    qkv, index_qk, positions = layer.rows_of([0], [8], [8], 0)
    if missing == "qkv":
        qkv = None
    else:
        plan = dataclasses.replace(plan, main_slots=None)
    with pytest.raises(ValueError, match=f"^{missing}: "):
        prepare_step(
            layer.options, qkv, index_qk, positions, layer.rope, layer.norms, engine.caches, plan
        )


@pytest.mark.parity("P18")
def test_selection_rows_of_another_shape_are_refused():
    layer = StepLayer.make(Shape(), [8])
    engine = PagedEngine(Shape(), 1, 16)
    wrong = torch.zeros(8, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="selection rows"):
        layer.run(engine, [0], [8], [8], wrong)


@pytest.mark.parity("P39", "P44")
def test_host_integers_of_the_plan_choose_schedules_alone():
    layer = StepLayer.make(Shape(), [25])
    plain, steered = (
        layer.run(PagedEngine(Shape(), 1, 32), [0], [25], [25], **steering)
        for steering in ({}, {"max_query_len": 1, "max_seq_len": 9999})
    )
    for one, other in zip(plain, steered):
        assert torch.equal(one, other)
