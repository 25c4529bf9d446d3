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

from flash_qsa.config import RopeConfig
from flash_qsa.integrations.vllm import selection
from flash_qsa.integrations.vllm.step import (
    StepOptions,
    attend_step,
    prepare_step,
    select_step,
)
from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.oracle import Oracle
from flash_qsa.testing.vllm_layout import PagedEngine

ROPE = RopeConfig(theta=1e4, rotary_dim=8, max_positions=256)


@dataclasses.dataclass
class Layer:
    """Random weights, the projections of whole requests, and the oracle's answer to them."""

    shape: Shape
    options: StepOptions
    rope: RopeTable
    norms: Norms
    qkv: list[torch.Tensor]
    index_qk: list[torch.Tensor]
    positions: list[torch.Tensor]

    @classmethod
    def make(cls, shape: Shape, lengths: list[int], *, rope: RopeConfig = ROPE, **options):
        generator = torch.Generator().manual_seed(7)

        def noise(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        norms = Norms(
            *(0.2 * noise(dim) for dim in (shape.index_dim,) * 2 + (shape.head_dim,) * 2), 1e-6
        )
        width = 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
        positions = [torch.arange(n) for n in lengths]
        if rope.mrope_section:
            positions = [torch.stack((p, p // 2 + 3, p // 3 + 1), -1) for p in positions]
        return cls(
            shape,
            StepOptions(shape.top_k, shape.ratio, shape.head_dim**-0.5, **options),
            RopeTable.from_config(rope, torch.float32),
            norms,
            [noise(n, width) for n in lengths],
            [noise(n, (shape.index_heads + 1) * shape.index_dim) for n in lengths],
            positions,
        )

    def oracle(self, request: int) -> torch.Tensor:
        shape = self.shape
        oracle = Oracle(
            self.rope, self.norms, shape.heads, shape.kv_heads, shape.head_dim,
            shape.index_heads, shape.index_dim, shape.ratio, shape.top_k,
        )  # fmt: skip
        return oracle.run(self.qkv[request], self.index_qk[request], self.positions[request]).out

    def rows_of(self, which, query_lens, seq_lens, padding):
        """The step's projections and positions; padding is NaN and an impossible position."""

        def gather(tensors, fill):
            parts = [
                tensors[request][length - count : length]
                for request, count, length in zip(which, query_lens, seq_lens)
            ]
            return torch.cat((*parts, torch.full((padding, *parts[0].shape[1:]), fill)))

        positions = gather(self.positions, 10**6)
        return (
            gather(self.qkv, float("nan")),
            gather(self.index_qk, float("nan")),
            positions if positions.dim() == 1 else positions.t(),
        )

    def run(self, engine, which, query_lens, seq_lens, rows=None, *, padded=0, reused=False):
        """One step; returns output [T, Hq, D] and the selection rows."""
        plan = engine.step(
            which, query_lens, seq_lens, padded_rows=padded, padded_requests=int(padded > 0)
        )
        qkv, index_qk, positions = self.rows_of(which, query_lens, seq_lens, padded)
        prepared = prepare_step(
            self.options, qkv, index_qk, positions, self.rope, self.norms, engine.caches, plan
        )
        if rows is None:
            rows = torch.full((plan.num_rows, selection.row_width(self.shape.top_k)), 0x7FFFFFFF)
            rows = rows.int()
            compressed = engine.caches.compressed
            select_step(
                self.options, prepared.index_query, compressed, plan.page_table, plan, rows, True
            )
        output = torch.full((plan.num_rows + 3, self.shape.heads, self.shape.head_dim), torch.nan)
        attend_step(self.options, prepared, engine.caches.main, plan, rows, output, reused=reused)
        return output, rows


def assert_close(result: torch.Tensor, truth: torch.Tensor) -> None:
    """FP32 through norm, rotation and softmax of unit-scale values: 2^-24 times some hundreds."""
    torch.testing.assert_close(result.double(), truth, atol=2e-5, rtol=2e-5)


@pytest.mark.parity("P08", "P10", "P13", "P16", "P33", "P38")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("page", [16, 48])
def test_chunks_decodes_and_padding_give_the_oracles_rows(fused, page):
    lengths = [41, 18, 30]
    shape = dataclasses.replace(Shape(), page_size=page)
    layer = Layer.make(shape, lengths, fused=fused)
    engine = PagedEngine(shape, 3, 64)
    truth = [layer.oracle(request) for request in range(3)]
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
    layer = Layer.make(Shape(), [33], rope=rope, fused=fused)
    engine = PagedEngine(Shape(), 1, 48, with_positions=True)
    truth = layer.oracle(0)
    for first, last in [(0, 7), (7, 8), (8, 9), (9, 30), (30, 33)]:
        output, _ = layer.run(engine, [0], [last - first], [last])
        assert_close(output[: last - first], truth[first:last])


@pytest.mark.parity("P17", "P33")
def test_reused_rows_keep_the_tokens_in_between_and_move_as_wholes():
    lengths = [27, 34]
    layer = Layer.make(Shape(), lengths)
    engine = PagedEngine(Shape(), 2, 48)
    _, rows = layer.run(engine, [0, 1], [22, 29], [22, 29])
    rows = rows.index_select(0, torch.tensor([21, 50]))  # each request's last row, as vLLM does
    frozen = rows.clone()
    for step in range(1, 6):
        seq_lens = [22 + step, 29 + step]
        output, kept = layer.run(engine, [0, 1], [1, 1], seq_lens, rows, reused=True)
        assert torch.equal(kept, frozen)
        for request, length in enumerate(seq_lens):
            expected = reused_truth(layer, request, length - 1, frozen[request])
            assert_close(output[request], expected)


def reused_truth(layer: Layer, request: int, token: int, row: torch.Tensor) -> torch.Tensor:
    """The frozen blocks, and every token from the first one that the selection had not seen."""
    shape = layer.shape
    oracle = Oracle(
        layer.rope, layer.norms, shape.heads, shape.kv_heads, shape.head_dim,
        shape.index_heads, shape.index_dim, shape.ratio, shape.top_k,
    )  # fmt: skip
    rows = oracle.rows(layer.qkv[request], layer.index_qk[request], layer.positions[request])
    blocks = [b for b in row[: shape.top_k].tolist() if b >= 0]
    tokens = [b * shape.ratio + i for b in blocks for i in range(shape.ratio)]
    tokens += range(int(row[-1]) * shape.ratio, token + 1)
    return oracle.attend(rows.query[token], rows.gate[token], rows.key, rows.value, tokens)


@pytest.mark.parity("P17")
def test_reused_rows_still_update_both_caches():
    layer = Layer.make(Shape(), [24])
    fresh, reused = PagedEngine(Shape(), 1, 32), PagedEngine(Shape(), 1, 32)
    _, rows = layer.run(fresh, [0], [20], [20])
    layer.run(reused, [0], [20], [20])
    rows = rows[19:20]
    for length in range(21, 25):
        layer.run(fresh, [0], [1], [length])
        layer.run(reused, [0], [1], [length], rows, reused=True)
    assert torch.equal(fresh.pool, reused.pool)
    assert torch.equal(fresh.ring.view(torch.int32), reused.ring.view(torch.int32))


@pytest.mark.parity("P05", "P28", "P42")
@pytest.mark.parametrize("storage", [torch.uint8, torch.float8_e4m3fn])
def test_fp8_caches_hold_the_same_bytes_on_both_paths(storage):
    layers = [Layer.make(Shape(), [29], fused=fused) for fused in (True, False)]
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
@pytest.mark.parametrize("missing", ["qkv", "main_slots"])
def test_a_step_without_its_inputs_is_refused_by_name(missing):
    layer = Layer.make(Shape(), [8])
    engine = PagedEngine(Shape(), 1, 16)
    plan = engine.step([0], [8], [8])
    qkv, index_qk, positions = layer.rows_of([0], [8], [8], 0)
    if missing == "qkv":
        qkv = None
    else:
        plan = dataclasses.replace(plan, main_slots=None)
    with pytest.raises(ValueError, match="qkv|slot_mapping"):
        prepare_step(
            layer.options, qkv, index_qk, positions, layer.rope, layer.norms, engine.caches, plan
        )


@pytest.mark.parity("P18", "P41")
def test_selection_rows_of_another_shape_are_refused():
    layer = Layer.make(Shape(), [8])
    engine = PagedEngine(Shape(), 1, 16)
    wrong = torch.zeros(8, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="selection rows"):
        layer.run(engine, [0], [8], [8], wrong)


@pytest.mark.parity("P39", "P44")
def test_host_integers_of_the_plan_choose_schedules_alone():
    layer = Layer.make(Shape(), [25])
    first, second = PagedEngine(Shape(), 1, 32), PagedEngine(Shape(), 1, 32)
    plan = first.step([0], [25], [25])
    rows = layer.rows_of([0], [25], [25], 0)
    outputs = []
    for engine, steering in ((first, {}), (second, {"max_query_len": 1, "max_seq_len": 9999})):
        used = dataclasses.replace(engine.step([0], [25], [25]), **steering)
        prepared = prepare_step(layer.options, *rows, layer.rope, layer.norms, engine.caches, used)
        chosen = torch.empty(25, selection.row_width(4), dtype=torch.int32)
        select_step(
            layer.options, prepared.index_query, engine.caches.compressed, used.page_table, used,
            chosen, False,
        )  # fmt: skip
        output = torch.empty(25, 4, 32)
        attend_step(layer.options, prepared, engine.caches.main, used, chosen, output)
        outputs.append((chosen[:, :4], output))
    assert plan.max_query_len == 25
    for one, other in zip(*outputs):
        assert torch.equal(one, other)
