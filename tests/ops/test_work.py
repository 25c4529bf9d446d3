"""A step's work follows its own rows and the budget, not the length of the context.

* Attention gathers as many tokens at 4,096 tokens as at 32,768.
* Compression reads the open group alone: everything else in the ring, and every compressed key
  that is finished, may be spoiled.
* Selection holds no more than its workspace, whatever the context, and gives the same answer.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from flash_qsa.ops import compress_keys, select_blocks, sparse_attention
from flash_qsa.testing.inputs import Shape, make_plan, make_problem

SHAPE = Shape(heads=2, kv_heads=1, head_dim=16, index_dim=16, top_k=8, page_size=64)


@pytest.mark.bug("O-53")
def test_attention_gathers_the_budget_whatever_the_context(monkeypatch):
    reference = importlib.import_module("flash_qsa.ops.sparse_attention.reference")
    gathered = []
    genuine = reference.gather_cells

    def counting(keys, values, page_row, cells):
        gathered.append(cells.numel())
        return genuine(keys, values, page_row, cells)

    monkeypatch.setattr(reference, "gather_cells", counting)
    for length in (4_096, 32_768):
        problem = make_problem([length], [1], SHAPE)
        plan = problem.plan
        sparse_attention(
            problem.query,
            problem.kv_cache,
            problem.block_ids(),
            plan.positions,
            plan.page_table,
            plan.request_ids,
            compress_ratio=SHAPE.ratio,
            backend="reference",
        )
    assert gathered == [SHAPE.top_k * SHAPE.ratio] * 2


@pytest.mark.bug("O-53")
@pytest.mark.parametrize("length", [8, 4_096, 32_768])
def test_compression_reads_one_open_group(length):
    """A decode row at the end of a group: three members in the ring, all else there is NaN."""
    ratio, capacity = SHAPE.ratio, SHAPE.ring_capacity
    table = torch.arange(-(-length // SHAPE.page_size)).int()[None]
    plan = make_plan([1], [length], table, SHAPE)
    ring = torch.full((1, capacity, 1, SHAPE.index_dim), float("nan"))
    members = torch.randn(ratio, SHAPE.index_dim)
    for member, position in enumerate(range(length - ratio, length - 1)):
        ring[0, position % capacity, 0] = members[member]
    pooled, first = compress_keys(
        members[-1:], plan.positions, ring, plan.ring_table, plan, backend="reference"
    )
    torch.testing.assert_close(pooled[0], members.mean(0))
    assert first.flatten().tolist() == [length - ratio] * 3


@pytest.mark.bug("O-52")
@pytest.mark.bug("O-54")
def test_scoring_keeps_to_its_workspace(monkeypatch):
    """What one chunk of rows holds (products of all heads, scores, ranks) fits the workspace."""
    reference = importlib.import_module("flash_qsa.ops.select_blocks.reference")
    held = []
    genuine = reference.score_blocks

    def counting(index_query, keys):
        rows, heads, _ = index_query.shape
        held.append(rows * keys.shape[0] * 8 * heads)
        return genuine(index_query, keys)

    monkeypatch.setattr(reference, "score_blocks", counting)
    problem = make_problem([8_192], [300], SHAPE)
    plan = problem.plan
    answers = []
    for workspace in (1 << 20, 8 << 20, 64 << 20):
        held.clear()
        answers.append(
            select_blocks(
                problem.index_query,
                problem.key_cache,
                plan.page_table,
                plan.request_ids,
                plan.visible_blocks,
                SHAPE.top_k,
                workspace=workspace,
                backend="reference",
            )
        )
        assert max(held) <= workspace
    assert all(torch.equal(answer, answers[0]) for answer in answers)
