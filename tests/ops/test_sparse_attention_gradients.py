"""Gradients of sparse_attention.

Claims:
* gradcheck in float64 passes for query, keys and values, with holes in the selection, padded rows,
  rows that attend nothing, permuted pages, a moved tail and a token base, through the log-sum-exp
  too;
* where everything visible is selected the gradients are dense attention's, gate included, in every
  dtype, for a packed cache and for a pair;
* tiles of any size give the same gradients, memory stays within a tile, every run the same bits;
* what is not attended gets no gradient, and NaN in unused memory reaches none;
* it compiles to one graph; selections, FP8 caches and second derivatives are refused by name.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_qsa.ops import sparse_attention
from flash_qsa.ops.sparse_attention import backward
from flash_qsa.testing.inputs import Problem, Shape, make_problem, scattered_view

TINY = Shape(heads=2, kv_heads=1, head_dim=2, page_size=4, top_k=2)
SMALL = Shape(heads=4, kv_heads=2, head_dim=16, page_size=8, top_k=16)


def attend(p: Problem, query, kv_cache, ids, **options):
    plan = p.plan
    return sparse_attention(
        query,
        kv_cache,
        ids,
        plan.positions,
        plan.page_table,
        plan.request_ids,
        compress_ratio=p.shape.ratio,
        **options,
    )


def operator(p: Problem, ids, tail_start=None, token_base=None, page_table=None):
    """The float64 form: the public function takes no float64."""
    plan = p.plan

    def run(query, keys, values):
        return torch.ops.flash_qsa.sparse_attention(
            query,
            keys,
            values,
            ids,
            plan.positions,
            plan.page_table if page_table is None else page_table,
            plan.request_ids,
            p.shape.ratio,
            0.7,
            tail_start,
            token_base,
            [],
            [],
            False,
            "reference",
        )

    return run


def float64_inputs(p: Problem):
    keys, values = (x.double().nan_to_num(0) for x in p.kv_cache.chunk(2, -1))
    return [x.requires_grad_() for x in (p.query.double().nan_to_num(0), keys, values)]


@pytest.mark.parametrize("case", ["plain", "tail", "base", "missing page"])
def test_gradcheck(case: str) -> None:
    p = make_problem([6, 15], [1, 5], TINY, padding=1, spare_pages=1)
    ids, extra = p.block_ids(), {}
    ids[2, 0] = -1
    if case == "tail":
        extra["tail_start"] = (p.plan.visible_blocks.long() * 4 - 4).clamp(min=0)
    elif case == "base":
        extra["token_base"] = torch.full_like(p.plan.positions, 1)
    elif case == "missing page":
        extra["page_table"] = p.plan.page_table.clone()
        extra["page_table"][0] = -1  # row 0 attends nothing
    run = operator(p, ids, **extra)
    inputs = float64_inputs(p)

    def finite(*tensors):
        out, lse = run(*tensors)
        return out, lse.masked_fill(lse == float("-inf"), 0)

    assert torch.autograd.gradcheck(finite, inputs)
    if case == "missing page":
        assert (run(*inputs)[1][0] == float("-inf")).all()


def dense(p: Problem, query, kv_cache, gate):
    """Every request's causal attention from ordinary differentiable torch, in float64."""
    plan, shape, rows = p.plan, p.shape, []
    for row in range(plan.num_rows):
        request, position = int(plan.request_ids[row]), int(plan.positions[row])
        if request < 0:
            rows.append(torch.zeros_like(query[row]))
            continue
        token = torch.arange(position + 1)
        page = plan.page_table[request].long()[token // shape.page_size]
        kv = kv_cache[page, :, token % shape.page_size]
        k, v = kv.repeat_interleave(shape.heads // shape.kv_heads, 1).chunk(2, -1)
        scores = torch.einsum("hd,thd->ht", query[row], k) * shape.head_dim**-0.5
        attn = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
        rows.append(attn * torch.sigmoid(gate[row]))
    return torch.stack(rows)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_dense_autograd(dtype: torch.dtype, pair: bool) -> None:
    p = make_problem([9, 33, 21], [1, 7, 21], SMALL, dtype=dtype, padding=2)
    ids = torch.arange(16, dtype=torch.int32).expand(p.plan.num_rows, -1)
    ids = ids.where(ids < p.plan.visible_blocks[:, None], -1)
    leaves = [x.clone().requires_grad_() for x in (p.query, p.kv_cache, p.gate)]
    cache = leaves[1].chunk(2, -1) if pair else leaves[1]
    out = attend(p, leaves[0], cache, ids, gate=leaves[2])
    real = p.plan.request_ids >= 0
    weight = torch.randn(out.shape)
    (out.float() * weight)[real].sum().backward()

    wide = [x.double().nan_to_num(0).requires_grad_() for x in (p.query, p.kv_cache, p.gate)]
    (dense(p, *wide) * weight)[real].sum().backward()
    # one rounding of each gradient, and the rounded forward output under the gate
    tolerance = 4 * torch.finfo(dtype).eps
    for got, expected in zip(leaves, wide):
        assert got.grad.dtype == dtype
        error = (got.grad.double() - expected.grad).nan_to_num(0).abs().max()
        assert error <= tolerance * max(1, expected.grad.abs().max())
        assert not got.grad.isnan().any()


def grads(p: Problem, ids, **options) -> list[torch.Tensor]:
    query, cache = p.query.clone().requires_grad_(), p.kv_cache.clone().requires_grad_()
    out = attend(p, query, cache, ids, **options)
    out[p.plan.request_ids >= 0].square().sum().backward()
    return [query.grad, cache.grad]


def test_tiles_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    p = make_problem([70, 90], [3, 40], padding=1)
    ids = p.block_ids()
    whole = grads(p, ids)
    assert all(torch.equal(a, b) for a, b in zip(whole, grads(p, ids)))  # bitwise repeatable
    for limit in (1, 3000, 20_000):
        monkeypatch.setattr(backward, "TILE_ELEMENTS", limit)
        for a, b in zip(whole, grads(p, ids)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_tile_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    p = make_problem([90], [80])
    seen = []
    real = backward.tile_gradients

    def spy(out_grad, lse_grad, query, k, *args):
        seen.append((query.shape[0] * query.shape[1] * k.shape[1], query.shape[0]))
        return real(out_grad, lse_grad, query, k, *args)

    monkeypatch.setattr(backward, "tile_gradients", spy)
    for limit in (2_000, 8_000, 1 << 24):
        monkeypatch.setattr(backward, "TILE_ELEMENTS", limit)
        seen.clear()
        grads(p, p.block_ids())
        assert max(size for size, _ in seen) <= limit
        assert sum(rows for _, rows in seen) == 80
    assert backward.rows_per_tile(heads=24, row_tokens=2052, sequence_tokens=1 << 20) == 18
    assert backward.rows_per_tile(heads=10**9, row_tokens=4, sequence_tokens=4) == 1


@pytest.mark.bug("O-15")
def test_only_attended_cells_get_gradients() -> None:
    p = make_problem([60], [1])  # unused cells and spare pages are NaN
    ids = torch.tensor([[2, 5, -1, 9]], dtype=torch.int32)
    _, cache_grad = grads(p, ids)
    tokens = [*range(8, 12), *range(20, 24), *range(36, 40)]
    expected = torch.zeros(cache_grad.shape[:3], dtype=torch.bool)
    for token in tokens:
        expected[int(p.plan.page_table[0, token // 16]), :, token % 16] = True
    assert torch.equal(cache_grad.abs().sum(-1) > 0, expected)
    assert not cache_grad.isnan().any()


def test_strided_inputs_and_shared_pages() -> None:
    p = make_problem([40, 40], [4, 4])
    table = p.plan.page_table.clone()
    table[1] = table[0]  # two requests read the same pages: their gradients add up
    shared = dataclasses.replace(p, plan=dataclasses.replace(p.plan, page_table=table))
    both = grads(shared, p.block_ids())[1]
    parts = []
    for keep in (0, 1):
        ids = p.plan.request_ids.where(p.plan.request_ids == keep, -1)
        one = dataclasses.replace(p, plan=dataclasses.replace(shared.plan, request_ids=ids))
        parts.append(grads(one, p.block_ids())[1])
    torch.testing.assert_close(both, parts[0] + parts[1], rtol=1e-5, atol=1e-6)
    query = scattered_view(p.query).detach().requires_grad_()
    attend(p, query, p.kv_cache, p.block_ids()).sum().backward()
    assert query.grad.shape == query.shape


def test_compiles_and_differentiates() -> None:
    p = make_problem([40, 33], [2, 20])
    ids = p.block_ids()

    def loss(query, cache, gate):
        return attend(p, query, cache, ids, gate=gate).square().sum()

    eager, compiled = ([x.clone().requires_grad_() for x in _leaves(p)] for _ in range(2))
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled).backward()
    for a, b in zip(eager, compiled):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)
    args = (p.query.requires_grad_(), *p.kv_cache.detach().chunk(2, -1))
    opcheck_args = (*args, ids, p.plan.positions, p.plan.page_table, p.plan.request_ids)
    torch.library.opcheck(
        torch.ops.flash_qsa.sparse_attention.default,
        (*opcheck_args, 4, 0.2, None, None, [], [], False, "reference"),
    )
    lse = torch.zeros(p.query.shape[:2])
    detached = tuple(t.detach() for t in opcheck_args)
    torch.library.opcheck(
        torch.ops.flash_qsa.sparse_attention_backward.default,
        (torch.randn(p.query.shape), lse, *detached, 4, 0.2, lse, None, None),
    )


def _leaves(p: Problem) -> tuple[torch.Tensor, ...]:
    return p.query, p.kv_cache, p.gate


def test_refusals() -> None:
    p = make_problem([40], [2])
    query, ids = p.query.clone().requires_grad_(), p.block_ids()
    with pytest.raises(
        NotImplementedError, match="kv_cache: dtype .*float8_e4m3fn.*differentiable"
    ):
        attend(p, query, p.kv_cache.to(torch.float8_e4m3fn), ids)
    with pytest.raises(ValueError, match="^out:"):
        attend(p, query, p.kv_cache, ids, out=torch.empty_like(p.query))
    with torch.no_grad():
        assert not attend(p, query, p.kv_cache, ids).requires_grad
    out = attend(p, query, p.kv_cache, ids)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()
