"""The kernels on vLLM's memory layout, in the interpreter.

Claims: with block strides larger than a page, null blocks, padded rows and padded requests, a layer
that runs on the Triton kernels gives the float64 oracle's rows through prefill, chunk and decode,
and a reused selection covers the tokens in between; host integers of the plan, which choose
schedules, change no selected block.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.vllm_layout import PagedEngine
from flash_qsa.testing.vllm_step import StepLayer


@pytest.mark.parity("P10", "P13", "P17", "P20")
def test_kernels_serve_on_vllms_layout():
    lengths = [27, 14]
    layer = StepLayer.make(Shape(), lengths, backend="triton")
    engine = PagedEngine(Shape(), 2, 32)
    truth = [layer.truth(request) for request in range(2)]
    steps = (
        ([0], [18], [18], 0),
        ([0, 1], [1, 11], [19, 11], 2),
        ([0, 1], [1, 1], [20, 12], 1),
    )
    for which, query_lens, seq_lens, padded in steps:
        output, rows = layer.run(engine, which, query_lens, seq_lens, padded=padded)
        at = 0
        for request, count, length in zip(which, query_lens, seq_lens):
            expected = truth[request][length - count : length]
            torch.testing.assert_close(
                output[at : at + count].double(), expected, atol=2e-5, rtol=2e-5
            )
            at += count
        assert (output[at:] == 0).all()
    frozen = rows[:2].clone()
    for drafted in (1, 2):
        seq_lens = [20 + drafted, 12 + drafted]
        output, _ = layer.run(engine, [0, 1], [1, 1], seq_lens, frozen, reused=True)
        for request, length in enumerate(seq_lens):
            expected = layer.reused_truth(request, length - 1, frozen[request])
            torch.testing.assert_close(output[request].double(), expected, atol=2e-5, rtol=2e-5)
    assert engine.null_block_untouched()


@pytest.mark.parity("P39")
def test_host_integers_of_the_plan_choose_schedules_alone():
    layer = StepLayer.make(Shape(), [45], backend="triton")
    truth = layer.truth(0)
    selected = []
    for steering in ({}, {"max_query_len": 1}, {"max_seq_len": 100_000}):
        output, rows = layer.run(PagedEngine(Shape(), 1, 48), [0], [45], [45], **steering)
        torch.testing.assert_close(output[:45].double(), truth, atol=2e-5, rtol=2e-5)
        selected.append(rows)
    for rows in selected[1:]:
        assert torch.equal(rows, selected[0])
