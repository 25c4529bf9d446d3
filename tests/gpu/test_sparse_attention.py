"""sparse_attention's kernels on a GPU.

* BF16, FP16 and FP8 keep the float64 bound in decode, draft windows and prefill, over NaN in unused
  memory, in every schedule; errors are no larger than those of torch's dense attention.
* Repeats are bitwise equal; deterministic rows do not depend on the batch; page placement does not
  matter.
* A captured graph follows changed metadata and scales. Addresses beyond 2^31 elements work.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from flash_qsa import dispatch
from flash_qsa.ops.fp8 import to_storage
from flash_qsa.ops.sparse_attention import kernel
from flash_qsa.testing.attention import AttentionCase, far_and_near_pages
from flash_qsa.testing.inputs import REAL, make_problem

MIDDLE = dataclasses.replace(REAL, top_k=64)
Tuning = kernel.Tuning
SCHEDULES = {
    "default": Tuning(),
    "rows": Tuning(share=False),
    "union-fixed": Tuning(hopper=False, union={"fixed": True, "splits": 1}),
    "union-online": Tuning(hopper=False, union={"fixed": False}),
    # BF16 on Hopper; elsewhere what the default is
    "hopper-3-splits": Tuning(hopper={"splits": 3}),
}


@pytest.fixture(params=SCHEDULES)
def schedule(request, monkeypatch):
    load, tuning = dispatch._load, SCHEDULES[request.param]

    def load_tuned(op, backend):
        if (op, backend) == ("sparse_attention", "triton"):
            return functools.partial(kernel.launch, tuning=tuning)
        return load(op, backend)

    monkeypatch.setattr(dispatch, "_load", load_tuned)
    return request.param


def case_of(lengths, rows, shape=MIDDLE, **options) -> AttentionCase:
    """Requests of four rows each are draft windows to the plan."""
    case = AttentionCase.of(make_problem(lengths, rows, shape, device="cuda", **options))
    if set(rows) != {4}:
        return case
    count = len(rows)
    drafts = {"num_decodes": count, "num_decode_tokens": 4 * count, "decode_query_len": 4}
    return case.replace(plan=dataclasses.replace(case.plan, **drafts))


@pytest.mark.bug("O-15")
@pytest.mark.parity("P39")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "lengths, rows",
    [
        ([3001, 70, 5], [1, 1, 1]),
        ([1501, 403], [4, 4]),
        ([341 + 23 * i for i in range(32)], [4] * 32),
        ([2003, 90, 7], [101, 40, 7]),
        ([2003, 390, 7], [251, 170, 7]),
    ],
    ids=["decode", "draft", "many drafts", "short prefill", "prefill"],
)
def test_every_schedule_keeps_the_bound(schedule, dtype, lengths, rows):
    if schedule == "union-fixed" and dtype is torch.float16:
        pytest.skip("FP16 probabilities need the running maximum")
    if schedule == "hopper-3-splits" and dtype is torch.float16:
        pytest.skip("FP16 has no schedule of its own on Hopper")
    case = case_of(lengths, rows, dtype=dtype, padding=3).poisoned()
    out, lse = case.check(backend="triton")
    again, lse_again = case.call(backend="triton")
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("one_page", [False, True])
def test_keys_and_values_of_their_own(schedule, one_page):
    """As caches outside of paged engines have them: two tensors, the request a single page."""
    shape = dataclasses.replace(MIDDLE, page_size=1400) if one_page else MIDDLE
    case = case_of([1397], [400], shape, dtype=torch.bfloat16).poisoned()
    keys, values = (part.clone() for part in case.keys_values)
    for pair in ((keys, values), (values, keys)):
        case.replace(kv_cache=pair).check(backend="triton")


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.uint8])
@pytest.mark.bug("O-41", "O-42")
def test_fp8_in_every_schedule(schedule, storage):
    if schedule == "union-fixed":
        pytest.skip("FP16 probabilities, as FP8 has them there, need the running maximum")
    problem = make_problem([1203, 77], [60, 1], MIDDLE, dtype=torch.bfloat16, device="cuda")
    keys, values = (part.float() for part in problem.kv_cache.chunk(2, -1))
    keys[..., 0], values[..., 1] = 900.0, 2000.0
    stored = (to_storage(keys, storage, 0.5), to_storage(values, storage, 3.0))
    scale = torch.tensor([0.5], device="cuda")
    case = AttentionCase.of(problem, kv_cache=stored, k_scale=scale, v_scale=3.0)
    case.poisoned().check(backend="triton")


@pytest.mark.parametrize("of", ["key", "value"])
def test_nan_reaches_the_rows_that_attend_it_and_no_others(schedule, of):
    case = case_of([2000], [400], dtype=torch.bfloat16)
    token = 101
    block = token // case.compress_ratio
    attends = (case.block_ids == block).any(1).cpu()
    assert 0 < attends.sum() < 400
    cache = case.keys_values[of == "value"]
    cache[case.page_table[0].long()[token // 64], :, token % 64, 5] = torch.nan
    out, lse = case.call(backend="triton")
    channels = slice(None) if of == "key" else 5
    assert out[attends.to(out.device)][..., channels].isnan().all()
    assert out[~attends.to(out.device)].isfinite().all()
    assert torch.equal(lse.isnan().all(-1).cpu(), attends & (of == "key"))


@pytest.mark.bug("O-56")
@pytest.mark.parametrize("norm", [1.0, 100.0])
def test_no_larger_error_than_torch_attention(schedule, norm):
    problem = make_problem([2000], [64], REAL, dtype=torch.bfloat16, device="cuda")
    query = (problem.query.float() * norm / 16).bfloat16()
    case = AttentionCase.of(problem, query=query, gate=None)
    truth = case.truth()
    out, _ = case.check(truth, backend="triton")
    token = torch.arange(2000, device="cuda")
    cells = problem.kv_cache[problem.plan.page_table[0].long()[token // 64], :, token % 64]
    k, v = (part.transpose(0, 1) for part in cells.chunk(2, -1))
    mask = token[None] <= problem.plan.positions[:, None]
    plain = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], k[None], v[None], mask[None, None], enable_gqa=True
    )[0].transpose(0, 1)
    rms = [(x.cpu().double() - truth.out).square().mean().sqrt() for x in (out, plain)]
    assert rms[0] <= 1.1 * rms[1]


def test_a_tile_whose_probabilities_overflow_is_attended_per_row():
    problem = make_problem([512], [300], MIDDLE, dtype=torch.bfloat16, device="cuda")
    keys, _ = problem.kv_cache.chunk(2, -1)
    token = torch.arange(512, device="cuda")
    page = problem.plan.page_table[0].long()[token // 64]
    keys[page, :, token % 64] *= (1 + token / 16)[:, None, None].bfloat16()
    AttentionCase.of(problem).check(backend="triton")


@pytest.mark.bug("O-33")
def test_page_offsets_beyond_two_to_the_31():
    far, near = far_and_near_pages("cuda")
    out, lse = far.check(backend="triton")
    near_out, near_lse = near.call(backend="triton")
    assert torch.equal(out, near_out) and torch.equal(lse, near_lse)


def test_deterministic_rows_do_not_depend_on_the_batch():
    case = case_of([3000, 1200, 900], [5, 90, 1], REAL, dtype=torch.bfloat16)
    out, lse = case.call(backend="triton", deterministic=True)
    for rows in ([3], [0, 95], slice(5, 60)):
        alone, alone_lse = case.rows(rows).call(backend="triton", deterministic=True)
        assert torch.equal(out[rows], alone) and torch.equal(lse[rows], alone_lse)


def test_page_placement_does_not_matter(schedule):
    case = case_of([1200, 300], [80, 1], dtype=torch.bfloat16)
    order = torch.randperm(case.kv_cache.shape[0]).cuda()
    table = order.argsort()[case.page_table.long().clamp(min=0)].int()
    table = torch.where(case.page_table >= 0, table, -1)
    out, lse = case.call(backend="triton")
    moved = case.replace(kv_cache=case.kv_cache[order], page_table=table)
    moved_out, moved_lse = moved.call(backend="triton")
    assert torch.equal(out, moved_out) and torch.equal(lse, moved_lse)


@pytest.mark.bug("O-42")
@pytest.mark.parametrize("rows", [[1, 1], [4, 4], [64, 30]], ids=["decode", "draft", "prefill"])
def test_a_captured_graph_follows_metadata_and_scales(rows):
    problem = make_problem(
        [900, 700], rows, MIDDLE, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, device="cuda"
    )
    scale = torch.tensor([3.0], device="cuda")
    case = AttentionCase.of(problem, v_scale=scale)
    out, lse = case.call(backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.call(backend="triton", out=torch.empty_like(out))
    case.positions.sub_(41)
    case.block_ids.copy_(problem.block_ids(seed=5))
    scale.fill_(0.5)
    graph.replay()
    expected, expected_lse = case.call(backend="triton")
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    case.check(backend="triton")
