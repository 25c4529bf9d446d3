"""sparse_attention's kernels against float64, interpreted.

Both schedules (per row, with one and several splits; row unions, with a fixed reference and with a
running maximum) keep the bound of the contract under NaN in unused memory, permuted pages, padded
rows, strided views, holes, pages that do not exist, reused selections and shifted sequences.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

from flash_qsa.ops.fp8 import to_storage
from flash_qsa.ops.sparse_attention import kernel
from flash_qsa.testing.attention import (
    AttentionCase,
    assert_nan_stays,
    case_with_nan,
    far_and_near_pages,
)
from flash_qsa.testing.inputs import Shape, make_problem

Tuning = kernel.Tuning


DEFAULT = Tuning()


@contextlib.contextmanager
def tuned(tuning: Tuning):
    """Kernels run with `tuning` inside."""
    launch = functools.partial(kernel.launch, tuning=tuning)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flash_qsa.dispatch._load", lambda op, backend: launch)
        yield


def check(case: AttentionCase, tuning: Tuning = DEFAULT, **options):
    """Runs the kernels with `tuning` and checks the answer."""
    with tuned(tuning):
        return case.check(backend="triton", **options)


def union(rows: int, **fields) -> Tuning:
    return Tuning(share=True, hopper=False, union={"rows": rows, "block_m": 16, **fields})


SCHEDULES = {
    "rows": Tuning(share=False),
    "rows-3-splits": Tuning(share=False, rows={"splits": 3}),
    "union-fixed": union(4, splits=1, fixed=True, block_n=16),
    "union-online": union(8, splits=1, fixed=False, block_n=16),
    "union-2-splits": union(4, splits=2, fixed=False, block_n=16),
    "union-fixed-3-splits": union(4, splits=3, fixed=True, block_n=16),
}


@pytest.mark.bug("O-15")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_schedule_keeps_the_bound_over_nan_in_unused_memory(schedule, dtype):
    case = AttentionCase.of(make_problem([37, 50], [6, 3], dtype=dtype, padding=1))
    check(case.poisoned(), SCHEDULES[schedule])


@pytest.mark.bug("O-13", "O-14")
@pytest.mark.parametrize("splits", [1, 4, 16])
def test_empty_rows_between_others(splits):
    shape = Shape(heads=2, kv_heads=1, head_dim=16, top_k=16)
    problem = make_problem([64] * 3, [1] * 3, shape)
    ids = problem.block_ids()
    ids[1] = -1
    tuning = Tuning(rows={"splits": splits})
    case = AttentionCase.of(problem, ids)
    out, lse = check(case, tuning)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    alone, alone_lse = check(case.rows([0, 2]), tuning)
    assert torch.equal(out[[0, 2]], alone) and torch.equal(lse[[0, 2]], alone_lse)


@pytest.mark.parametrize("schedule", ["rows", "rows-3-splits", "union-online"])
def test_holes_any_order_foreign_ids_and_missing_pages(schedule):
    problem = make_problem([45], [4])
    ids = torch.tensor([[-1, 7, 1 << 30, 3, -9, 9, 0, 11]], dtype=torch.int32).repeat(4, 1)
    ids[1] = torch.tensor([-1, -1, -1, -1, -1, -1, -1, 2])
    ids[2] = -1
    check(AttentionCase.of(problem, ids), SCHEDULES[schedule])
    table = problem.plan.page_table.clone()
    table[0, 0], table[0, 2] = 1 << 20, -1
    check(AttentionCase.of(problem, ids, page_table=table), SCHEDULES[schedule])


def test_a_tile_whose_probabilities_overflow_is_attended_per_row():
    """Keys of growing length: the first step's maximum is 200 powers of two below the last's."""
    problem = make_problem([64], [8], Shape(heads=2, kv_heads=1, head_dim=16, top_k=12))
    keys, _ = problem.kv_cache.chunk(2, -1)
    for block in range(16):
        token = torch.arange(4 * block, 4 * block + 4)
        page = problem.plan.page_table[0].long()[token // 16]
        keys[page, :, token % 16] *= 1 + 6.0 * block
    case = AttentionCase.of(problem)
    for schedule in ("union-fixed", "union-fixed-3-splits", "union-online"):
        check(case, SCHEDULES[schedule])


def test_splits_in_which_a_row_attends_nothing_leave_its_sum_alone():
    """Scores of the second row's tokens are 2^-300 of the first row's, whose splits it sits out."""
    problem = make_problem([64], [2], Shape(heads=2, kv_heads=1, head_dim=16, top_k=8))
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [12, 13, 14, -1, -1, -1, -1, -1]])
    keys, _ = problem.kv_cache.chunk(2, -1)
    for token in range(32):
        page = problem.plan.page_table[0].long()[token // 16]
        keys[page, :, token % 16] *= 100
    case = AttentionCase.of(problem, ids.int())
    for schedule in ("union-fixed-3-splits", "union-2-splits", "union-fixed"):
        check(case.poisoned(), SCHEDULES[schedule])


@pytest.mark.parametrize("schedule", ["rows", "union-fixed"])
def test_rows_of_one_tile_from_several_requests(schedule):
    case = AttentionCase.of(make_problem([21, 9, 33, 6], [3, 2, 7, 1]))
    check(case.poisoned(), SCHEDULES[schedule])


@pytest.mark.parametrize("page_size, ratio", [(16, 4), (16, 16), (10, 2), (16, 1)])
@pytest.mark.parametrize("splits", [1, 2])
def test_reused_selections_and_long_tails(page_size, ratio, splits):
    """Tails that are listed, too long for the list, or begin inside a cell."""
    shape = Shape(page_size=page_size, ratio=ratio, top_k=4)
    problem = make_problem([83], [7], shape)
    case = AttentionCase.of(problem, tail_start=torch.tensor([0, 12, 76, 77, 67, 81, 90]))
    check(case.poisoned(), Tuning(rows={"splits": splits, "block_n": 16}))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("given", [False, True])
def test_open_groups_of_every_length_on_pages_that_are_there_or_not(splits, given):
    """The list ends with the open group's cells, of which the last is incomplete."""
    shape = Shape(page_size=16, ratio=16, top_k=2)
    problem = make_problem([47] * 3, [16] * 3, shape)
    table = problem.plan.page_table.clone()
    table[1, 2], table[2, 0] = -1, table.shape[0] * 1000
    tail_start = ((problem.plan.positions + 1) // 16 * 16) if given else None
    case = AttentionCase.of(problem, page_table=table, tail_start=tail_start)
    for tuning in (Tuning(share=False, rows={"splits": splits, "block_n": 16}), DEFAULT):
        check(case.poisoned(), tuning)


@pytest.mark.parametrize("one_page", [False, True])
def test_shifted_sequences(one_page):
    """Bases that are no multiple of a block: across pages per row, within one page as unions."""
    size = 76 if one_page else 16
    problem = make_problem([75, 75], [75, 75], Shape(page_size=size))
    case = AttentionCase.of(problem, token_base=torch.tensor([3] * 75 + [10] * 75))
    rows = [4, 5, 6, 60, 61, 62, 63, 64, 75, 76, 77, 78, 139]
    case = case.rows(rows)
    check(case.poisoned(), SCHEDULES["union-fixed"])


@pytest.mark.parametrize("page_size, ratio", [(160, 4), (12, 3), (10, 1), (16, 2), (48, 16)])
def test_page_sizes_and_ratios(page_size, ratio):
    shape = Shape(page_size=page_size, ratio=ratio, top_k=3)
    case = AttentionCase.of(make_problem([70], [4], shape))
    check(case.poisoned())
    check(case.poisoned(), SCHEDULES["union-fixed"])


@pytest.mark.parametrize("heads, kv_heads, dim", [(1, 1, 16), (6, 2, 64), (16, 1, 48)])
def test_groups_and_head_dims(heads, kv_heads, dim):
    shape = Shape(heads, kv_heads, dim, page_size=32, top_k=3)
    case = AttentionCase.of(make_problem([41], [3], shape, dtype=torch.float16))
    check(case.poisoned())


@pytest.mark.parametrize("layout", ["tokens-first", "pair"])
def test_cache_layouts(layout):
    case = AttentionCase.of(make_problem([50], [3], dtype=torch.float16))
    cache = case.kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "pair":
        keys, values = case.keys_values
        cache = (keys.contiguous(), values)
    for schedule in ("rows", "union-fixed"):
        check(case.replace(kv_cache=cache), SCHEDULES[schedule])


@pytest.mark.bug("O-41", "O-42", "O-43")
@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_fp8_with_scales(storage, as_tensor):
    problem = make_problem([40], [5], dtype=torch.float16)
    keys, values = (part.float() for part in problem.kv_cache.chunk(2, -1))
    keys[..., 0], values[..., 1] = 900.0, 2000.0
    stored = (to_storage(keys, storage, 0.5), to_storage(values, storage, 3.0))
    scales = [torch.tensor([s]) if as_tensor else s for s in (0.5, 3.0)]
    case = AttentionCase.of(problem, kv_cache=stored, k_scale=scales[0], v_scale=scales[1])
    for schedule in ("rows", "union-online"):
        check(case.poisoned(), SCHEDULES[schedule])


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("magnitude", [2.0**-100, 1.0, 2.0**60])
def test_fp8_under_queries_of_any_magnitude(magnitude, aligned):
    """FP8 is multiplied in FP16, which holds neither BF16's large numbers nor its small ones.

    Values that words of four reach are read as such, others byte by byte.
    """
    shape = Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, top_k=4)
    problem = make_problem([40], [3], shape, dtype=torch.bfloat16, kv_dtype=torch.uint8)
    query, cache = problem.query.clone(), torch.zeros(*problem.kv_cache.shape[:3], 144)
    query[:, 1, ::2] *= 2.0**-20
    cache = cache.to(torch.uint8)[..., 0 if aligned else 8 :][..., :128]
    cache.copy_(problem.kv_cache)
    scale = 0.125 / magnitude
    case = AttentionCase.of(problem, query=query * magnitude, kv_cache=cache, scale=scale)
    for schedule in ("rows", "rows-3-splits", "union-online"):
        check(case, SCHEDULES[schedule])


