"""select_blocks: the specification and its public function.

Claims:
    the formula is the sum over heads of ReLU(q · k), nothing else;
    blocks rank by (score descending, id ascending), NaN and missing pages below every number, and
    no candidate is lost however concentrated the scores are;
    ids are ascending, then -1; every element of the output is written;
    a row sees blocks first_block … visible_blocks - 1 of its own request and nothing else;
    the answer does not depend on page placement, other rows, chunking or the workspace;
    any K, ratio, page size, head count and dtype; what is not offered is refused by name.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa import QSAConfig, ops
from flash_qsa.checks import UnsupportedError
from flash_qsa.ops.select_blocks.reference import select_from_scores
from flash_qsa.testing.inputs import Shape, make_problem, score_dial

GARBAGE = 0x7FFFFFFF


def select(problem, top_k=None, **options):
    top_k = problem.shape.top_k if top_k is None else top_k
    plan = problem.plan
    out = torch.full((plan.num_rows, top_k), GARBAGE, dtype=torch.int32)
    return ops.select_blocks(
        problem.index_query,
        problem.key_cache,
        plan.page_table,
        plan.request_ids,
        plan.visible_blocks,
        top_k,
        out=out,
        backend="reference",
        **options,
    )


def select_dial(scores, visible, top_k, dtype=torch.float32):
    """Selections of rows that see visible[i] blocks whose scores are scores[b]."""
    shape = Shape()
    query, cache, table = score_dial(torch.as_tensor(scores), shape, dtype)
    rows = len(visible)
    return ops.select_blocks(
        query.expand(rows, -1, -1),
        cache,
        table,
        torch.zeros(rows, dtype=torch.int32),
        torch.tensor(visible, dtype=torch.int32),
        top_k,
        backend="reference",
    )


def from_logits(logits, visible, top_k):
    return select_from_scores(logits, torch.as_tensor(visible), top_k)


def brute_force(scores: list[float], visible: int, top_k: int, first: int = 0) -> list[int]:
    """The definition, in Python: sort by (score descending, id ascending), NaN last."""
    candidates = range(max(first, 0), visible)
    ranked = sorted(candidates, key=lambda b: (scores[b] != scores[b], -max(scores[b], 0.0), b))
    chosen = sorted(ranked[:top_k])
    return chosen + [-1] * (top_k - len(chosen))


@pytest.mark.bug("O-10")
@pytest.mark.parity("P02")
def test_score_is_the_sum_of_clipped_heads():
    query = torch.eye(4)[None]
    keys = torch.tensor([[3.0, -5, 0, 0], [1, 1, 0.5, 0], [1, 1, 1, 1]]).view(1, 3, 1, 4)
    zero = torch.zeros(1, dtype=torch.int32)
    args = (query, keys, zero[None], zero, zero + 3)
    assert ops.select_blocks(*args, 2, backend="reference").tolist() == [[0, 2]]
    assert ops.select_blocks(*args, 1, backend="reference").tolist() == [[2]]


@pytest.mark.bug("O-01")
@pytest.mark.parametrize("count", (512, 513, 4096, 4097, 16384, 30938, 65504, 262144))
def test_concentrated_scores_lose_no_candidate(count):
    generator = torch.Generator().manual_seed(count)
    steps = torch.randperm(count, generator=generator).float()
    logits = (1.0 + steps * 1e-6)[None]
    got = from_logits(logits, [count], 512)[0].long()
    assert (got[1:] > got[:-1]).all()
    want = logits[0].topk(512).values
    assert torch.equal(logits[0][got].sort().values, want.sort().values)
    assert torch.equal(from_logits(logits, [count], 512)[0].long(), got)


@pytest.mark.bug("O-02")
@pytest.mark.parametrize("top_k", (512, 1024, 2048))
def test_neighbouring_floats_are_told_apart(top_k):
    steps = torch.randperm(32768, generator=torch.Generator().manual_seed(1))
    logits = (1 + steps.double() * 2.0**-20).float()[None]
    got = from_logits(logits, [32768], top_k)[0]
    assert torch.equal(got.long(), (steps >= 32768 - top_k).nonzero().flatten())


@pytest.mark.bug("O-03")
def test_ties_at_the_cut_go_to_the_lowest_ids():
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(65536, generator=generator)
    logits = torch.zeros(65536)
    logits[order[:400]] = 2.0
    logits[order[400:1400]] = 1.0
    visible = torch.linspace(30_000, 65_536, 6).int()
    got = from_logits(logits.expand(6, -1), visible, 512)
    for row, count in enumerate(visible.tolist()):
        best = (logits[:count] == 2).nonzero().flatten()
        tied = (logits[:count] == 1).nonzero().flatten()[: 512 - best.numel()]
        want = torch.cat((best, tied)).sort().values
        assert torch.equal(got[row].long(), want)
        assert torch.equal(from_logits(logits[None], visible[row : row + 1], 512)[0], got[row])
    zeros = from_logits(torch.zeros(1, 2000), [2000], 512)
    assert zeros[0].tolist() == list(range(512))
    negative = from_logits(torch.tensor([[0.0, -0.0, 0.0, -0.0]]), [4], 2)
    assert negative.tolist() == [[0, 1]]


@pytest.mark.bug("O-04")
def test_nan_ranks_below_every_number():
    generator = torch.Generator().manual_seed(4)
    for share in (0.0, 0.01, 0.83, 1.0):
        logits = torch.rand(3000, generator=generator)
        logits[torch.rand(3000, generator=generator) < share] = torch.nan
        logits[7] = torch.inf
        got = from_logits(logits[None], [3000], 512)[0].long()
        assert got.unique().numel() == 512 and got.min() >= 0 and got.max() < 3000
        assert 7 in got.tolist()
        numbers = int((~logits.isnan()).sum())
        assert int((~logits[got].isnan()).sum()) == min(numbers, 512)
        missing = logits[got].isnan()
        first_nans = logits.isnan().nonzero().flatten()[: int(missing.sum())]
        assert torch.equal(got[missing], first_nans)


@pytest.mark.bug("O-05")
@pytest.mark.parity("P10")
def test_every_length_from_minus_one_on_is_written():
    scores = torch.rand(513, generator=torch.Generator().manual_seed(5))
    lengths = [-1, 0, 1, 3, 4, 511, 512, 513]
    got = select_dial(scores, lengths, 512)
    for row, length in enumerate(lengths):
        assert got[row].tolist() == brute_force(scores.tolist(), length, 512)


@pytest.mark.bug("O-06", "O-07")
def test_a_row_never_selects_the_block_it_is_in_nor_a_later_one():
    problem = make_problem([12], [12], Shape(top_k=4))
    got = select(problem)
    assert problem.plan.visible_blocks.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [2 in row for row in got.tolist()] == [False] * 11 + [True]

    rising = torch.arange(1, 17).float()
    visible = [(p + 1) // 4 for p in range(64)]
    for p, row in enumerate(select_dial(rising, visible, 4).tolist()):
        chosen = [b for b in row if b >= 0]
        assert chosen == list(range(max(0, visible[p] - 4), visible[p]))
        assert all(4 * b + 3 <= p for b in chosen)


@pytest.mark.bug("O-08")
@pytest.mark.parametrize("best", (0, 1000, 1023, 1030))
def test_blocks_before_the_chunk_are_candidates(best):
    scores = torch.zeros(1040)
    scores[best] = 1.0
    visible = [(4096 + row + 1) // 4 for row in range(64)]
    got = select_dial(scores, visible, 512)
    for row, count in enumerate(visible):
        assert (best in got[row].tolist()) == (best < count)


@pytest.mark.bug("O-12")
def test_no_block_is_forced():
    scores = torch.arange(1024).float()
    got = select_dial(scores, [1024], 512)
    assert got[0].tolist() == list(range(512, 1024))
    got = select_dial(scores.flip(0), [1024], 512)
    assert got[0].tolist() == list(range(512))


@pytest.mark.bug("O-51")
@pytest.mark.parity("P02")
@pytest.mark.parametrize(
    "budget, ratio", ((2048, 4), (8192, 4), (4096, 2), (1000, 4), (16, 4), (2050, 4), (64, 1))
)
def test_any_budget_and_ratio(budget, ratio):
    config = QSAConfig(token_budget=budget, compress_ratio=ratio)
    assert config.top_k == budget // ratio
    assert config.selection_width == budget + ratio - 1
    shape = Shape(ratio=ratio, page_size=16, top_k=config.top_k)
    problem = make_problem([2 * ratio * config.top_k // 2 + 37], [3], shape)
    got = select(problem)
    for row, visible in enumerate(problem.plan.visible_blocks.tolist()):
        assert got[row].tolist() == brute_force(_scores(problem, row), visible, config.top_k)
    with pytest.raises(ValueError, match="compress_ratio"):
        QSAConfig(compress_ratio=0)


def _scores(problem, row: int) -> list[float]:
    """Scores of a row's request by a loop over pages, in float64, rounded once."""
    plan, cache = problem.plan, problem.key_cache
    request, per_page = int(plan.request_ids[row]), cache.shape[1]
    scores = []
    for page in plan.page_table[request].tolist():
        if 0 <= page < cache.shape[0]:
            dots = cache[page, :, 0].double() @ problem.index_query[row].double().t()
            scores += dots.clamp(min=0).sum(-1).float().tolist()
        else:
            scores += [float("nan")] * per_page
    return scores


