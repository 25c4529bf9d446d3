"""Our layer beside vLLM's own, with the same weights, over prefill, chunks and decodes.

Claims: keys, values and rings hold the same bytes; both select the same blocks but for scores
within rounding of the cut; where the selection is the same, both outputs keep the bound that
float64 attention derives; rows that only pad come out as zeros; the caches ask for the same bytes.
"""

from __future__ import annotations

import pytest
import torch
from harness import (
    Side,
    StockAttention,
    checkpoint,
    engine_config,
    finish_loading,
    load,
    text_config,
)

from flash_qsa.integrations.vllm import selection
from flash_qsa.integrations.vllm.owner import QSAAttention
from flash_qsa.ops.fp8 import from_storage
from flash_qsa.testing.compare import attention_truth, within_bound
from flash_qsa.testing.inputs import Shape

SHAPE = Shape(
    heads=4, kv_heads=2, head_dim=128, index_heads=2, index_dim=128, page_size=48,
    ring_capacity=4,
)  # fmt: skip
STEPS = (
    ([0], [29], [29], {}),
    ([0, 1], [1, 22], [30, 22], {}),
    ([1, 2, 0], [1, 13, 9], [23, 13, 39], {}),
    ([0, 1, 2], [1, 1, 1], [40, 24, 14], {"padded_rows": 1, "padded_requests": 1}),
    ([0, 1, 2], [1, 1, 1], [41, 25, 15], {}),
)


@pytest.mark.parity("P13", "P21", "P26", "P29", "P32", "P38", "P46")
@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_both_layers_agree_over_a_serving_run(kv, fused):
    config = text_config()
    additional = {"flash_qsa": {"fused_prepare": fused}}
    index = "fp8" if kv == "fp8" else "bf16"
    sides = [
        Side(kind, engine_config(config, kv=kv, index=index, additional=additional), SHAPE, 3, 48)
        for kind in (StockAttention, QSAAttention)
    ]
    weights = checkpoint(config)
    for side in sides:
        load(side.layer, weights)
    packed = [side.layer.qkv_proj.weight for side in sides]
    assert torch.equal(*packed)
    for side in sides:
        finish_loading(side.layer)
    alike = total = 0
    for number, (which, query_lens, seq_lens, padding) in enumerate(STEPS):
        generator = torch.Generator().manual_seed(number)
        rows = sum(query_lens) + padding.get("padded_rows", 0)
        hidden = torch.randn(rows, config.hidden_size, generator=generator).bfloat16()
        at = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens)])
        at = torch.cat((at, torch.zeros(rows - len(at), dtype=at.dtype)))
        positions = torch.stack((at, at // 2, at // 3))
        for side in sides:
            metadata = side.metadata(which, query_lens, seq_lens, **padding)
            projected = side.forward(metadata, positions, hidden)
        real = sum(query_lens)
        same = check_step(sides, metadata, real)
        alike, total = alike + int(same.sum()), total + real
        assert (projected[real:] == 0).all()
        check_outputs(sides, metadata, same.nonzero().flatten().tolist())
    assert alike >= 0.9 * total
    assert sides[1].memory.null_block_untouched()


def check_step(sides, metadata, real: int) -> torch.Tensor:
    """Compares caches and selections after a step; returns which rows selected alike."""
    stock, ours = (side.memory for side in sides)
    assert torch.equal(stock.main[1:].view(torch.uint8), ours.main[1:].view(torch.uint8))
    assert torch.equal(stock.ring[1:].view(torch.int16), ours.ring[1:].view(torch.int16))

    layer = sides[1].layer
    plan = metadata[sides[1].key_name]
    top_k = layer.qsa.top_k
    rows = layer.topk_indices_buffer[:real]
    chosen = selection.blocks(rows, top_k)
    theirs = stock_blocks(sides[0].layer.topk_indices_buffer[:real], plan, layer.qsa, real)
    buffer = layer.topk_indices_buffer[: plan.num_actual_tokens]
    expanded = layer.indexer.expand(buffer, _plan(sides[1], metadata))
    assert expanded.shape == (plan.num_actual_tokens, layer.indexer.packed_output_width)
    same = (chosen == theirs).all(1)
    listed = sides[0].layer.topk_indices_buffer[:real]  # in the order of vLLM's top-k
    assert torch.equal(expanded[:real, -1], listed[:, -1])
    assert torch.equal(
        expanded[:real, :-1][same].sort(1).values, listed[:, :-1][same].sort(1).values
    )
    for row in (~same).nonzero().flatten().tolist():
        assert_near_tie(sides, metadata, row, chosen[row], theirs[row])
    return same


def stock_blocks(tokens: torch.Tensor, plan, qsa, real: int) -> torch.Tensor:
    """Block ids, ascending, of vLLM's token lists."""
    out = torch.full((real, qsa.top_k), -1, dtype=torch.int32)
    for row in range(real):
        limit = int(plan.visible_blocks[row]) * qsa.compress_ratio
        listed = tokens[row, : int(tokens[row, -1])]
        blocks = (listed[listed < limit] // qsa.compress_ratio).unique()
        out[row, : len(blocks)] = blocks
    return out


def assert_near_tie(sides, metadata, row: int, chosen, theirs) -> None:
    """vLLM rotates index heads in BF16 arithmetic: a product and a sum more are rounded, on the
    query's side and on the key's. Its scores move by three BF16 roundings of Σ|q||k| at most, and
    the blocks in which the selections differ must lie within twice that."""
    keys = [from_storage(side.memory.compressed).double() for side in sides]
    plan = metadata[sides[1].key_name]
    table = plan.block_table[int(plan.token_to_req[row])].long()
    per_page = keys[1].shape[1]
    query = _index_query(sides[1], row)

    only_ours = [b for b in chosen.tolist() if b not in theirs.tolist()]
    only_theirs = [b for b in theirs.tolist() if b not in chosen.tolist()]
    ids = torch.tensor(only_ours + only_theirs)
    picked = keys[1][table[ids // per_page], ids % per_page, 0]
    scores = torch.einsum("hd,nd->nh", query, picked).relu().sum(1)
    reach = torch.einsum("hd,nd->n", query.abs(), picked.abs()).max()
    assert float(scores.max() - scores.min()) <= 2 * 3 * 2.0**-8 * float(reach)


def _index_query(side, row: int) -> torch.Tensor:
    return from_storage(side.seen["prepared"].index_query[row]).double()


def check_outputs(sides, metadata, rows: list[int]) -> None:
    """Rows with one selection: both outputs within float64's bound, over each side's own cache."""
    layer, plan = sides[1].layer, metadata[sides[1].key_name]
    prepared, size = sides[1].seen["prepared"], SHAPE.page_size
    listed = sides[0].layer.topk_indices_buffer
    tokens = [listed[row, : int(listed[row, -1])].long() for row in rows]
    cells = []
    for row, token in zip(rows, tokens):
        table = plan.block_table[int(plan.token_to_req[row])].long()
        cells.append(torch.stack((table[token // size], token % size), -1))
    for side in sides:
        keys, values = side.memory.main.chunk(2, -1)
        truth = attention_truth(
            prepared.query[rows], keys, values, tokens, cells, layer.scaling, prepared.gate[rows]
        )
        found = within_bound(side.seen["output"][rows], truth.out, truth.bound)
        assert found.ok, (side.ours, found)


def _plan(side, metadata):
    from flash_qsa.integrations.vllm.metadata import batch_plan

    return batch_plan(
        metadata[side.main_name], metadata[side.ring_name], metadata[side.key_name], 4
    )
