"""A layer's step on vLLM's layout inside a captured graph.

Claims: captured once, with padded rows and requests, and replayed over later steps whose metadata
was rewritten in place, the graph gives the float64 oracle's rows; draft windows and reused
selections too; the null blocks stay untouched; page sizes of 64, 160 and 784 work. What profiling
reserves holds what a step takes.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_qsa.integrations.vllm import selection
from flash_qsa.integrations.vllm.profiling import LayerSizes, scratch_bytes
from flash_qsa.integrations.vllm.step import (
    StepOptions,
    attend_step,
    prepare_step,
    select_step,
)
from flash_qsa.integrations.vllm.warmup import StepShape, padding_plan
from flash_qsa.ops.prepare.api import Prepared
from flash_qsa.targets import device_target
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.vllm_layout import PagedEngine
from flash_qsa.testing.vllm_step import StepLayer

DEVICE = "cuda"


@pytest.mark.parity("P10", "P13", "P38")
@pytest.mark.parametrize("page", [64, 160, 784])
@pytest.mark.parametrize("drafts", [1, 4])
def test_a_captured_step_replays_over_later_steps(page, drafts):
    shape = dataclasses.replace(Shape(), page_size=page)
    lengths = [40, 33]
    layer = StepLayer.make(shape, lengths, device=DEVICE)
    engine = PagedEngine(shape, 2, 200, device=DEVICE)
    truth = [layer.truth(request).to(DEVICE) for request in range(2)]
    layer.run(engine, [0, 1], [20, 13], [20, 13])

    padding = {"padded_rows": drafts, "padded_requests": 1}
    batch = [0, 1], [drafts, drafts]
    static = copied(engine.step(*batch, [20 + drafts, 13 + drafts], **padding))
    static = dataclasses.replace(static, max_seq_len=max(lengths))  # the bound of every replay
    inputs = layer.rows_of(*batch, [20 + drafts, 13 + drafts], drafts)
    rows = torch.empty(
        static.num_rows, selection.row_width(shape.top_k), dtype=torch.int32, device=DEVICE
    )
    output = torch.full((static.num_rows, shape.heads, shape.head_dim), torch.nan, device=DEVICE)

    def step() -> None:
        prepared = prepare_step(
            layer.options, *inputs, layer.rope, layer.norms, engine.caches, static
        )
        select_step(
            layer.options, prepared.index_query, engine.caches.compressed, static.page_table,
            static, rows, True,
        )  # fmt: skip
        attend_step(layer.options, prepared, engine.caches.main, static, rows, output)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for ahead in range(drafts, 20, drafts):
        seq_lens = [20 + ahead, 13 + ahead]
        rewrite(static, engine.step(*batch, seq_lens, **padding))
        for old, new in zip(inputs, layer.rows_of(*batch, seq_lens, drafts)):
            old.copy_(new)
        output.fill_(torch.nan)
        graph.replay()
        for request, length in enumerate(seq_lens):
            got = output[request * drafts : (request + 1) * drafts].double()
            torch.testing.assert_close(
                got, truth[request][length - drafts : length], atol=2e-5, rtol=2e-5
            )
        assert (output[2 * drafts :] == 0).all()
    assert engine.null_block_untouched()


@pytest.mark.parity("P17")
def test_reused_rows_on_the_device():
    layer = StepLayer.make(Shape(), [27, 34], device=DEVICE)
    engine = PagedEngine(Shape(), 2, 48, device=DEVICE)
    _, rows = layer.run(engine, [0, 1], [22, 29], [22, 29])
    frozen = rows.index_select(0, torch.tensor([21, 50], device=DEVICE))
    for drafted in range(1, 6):
        seq_lens = [22 + drafted, 29 + drafted]
        output, _ = layer.run(engine, [0, 1], [1, 1], seq_lens, frozen, reused=True)
        for request, length in enumerate(seq_lens):
            expected = layer.reused_truth(request, length - 1, frozen[request].cpu())
            torch.testing.assert_close(
                output[request].double().cpu(), expected, atol=2e-5, rtol=2e-5
            )


@pytest.mark.parity("P36")
@pytest.mark.parametrize(
    "batch",
    [
        StepShape(1, 2048, 8192, False),
        StepShape(1, 4096, 4096, False),
        StepShape(64, 1, 65_536, True),
        StepShape(16, 4, 16_384, True),
    ],
    ids=str,
)
def test_profiled_scratch_holds_what_a_step_takes(batch):
    bf16, options = torch.bfloat16, StepOptions(512, 4, 256**-0.5)
    sizes = LayerSizes(24, 2, 256, 4, 128, 64, 8, bf16, bf16, bf16)

    def zeros(*shape, dtype=bf16):
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    plan = padding_plan(
        batch, batch.seq_len // 64, ratio=4, page_size=64, ring_capacity=8,
        device=torch.device(DEVICE),
    )  # fmt: skip
    query, index_query = zeros(batch.rows, 24, 256), zeros(batch.rows, 4, 128)
    main, keys = zeros(4, 2, 64, 512), zeros(4, 16, 1, 128)
    rows = zeros(batch.rows, selection.row_width(512), dtype=torch.int32)
    output = zeros(batch.rows, 24, 256)

    def step() -> None:
        select_step(options, index_query, keys, plan.page_table, plan, rows, True)
        prepared = Prepared(query, query, index_query)
        attend_step(options, prepared, main, plan, rows, output)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    taken = torch.cuda.max_memory_allocated() - before
    reserved = scratch_bytes(sizes, options, (batch,), device_target(torch.device(DEVICE)))
    slack = 64 << 10  # the allocator rounds every tensor up to 512 bytes
    assert 0 < taken <= reserved + slack


def copied(plan):
    """A plan whose tensors are copies, at addresses of their own."""
    return dataclasses.replace(plan, **{k: v.clone() for k, v in tensors(plan).items()})


def rewrite(static, plan) -> None:
    for name, tensor in tensors(plan).items():
        getattr(static, name).copy_(tensor)


def tensors(plan) -> dict[str, torch.Tensor]:
    return {k: v for k, v in vars(plan).items() if isinstance(v, torch.Tensor)}