@pytest.mark.bug("O-52", "O-54")
def test_the_workspace_never_changes_the_answer():
    problem = make_problem([9000], [64], Shape(top_k=32), dtype=torch.float16)
    whole = select(problem, workspace=512 << 20)
    for workspace in (1 << 20, 8 << 20, torch.empty(2 << 20, dtype=torch.uint8)):
        assert torch.equal(select(problem, workspace=workspace), whole)


@pytest.mark.parity("P05")
def test_fp8_keys_and_queries_have_no_scale():
    problem = make_problem([300, 41], [20, 5], Shape(), index_dtype=torch.float8_e4m3fn)
    typed = select(problem)
    plan = problem.plan
    args = (plan.page_table, plan.request_ids, plan.visible_blocks, problem.shape.top_k)
    as_bytes = ops.select_blocks(
        problem.index_query.view(torch.uint8),
        problem.key_cache.view(torch.uint8),
        *args,
        backend="reference",
    )
    assert torch.equal(typed, as_bytes)
    widened = ops.select_blocks(
        problem.index_query.float(), problem.key_cache.float(), *args, backend="reference"
    )
    assert torch.equal(typed, widened)


def test_first_block_bounds_the_candidates_from_below():
    scores = torch.rand(60, generator=torch.Generator().manual_seed(6))
    query, cache, table = score_dial(scores, Shape())
    first = torch.tensor([-5, 0, 3, 50, 57, 60, 70], dtype=torch.int32)
    rows = first.numel()
    got = ops.select_blocks(
        query.expand(rows, -1, -1),
        cache,
        table,
        torch.zeros(rows, dtype=torch.int32),
        torch.full((rows,), 60, dtype=torch.int32),
        8,
        first_block=first,
        backend="reference",
    )
    for row, start in enumerate(first.tolist()):
        assert got[row].tolist() == brute_force(scores.tolist(), 60, 8, start)