@pytest.mark.bug("O-56")
def test_what_a_row_attends_almost_alone_it_returns_exactly():
    """Token 40 has 1,000 to 8,000 times the weight of any other, of those that come first too."""
    problem = make_problem([64], [8], Shape(heads=2, kv_heads=1, top_k=12), dtype=torch.float16)
    query, cache = torch.zeros_like(problem.query), problem.kv_cache
    query[..., 0] = 32**0.5 * torch.linspace(7, 9, 16).view(8, 2)
    cache[..., 0] = 0
    cache[problem.plan.page_table[0, 40 // 16], :, 40 % 16, 0] = 1
    ids = torch.arange(12, dtype=torch.int32).repeat(8, 1)
    case = AttentionCase.of(problem, ids, query=query, gate=None)
    truth = case.truth()
    least = (truth.out.half().double() - truth.out).square().mean()
    for schedule in ("rows", "union-online", "union-fixed", "union-fixed-3-splits"):
        out, _ = check(case, SCHEDULES[schedule], truth=truth)
        assert (out.double() - truth.out).square().mean() <= 1.2 * least, schedule


@pytest.mark.parametrize("of", ["key", "value"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nan_reaches_the_rows_that_attend_it_and_no_others(schedule, of):
    case, channel = case_with_nan(of)
    with tuned(SCHEDULES[schedule]):
        assert_nan_stays(of, *case.call(backend="triton"), channel)


@pytest.mark.bug("O-33")
def test_page_offsets_beyond_two_to_the_31():
    far, near = far_and_near_pages()
    out, lse = check(far)
    near_out, near_lse = check(near)
    assert torch.equal(out, near_out) and torch.equal(lse, near_lse)


def test_deterministic_rows_do_not_depend_on_the_batch():
    shape = Shape(heads=2, kv_heads=1, head_dim=16, top_k=80, page_size=64)
    case = AttentionCase.of(make_problem([400, 330], [1, 1], shape))
    out, lse = check(case, deterministic=True)
    for row in range(2):
        alone, alone_lse = check(case.rows([row]), deterministic=True)
        assert torch.equal(out[row : row + 1], alone) and torch.equal(lse[row : row + 1], alone_lse)
