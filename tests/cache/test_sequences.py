"""Chunks, cached prefixes, forks and reused cells: many ways to the same state.

Claims: any chunking, any mixed batch and any order of requests gives the bits of the single-shot,
single-request run; a fork, whole or prefix, aligned or not, equals a cold run and leaves its
parent alone; a reused slot shows nothing of its former owner.
"""

from __future__ import annotations

import pytest
import torch
from paged_model import PagedModel, Token

from flash_qsa.cache import RecomputeError
from flash_qsa.ops.compress_keys.ring_rows import pack_rows
from flash_qsa.ops.prepare.api import prepare
from flash_qsa.testing.compare import assert_within


def run(model: PagedModel, request: object, tokens: list[Token], cuts=(), **options):
    """Feeds tokens in chunks that end at `cuts`; outputs [n, Hq, D] of layer 0."""
    if request not in model.texts:
        model.admit(request)
    edges = [0, *cuts, len(tokens)]
    pieces = [tokens[start:end] for start, end in zip(edges, edges[1:])]
    return torch.cat([model.forward({request: piece}, **options)[0] for piece in pieces if piece])


def state_bits(model: PagedModel, request: object) -> dict[str, torch.Tensor]:
    """Everything a later step may read, the ring reduced to the open group."""
    saved = model.cache.export(request)
    open_rows = saved.length % model.config.compress_ratio
    parts = {}
    for name, tensor in saved.tensors.items():
        keep_all = not name.endswith(("ring", "positions"))
        rows = tensor if keep_all else tensor[tensor.shape[0] - open_rows :]
        parts[name] = rows.contiguous().view(torch.uint8)
    return parts