def test_missing_pages_rank_last_and_unknown_requests_select_nothing():
    shape = Shape(top_k=8)
    problem = make_problem([160, 160], [2, 2], shape)
    table = problem.plan.page_table
    table[0, 2:9] = torch.tensor([-1, 10_000, -7, -1, -1, -1, -1], dtype=torch.int32)
    problem.plan.request_ids[2] = 2
    problem.plan.request_ids[3] = -1
    got = select(problem)
    for row in range(2):
        assert got[row].tolist() == brute_force(_scores(problem, row), 40 - (row == 0), 8)
    assert (got[2:] == -1).all()
    # twelve blocks have a page; with K = 16 the lowest ids without one follow
    wide = select(problem, 16)
    assert wide[1].tolist() == brute_force(_scores(problem, 1), 40, 16)


@pytest.mark.parity("P10")
def test_padding_rows_and_odd_views_change_nothing():
    bare = make_problem([100, 37], [30, 37], Shape())
    padded = make_problem([100, 37], [30, 37], Shape(), padding=5)
    got = select(padded)
    assert torch.equal(got[:-5], select(bare))
    assert (got[-5:] == -1).all()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5, float("inf"), float("nan")]), min_size=1),
    st.integers(1, 12),
    st.data(),
)
def test_selection_is_the_definition(scores, top_k, data):
    visible = data.draw(st.integers(0, len(scores)))
    first = data.draw(st.integers(0, len(scores)))
    logits = torch.tensor([scores])
    got = select_from_scores(logits, torch.tensor([visible]), top_k, torch.tensor([first]))
    assert got[0].tolist() == brute_force(scores, visible, top_k, first)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 9))
