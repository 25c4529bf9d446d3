"""select_blocks' kernels in Triton's interpreter, against the specification, exactly.

Claims: every schedule (decode, prefill, rows in registers, grouped rows, rows whose survivors do
not fit at once) selects what the reference selects where scores are exact in FP32; unused memory
(NaN) is never read into a result; every element of the output is written; nothing around it is.

Scores are sums of products of small integers, so that every order of summation gives the same bits
and ties are everywhere.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_qsa import ops
from flash_qsa.ops.select_blocks import kernel
from flash_qsa.ops.select_blocks.reference import select_blocks as specification
from flash_qsa.ops.select_blocks.tiles import Phase
from flash_qsa.testing.inputs import Shape, make_problem, score_dial

GARBAGE = 0x7FFFFFFF
REGISTERS = {"group": 1, "units": 512, "num_warps": 4}
GROUPED = {"group": 4, "units": 128, "slack": 4, "survivors": 32, "chunk": 16, "num_warps": 4}
COARSE = {"group": 16, "units": 32, "slack": 2, "survivors": 16, "chunk": 4, "num_warps": 4}


def whole_numbers(problem, values=3):
    """Replaces index queries and keys by small integers, keeping NaN where it was."""
    generator = torch.Generator().manual_seed(7)
    for tensor in (problem.index_query, problem.key_cache):
        drawn = torch.randint(-1, values - 1, tensor.shape, generator=generator)
        tensor.copy_(torch.where(tensor.isnan(), tensor, drawn.to(tensor.dtype)))
    return problem


def run(problem, top_k, *, first=None, tuning=None, workspace=1 << 20, plan=True):
    """The kernel's answer between guard columns, which must survive, and the specification's."""
    given = problem.plan
    rows = given.num_rows
    guarded = torch.full((rows + 1, top_k + 2), GARBAGE, dtype=torch.int32)
    arguments = (
        problem.index_query,
        problem.key_cache,
        given.page_table,
        given.request_ids,
        given.visible_blocks,
        first,
        given if plan else None,
        workspace,
    )
    kernel.launch(*arguments, guarded[:rows, :top_k], tuning=tuning)
    assert (guarded[:, top_k:] == GARBAGE).all() and (guarded[rows] == GARBAGE).all()
    want = torch.empty(rows, top_k, dtype=torch.int32)
    specification(*arguments, want)
    return guarded[:rows, :top_k], want


def assert_equal(pair):
    got, want = pair
    wrong = (got != want).any(1).nonzero().flatten().tolist()
    assert not wrong, f"row {wrong[0]}: {got[wrong[0]].tolist()}, want {want[wrong[0]].tolist()}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.uint8))
@pytest.mark.parametrize("select", (REGISTERS, GROUPED, COARSE), ids=("row", "groups", "coarse"))
@pytest.mark.bug("O-03")
def test_decode_rows_select_as_specified(dtype, select):
    problem = make_problem([700, 61, 1301], [1, 1, 1], Shape(), dtype=torch.float16, padding=1)
    whole_numbers(problem)
    if dtype != torch.float16:
        convert = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
        problem.__dict__["index_query"] = problem.index_query.to(convert).view(dtype)
        problem.__dict__["key_cache"] = problem.key_cache.to(convert).view(dtype)
    assert_equal(run(problem, 7, tuning={"select": select, "score": {"splits": 2}}))


@pytest.mark.parametrize("splits", (1, 3, 40))
@pytest.mark.parametrize("page_size", (4, 24, 160, 512))
def test_pages_of_every_size_and_cells_of_every_width(splits, page_size, monkeypatch):
    if page_size == 24:
        monkeypatch.setattr(kernel, "NARROW_REACH", 0)  # cells of 64 bits
    shape = Shape(page_size=page_size, index_dim=20 if page_size == 160 else 16)
    problem = make_problem([1400, 61, 1301], [1, 1, 1], shape, dtype=torch.float16)
    whole_numbers(problem)
    first = torch.tensor([70, 0, 3], dtype=torch.int32)
    tuning = {"select": GROUPED, "score": {"splits": splits}}
    assert_equal(run(problem, 7, first=first, tuning=tuning))


@pytest.mark.parametrize("rows", (1, 30), ids=("decode", "prefill"))
def test_a_sequence_that_is_one_page(rows):
    """Its length is no constant of the kernels: see tests/compile/test_growing.py."""
    problem = make_problem([1401, 1301], [rows, rows], Shape(page_size=1404), dtype=torch.float16)
    whole_numbers(problem)
    first_page = problem.plan.page_table[:, :1]
    problem = dataclasses.replace(
        problem, plan=dataclasses.replace(problem.plan, page_table=first_page)
    )
    tuning = {"select": GROUPED, "phases": [Phase(0, 2 * rows, rows == 1, rows)]}
    assert_equal(run(problem, 7, tuning=tuning, plan=False))


@pytest.mark.parametrize("dense", (True, False), ids=("prefill", "plain"))
@pytest.mark.parametrize("select", (REGISTERS, COARSE), ids=("row", "coarse"))
@pytest.mark.bug("O-06", "O-08")
def test_prefill_rows_select_as_specified(dense, select):
    problem = make_problem([180, 101], [13, 9], Shape(), dtype=torch.float16, padding=2)
    whole_numbers(problem)
    tuning = {"select": select, "score": {"splits": 1}, "phases": [Phase(0, 24, False, 12)]}
    if not dense:
        tuning["dense"] = None
    first = torch.randint(-3, 40, (24,), generator=torch.Generator().manual_seed(1)).int()
    assert_equal(run(problem, 5, first=first if select is COARSE else None, tuning=tuning))


@pytest.mark.bug("O-01", "O-02", "O-05")
@pytest.mark.parametrize("select", (REGISTERS, COARSE), ids=("row", "coarse"))
def test_concentrated_scores_and_every_length(select):
    steps = torch.randperm(500, generator=torch.Generator().manual_seed(2)).double()
    scores = (1 + steps * 2.0**-20).float()
    scores[100:200] = scores[100]
    query, cache, table = score_dial(scores, Shape())
    visible = torch.tensor([-1, 0, 1, 7, 8, 9, 150, 500, 900], dtype=torch.int32)
    rows = visible.numel()
    got = torch.full((rows, 8), GARBAGE, dtype=torch.int32)
    want = torch.empty_like(got)
    arguments = (query.expand(rows, -1, -1), cache, table, torch.zeros(rows, dtype=torch.int32))
    arguments += (visible, None, None, 1 << 20)
    phases = [Phase(0, rows, True, 3)]
    kernel.launch(
        *arguments, got, tuning={"select": select, "phases": phases, "score": {"splits": 1}}
    )
    specification(*arguments, want)
    assert_equal((got, want))


@pytest.mark.bug("O-04")
@pytest.mark.parametrize("select", (REGISTERS, COARSE), ids=("row", "coarse"))
def test_nan_infinity_missing_pages_and_unknown_requests(select):
    problem = make_problem([400, 200], [4, 4], Shape(), dtype=torch.float32)
    whole_numbers(problem)
    cache, table = problem.key_cache, problem.plan.page_table
    cache[table[0, 3:18].long()] = float("nan")
    cache[table[0, 19].long(), 1, 0, 0] = float("inf")
    cache[table[0, 20].long(), 2, 0, 0] = float("-inf")
    table[1, 2:] = -1
    table[1, 1] = 1 << 30
    problem.plan.request_ids[6] = 2
    problem.plan.request_ids[7] = -1
    tuning = {"select": {**select, "survivors": 64}, "score": {"splits": 1}}
    got, want = run(problem, 30, plan=select is COARSE, tuning=tuning)
    assert_equal((got, want))
    assert (got[6:] == -1).all() and got[5, :4].tolist() == [0, 1, 2, 3]


@pytest.mark.bug("O-52")
def test_chunks_of_rows_and_a_given_buffer_change_nothing():
    problem = whole_numbers(make_problem([300], [6], Shape(), dtype=torch.float16))
    tuning = {"select": COARSE, "score": {"splits": 1}}
    buffer = torch.empty(4001, dtype=torch.uint8)[1:]
    for phase in (Phase(0, 6, True, 1), Phase(0, 6, False, 6)):
        both = tuning | {"phases": [phase], "dense": None}
        assert_equal(run(problem, 5, tuning=both, workspace=buffer))
    with pytest.raises(ValueError, match="workspace"):
        run(problem, 5, tuning=tuning, workspace=1000)


def test_the_public_function_reaches_the_kernel():
    problem = whole_numbers(make_problem([60, 9], [4, 1], Shape(), dtype=torch.float16))
    plan = problem.plan
    arguments = (problem.index_query, problem.key_cache, plan.page_table, plan.request_ids)
    arguments += (plan.visible_blocks, 4)
    got = ops.select_blocks(*arguments, plan=plan, backend="triton")
    assert torch.equal(got, ops.select_blocks(*arguments, backend="reference"))


def test_a_uniform_long_chunk_may_be_planned_as_decodes():
    """Its rows are too many for the decode schedule; the other one must have their keys."""
    shape = Shape(4, 1, index_heads=4, index_dim=32, page_size=16, top_k=8)
    problem = make_problem([420], [150], shape, dtype=torch.float16)
    plan = dataclasses.replace(
        problem.plan, num_decodes=1, num_decode_tokens=150, decode_query_len=150
    )
    args = (
        problem.index_query,
        problem.key_cache,
        plan.page_table,
        plan.request_ids,
        plan.visible_blocks,
        8,
    )
    want = ops.select_blocks(*args, backend="reference")
    got = ops.select_blocks(*args, plan=plan, backend="triton")
    assert torch.equal(got, want)


@pytest.mark.parametrize("rows", ([30], [9, 21]), ids=("one request", "two"))
@pytest.mark.parametrize("dense", (True, False), ids=("prefill", "plain"))
def test_vectors_may_be_expanded_or_strided(rows, dense):
    """One request's ids may be a single number expanded to all rows; numbers may lie apart."""
    problem = whole_numbers(make_problem([403] * len(rows), rows, Shape(), dtype=torch.float16))
    plan = problem.plan

    def apart(tensor):
        wide = torch.full((*tensor.shape, 3), -5, dtype=tensor.dtype)
        wide[..., 1] = tensor
        return wide[..., 1]

    ids = plan.request_ids
    expanded = ids[:1].expand_as(ids) if len(rows) == 1 else apart(ids)
    views = {"request_ids": expanded}
    for name in ("visible_blocks", "page_table", "seq_lens"):
        views[name] = apart(getattr(plan, name))
    assert not (expanded.is_contiguous() or views["visible_blocks"].is_contiguous())
    problem = dataclasses.replace(problem, plan=dataclasses.replace(plan, **views))
    first = apart(torch.arange(plan.num_rows, dtype=torch.int32) % 5)
    tuning = {"select": GROUPED} if dense else {"select": GROUPED, "dense": None}
    for plan_given in (True, False):
        assert_equal(run(problem, 12, first=first, tuning=tuning, plan=plan_given))