def assert_same_state(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


CUTS = [(k,) for k in range(1, 64)] + [(5, 6), (10, 11), (1, 2)]


@pytest.mark.bug("O-22")
def test_any_cut_of_64_tokens_gives_the_single_shot_state() -> None:
    """State bit for bit, outputs within the rounding that both may have."""
    model = PagedModel(budget=16, num_pages=20, num_ring_slots=3)
    tokens = model.draw_tokens(64)
    whole = run(model, "whole", tokens)
    bound = 2 * model.bounds.attention(model.texts["whole"].layers[0].rows, 0)[:, None, None]
    expected = state_bits(model, "whole")
    assert expected["layers.0.compressed"].shape[0] == 16
    for cuts in CUTS:
        model.poison()
        cut = run(model, "cut", tokens, cuts, check=False)
        assert_within(cut, whole.double(), bound.expand_as(whole))
        assert_same_state(state_bits(model, "cut"), expected)
        model.free("cut")


@pytest.mark.bug("O-23")
def test_mixed_batches_equal_separate_calls() -> None:
    new = [1, 1, 37, 1, 200]
    prefixes = [841, 2047, 0, 3, 4093]
    sizes = {"page_size": 64, "num_pages": 125, "budget": 64, "num_ring_slots": 6}
    model = PagedModel(deterministic=True, max_positions=8192, **sizes)
    for request, prefix in enumerate(prefixes):
        model.fill(request, model.draw_tokens(prefix))
    batch = {request: model.draw_tokens(count) for request, count in enumerate(new)}
    together = model.forward(batch, padding=3)[0].split(new)
    states = [state_bits(model, request) for request in batch]
    for request, tokens in batch.items():
        model.truncate(request, prefixes[request], to_group_start=True)
        lost = model.texts[request].tokens
        redo = prefixes[request] - len(lost)
        assert redo in (0, prefixes[request] % 4)
        if redo:  # the long chunk took the open group's raw keys: recompute them
            assert request == 4
            continue
        alone = model.forward({request: tokens}, check=False)[0]
        assert torch.equal(alone, together[request])
        assert_same_state(state_bits(model, request), states[request])


@pytest.mark.bug("O-24")
@pytest.mark.parametrize("length", [65, 66, 67, 68])
def test_one_to_four_tokens_after_a_cache_hit(length: int) -> None:
    model = PagedModel(deterministic=True, num_pages=40, draft_tokens=3)
    tokens = model.draw_tokens(length)
    cold = run(model, "cold", tokens)
    expected = state_bits(model, "cold")
    for cached in range(64, length):
        model.fork("cold", "hit", cached)
        model.poison()
        assert torch.equal(model.forward({"hit": tokens[cached:]})[0], cold[cached:])
        assert_same_state(state_bits(model, "hit"), expected)
        model.free("hit")
    model.truncate("cold", length - 1)
    assert torch.equal(model.forward({"cold": tokens[-1:]})[0], cold[-1:])
    assert_same_state(state_bits(model, "cold"), expected)


@pytest.mark.bug("O-27")
def test_the_budget_edge_is_crossed_by_decode_and_by_prefill() -> None:
    """Lengths 2,047 … 2,056 at the real budget: all rows oracle-checked, decode equals prefill."""
    sizes = {"page_size": 64, "num_pages": 70, "budget": 2048, "max_positions": 4096}
    model = PagedModel(deterministic=True, **sizes)
    assert model.config.selection_width == 2051
    tokens = model.draw_tokens(2056)
    model.fill("decode", tokens[:2046])
    model.fork("decode", "prefill")
    decoded = [model.forward({"decode": [token]}, num_decodes=1)[0] for token in tokens[2046:]]
    prefilled = model.forward({"prefill": tokens[2046:]}, num_decodes=0)[0]
    assert torch.equal(torch.cat(decoded), prefilled)
    assert_same_state(state_bits(model, "decode"), state_bits(model, "prefill"))


@pytest.mark.bug("O-28")
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_forks_at_every_aligned_length_equal_cold_runs(draft_tokens: int) -> None:
    model = PagedModel(page_size=16, draft_tokens=draft_tokens, num_layers=2)
    model.fill("parent", model.draw_tokens(200))
    before = state_bits(model, "parent")
    for length in (*range(0, 201, 4), 197, 198, 199):  # the ring still holds the last group
        assert model.fork("parent", "child", length) == length
        model.forward({"child": model.draw_tokens(5, length)}, check=length % 20 == 0)
        model.check_state("child")
        assert_same_state(state_bits(model, "parent"), before)
        model.free("child")
        model.poison()
    model.forward({"parent": model.draw_tokens(9, 200)})
    model.check_state("parent")


@pytest.mark.bug("O-28")
@pytest.mark.parametrize("length", [1, 31, 62, 65, 122, 127, 163, 195])
@pytest.mark.parametrize("mrope", [False, True])
def test_unaligned_forks_take_the_open_group_again(length: int, mrope: bool) -> None:
    """Its raw keys handed in, or recomputed from the group's start; never silently missing."""
    model = PagedModel(page_size=16, num_layers=2, mrope=mrope)
    tokens = model.draw_tokens(200)
    model.fill("parent", tokens)
    before, start = state_bits(model, "parent"), length // 4 * 4
    with pytest.raises(RecomputeError, match=f"recompute from position {start}") as caught:
        model.fork("parent", "child", length)
    assert caught.value.position == start and model.cache.requests == ("parent",)

    ids = torch.tensor([token for token, _ in tokens[start:length]])
    positions = torch.tensor([at for _, at in tokens[start:length]])[:, None]
    width = model.cache.spec.ring_width
    rows = [pack_rows(table[ids, -8:], positions, width) for table in model.index_qk]
    assert model.fork("parent", "given", length, open_group=rows) == length
    assert model.fork("parent", "redone", length, to_group_start=True) == start
    model.poison()
    model.forward({"redone": tokens[start:length]})
    assert_same_state(state_bits(model, "given"), state_bits(model, "redone"))
    more = model.draw_tokens(6, length)
    given, redone = (model.forward({name: more})[0] for name in ("given", "redone"))
    torch.testing.assert_close(given, redone, rtol=0, atol=0)
    model.check_state("given")
    assert_same_state(state_bits(model, "parent"), before)


def test_an_open_group_of_the_wrong_shape_is_refused() -> None:
    model = PagedModel(num_layers=2, mrope=False)
    model.fill("parent", model.draw_tokens(30))
    for rows in ([torch.zeros(2, 8)] * 2, [torch.zeros(3, 8)], [torch.zeros(3, 9)] * 2):
        with pytest.raises(ValueError, match="open_group: expected 2 tensors"):
            model.fork("parent", "child", 23, open_group=rows)
    with pytest.raises(ValueError, match="length: expected 0 … 30, got 31"):
        model.fork("parent", "child", 31, open_group=[torch.zeros(3, 8)] * 2)
    assert model.cache.requests == ("parent",)


@pytest.mark.parametrize("length", [8, 13, 15])
def test_a_saved_open_group_is_the_one_a_fork_needs(length: int) -> None:
    model = PagedModel(num_layers=2)
    run(model, "parent", model.draw_tokens(length))
    saved = model.cache.open_group("parent")
    assert [tuple(rows.shape) for rows in saved] == [(length % 4, 14)] * 2
    model.forward({"parent": model.draw_tokens(20, length)})
    model.fork("parent", "child", length, open_group=saved)
    model.poison()
    model.forward({"child": model.draw_tokens(7, length)})
    model.check_state("child")


@pytest.mark.bug("O-29")
@pytest.mark.parametrize("old", [float("nan"), 1e30])
def test_a_copied_request_brings_its_index_keys(old: float) -> None:
    """n = 2050 into cells full of other contents; then both decode six different tokens."""
    sizes = {"page_size": 64, "num_pages": 80, "budget": 64, "max_positions": 4096}
    model = PagedModel(deterministic=True, **sizes)
    tokens = model.draw_tokens(2050)
    model.fill("a", tokens)
    for tensor in model.cache.layers[0]:
        tensor.nan_to_num_(old)
    model.fork("a", "b")
    texts = {name: model.draw_tokens(6, 2050) for name in "ab"}
    for step in range(6):
        model.forward({name: [texts[name][step]] for name in "ab"})
    cold = PagedModel(deterministic=True, **sizes)
    for name in "ab":
        cold.fill(name, tokens + texts[name])
        assert_same_state(state_bits(model, name), state_bits(cold, name))
        cold.free(name)


@pytest.mark.bug("O-29")
def test_a_prefix_copy_in_the_middle_of_a_group() -> None:
    sizes = {"page_size": 64, "num_pages": 60, "budget": 64, "max_positions": 4096}
    model = PagedModel(**sizes)
    tokens = model.draw_tokens(2050)
    model.fill("a", tokens)
    assert model.fork("a", "b", 1001, to_group_start=True) == 1000
    model.poison()
    model.forward({"b": tokens[1000:1001]})
    for _ in range(6):
        model.forward({"b": model.draw_tokens(1), "a": model.draw_tokens(1)})
    for name in "ab":
        model.check_state(name)


@pytest.mark.bug("O-31")
@pytest.mark.parametrize("left_over", [None, float("nan")])
def test_a_reused_slot_shows_nothing_of_its_former_owner(left_over: float | None) -> None:
    """8,000 tokens with huge keys in the one slot, then 37, then 2,100, as in a new cache."""
    sizes = {"page_size": 64, "num_pages": 126, "budget": 64, "num_ring_slots": 2}
    used, clean = (PagedModel(deterministic=True, max_positions=8192, **sizes) for _ in range(2))
    used.cache.allocate("long")
    plan = used.cache.plan(used.cache.append({"long": 8000}))
    ids = torch.arange(8000) % 509
    prepare(
        used.qkv[0][ids],
        used.index_qk[0][ids],
        torch.arange(8000),
        used.rope,
        used.norms[0],
        used.cache.layers[0],
        plan,
    )
    used.cache.layers[0].compressed[list(used.cache.pages("long"))] = 1e4
    freed = used.cache.free("long")
    assert len(freed.pages) == 125
    if left_over is not None:
        for tensor in used.cache.layers[0][:2]:
            tensor[list(freed.pages)] = left_over
        used.cache.layers[0].ring[freed.ring_slot] = left_over
    for length in (37, 2100):
        tokens, outputs = clean.draw_tokens(length), []
        for model in (used, clean):
            model.fill(length, tokens[:-30])
            outputs.append(model.forward({length: tokens[-30:]}, check=model is used)[0])
        assert torch.equal(*outputs)
        assert used.cache.ring_slot(length) == freed.ring_slot
        assert_same_state(state_bits(used, length), state_bits(clean, length))
        for model in (used, clean):
            model.free(length)


@pytest.mark.bug("O-32")
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("lengths", [(55, 2300), (55, 2300, 7)])
def test_each_row_of_a_batch_equals_its_solo_run(lengths, query_len: int) -> None:
    sizes = {"page_size": 64, "num_pages": 50, "budget": 64, "draft_tokens": 1}
    model = PagedModel(deterministic=True, max_positions=4096, **sizes)
    for request, length in enumerate(lengths):
        model.fill(request, model.draw_tokens(length))
    new = {request: model.draw_tokens(query_len) for request in range(len(lengths))}

    def rerun(order: list[int]) -> dict[int, torch.Tensor]:
        outputs = model.forward(
            {request: new[request] for request in order}, num_decodes=len(order)
        )
        for request in order:
            model.truncate(request, lengths[request])
        return dict(zip(order, outputs[0].split(query_len)))

    solo = {request: rerun([request])[request] for request in new}
    for order in (list(new), list(new)[::-1]):
        for request, output in rerun(order).items():
            assert torch.equal(output, solo[request])