def test_pages_requests_and_chunks_may_move(seed, requests, top_k):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 90, (requests,), generator=generator).tolist()
    queries = [min(length, 7) for length in lengths]
    problem = make_problem(lengths, queries, Shape(top_k=top_k), dtype=torch.float16, seed=seed)
    plan = problem.plan
    args = (plan.page_table, plan.request_ids, plan.visible_blocks)
    whole = select(problem)

    order = torch.randperm(problem.key_cache.shape[0], generator=generator)
    moved = torch.empty_like(problem.key_cache)
    moved[order] = problem.key_cache
    table = torch.where(args[0] >= 0, order.int()[args[0].clamp(min=0)], -1)

    def run(rows, table, cache):
        return ops.select_blocks(
            problem.index_query[rows],
            cache,
            table,
            plan.request_ids[rows],
            plan.visible_blocks[rows],
            top_k,
            backend="reference",
        )

    rows = torch.arange(plan.num_rows)
    assert torch.equal(run(rows, table, moved), whole)
    shuffled = torch.randperm(plan.num_rows, generator=generator)
    assert torch.equal(run(shuffled, args[0], problem.key_cache), whole[shuffled])
    parts = [run(part, args[0], problem.key_cache) for part in rows.split(3)]
    assert torch.equal(torch.cat(parts), whole)


def _valid() -> dict:
    problem = make_problem([40], [4], Shape())
    plan = problem.plan
    return {
        "index_query": problem.index_query,
        "key_cache": problem.key_cache,
        "page_table": plan.page_table,
        "request_ids": plan.request_ids,
        "visible_blocks": plan.visible_blocks,
        "top_k": 4,
    }


@pytest.mark.parity("P01")
@pytest.mark.parametrize(
    "name, change, error",
    (
        ("index_query", lambda x: x[0], ValueError),
        ("index_query", lambda x: x.double(), UnsupportedError),
        ("index_query", lambda x: x.half(), UnsupportedError),
        ("index_query", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), ValueError),
        ("key_cache", lambda x: x[:, :, 0], ValueError),
        ("key_cache", lambda x: x.int(), UnsupportedError),
        ("key_cache", lambda x: x[..., :8], ValueError),
        ("page_table", lambda x: x.long(), UnsupportedError),
        ("page_table", lambda x: x[0], ValueError),
        ("request_ids", lambda x: x[:-1], ValueError),
        ("visible_blocks", lambda x: x.long(), UnsupportedError),
        ("top_k", lambda x: 0, ValueError),
        ("top_k", lambda x: 4.0, ValueError),
        ("first_block", lambda _: torch.zeros(3, dtype=torch.int32), ValueError),
        ("first_block", lambda _: torch.zeros(4), UnsupportedError),
        ("workspace", lambda _: 1000, ValueError),
        ("workspace", lambda _: torch.empty(1 << 20, dtype=torch.int8), UnsupportedError),
        ("out", lambda _: torch.empty(4, 5, dtype=torch.int32), ValueError),
        ("out", lambda _: torch.empty(4, 4, dtype=torch.int64), UnsupportedError),
        ("backend", lambda _: "cuda", ValueError),
    ),
)
def test_what_does_not_fit_is_refused_by_name(name, change, error):
    arguments = _valid()
    assert ops.select_blocks(**arguments).shape == (4, 4)
    arguments[name] = change(arguments.get(name))
    with pytest.raises(error, match=name):
        ops.select_blocks(**arguments)


def test_no_rows():
    arguments = _valid()
    for name in ("index_query", "request_ids", "visible_blocks"):
        arguments[name] = arguments[name][:0]
    assert ops.select_blocks(**arguments).shape == (0, 4)
