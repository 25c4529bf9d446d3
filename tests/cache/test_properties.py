"""Properties over drawn schedules: results depend on a request's tokens and on nothing else.

Claims: any chunking equals one prefill; prefill of n + 1 tokens equals prefill of n and a decode;
the order of requests in a batch, the order of pages and the neighbours do not matter, bit for bit;
with a budget that covers what is visible the layer is dense attention.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_model import PagedModel

from flash_qsa.cache import RequestStep
from flash_qsa.ops import dense_attention
from flash_qsa.ops.prepare.api import prepare
from flash_qsa.testing.compare import assert_within

QUICK = settings(max_examples=15, deadline=None, derandomize=True)
LENGTHS = st.integers(1, 60)


def chunks_of(length: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, length, *(cut % length for cut in cuts)})
    return list(zip(edges, edges[1:]))


def shuffle_pages(model: PagedModel, seed: int) -> None:
    """Moves every used page to a random place of the pool."""
    ledger = model.cache.ledger
    used = sorted({page for state in ledger.requests.values() for page in state.pages})
    pool = range(ledger.pages.reserved, ledger.pages.num_pages)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).tolist()
    targets = [pool[index] for index in order[: len(used)]]
    model.cache.move_pages(dict(zip(used, targets)))
    model.poison()


@QUICK
@given(LENGTHS, st.lists(st.integers(0, 59), max_size=5), st.integers(0, 3), st.integers(0, 99))
def test_chunks_on_wandering_pages_equal_one_prefill(length, cuts, drafts, seed) -> None:
    model = PagedModel(budget=16, draft_tokens=drafts, deterministic=True, seed=seed)
    tokens = model.draw_tokens(length)
    model.admit("whole")
    (whole,) = model.forward({"whole": tokens})
    model.admit("cut")
    for start, end in chunks_of(length, cuts):
        (out,) = model.forward({"cut": tokens[start:end]}, check=False)
        assert torch.equal(out, whole[start:end])
        shuffle_pages(model, seed + end)
    model.check_state("cut")


@QUICK
@given(LENGTHS, st.integers(0, 99))
def test_prefill_and_a_decode_equal_a_longer_prefill(length: int, seed: int) -> None:
    model = PagedModel(budget=16, deterministic=True, seed=seed)
    tokens = model.draw_tokens(length + 1)
    for request in ("longer", "decoded"):
        model.admit(request)
    (longer,) = model.forward({"longer": tokens})
    model.forward({"decoded": tokens[:-1]}, check=False)
    (last,) = model.forward({"decoded": tokens[-1:]}, num_decodes=1)
    assert torch.equal(last[0], longer[-1])
    model.check_state("decoded")


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
)
def test_neighbours_and_their_order_do_not_matter(requests, shuffler) -> None:
    model = PagedModel(budget=16, deterministic=True, num_pages=64)
    for request, (prefix, _) in enumerate(requests):
        model.fill(request, model.draw_tokens(prefix))
    new = {request: model.draw_tokens(count) for request, (_, count) in enumerate(requests)}
    solo = {}
    for request, tokens in new.items():
        model.fork(request, "copy")
        solo[request] = model.forward({"copy": tokens})[0]
        model.free("copy")
    order = list(new)
    shuffler.shuffle(order)
    (out,) = model.forward({request: new[request] for request in order}, check=False, padding=2)
    for request, rows in zip(order, out.split([len(new[request]) for request in order])):
        assert torch.equal(rows, solo[request])
        model.check_state(request)


@QUICK
@given(LENGTHS, st.integers(0, 99))
def test_a_covering_budget_is_dense_attention(length: int, seed: int) -> None:
    model = PagedModel(budget=64, seed=seed)
    model.admit("a")
    tokens = model.draw_tokens(length)
    (sparse,) = model.forward({"a": tokens})
    pages, slot = model.cache.pages("a"), model.cache.ring_slot("a")
    plan = model.cache.plan([RequestStep("a", length, length, pages, slot)])
    ids = torch.tensor([token for token, _ in tokens])
    positions = torch.tensor([at for _, at in tokens]).t()
    caches = model.cache.layers[0]
    done = prepare(
        model.qkv[0][ids],
        model.index_qk[0][ids],
        positions,
        model.rope,
        model.norms[0],
        caches,
        plan,
    )
    dense = dense_attention(
        done.query, caches.main, plan.positions, plan.page_table, plan.request_ids, gate=done.gate
    )
    bound = 2 * model.bounds.attention(model.texts["a"].layers[0].rows, 0)[:, None, None]
    assert_within(sparse, dense.double(), bound.expand_as(dense))
