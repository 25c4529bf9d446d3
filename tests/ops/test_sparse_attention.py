"""sparse_attention's contract, on the reference.

* A row attends its blocks' tokens and its open group, each once, and nothing else: no future
  token, no token without a page, nothing for rows without a request.
* Rows that attend nothing give zeros and a log-sum-exp of -inf, and every output is written.
* Memory that nobody attends may hold NaN, and NaN that a row attends reaches no other row.
* Page placement and chunking change nothing.
* FP8 scales fold into scores and outputs, by value or read from a tensor.
* K at or above the visible blocks equals dense attention.
* Every argument that does not fit is refused by name.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.checks import UnsupportedError
from flash_qsa.ops import dense_attention, expand_blocks, sparse_attention
from flash_qsa.ops.fp8 import from_storage, to_storage
from flash_qsa.testing.attention import (
    AttentionCase,
    assert_nan_stays,
    case_with_nan,
    far_and_near_pages,
)
from flash_qsa.testing.inputs import Shape, make_problem

SMALL = Shape(heads=2, kv_heads=1, head_dim=16, top_k=4, page_size=8)


def dial_case(lengths: list[int], shape: Shape = SMALL, **options) -> AttentionCase:
    """Prefill of requests whose keys are zero and whose values hold the token's position: every
    attended token weighs the same, so an output is the mean of the attended positions."""
    problem = make_problem(lengths, lengths, shape, **options)
    keys, values = problem.kv_cache.chunk(2, -1)
    keys.zero_()
    size = shape.page_size
    for request, length in enumerate(lengths):
        for token in range(length):
            page = int(problem.plan.page_table[request, token // size])
            values[page, :, token % size] = float(token)
    return AttentionCase.of(problem, gate=None)


class TestWhatIsAttended:
    @pytest.mark.bug("O-09")
    def test_ten_tokens_with_two_blocks_attend_all_of_them_once(self):
        case = dial_case([10]).rows([9])
        case = case.replace(block_ids=torch.tensor([[1, 0, -1, -1]], dtype=torch.int32))
        out, lse = case.call(backend="reference")
        assert out.flatten().tolist() == pytest.approx([4.5] * 32)
        assert lse.flatten().tolist() == pytest.approx([math.log(10)] * 2)

    @pytest.mark.bug("O-09")
    @pytest.mark.parametrize("length, blocks", [(3, []), (10, [1, 0]), (16, [3, 2, 1, 0])])
    def test_the_expanded_selection_names_the_attended_tokens(self, length, blocks):
        case = dial_case([length]).rows([length - 1])
        ids = torch.full((1, 4), -1, dtype=torch.int32)
        ids[0, : len(blocks)] = torch.tensor(blocks)
        visible = torch.tensor([length // 4], dtype=torch.int32)
        packed = expand_blocks(ids, case.positions, visible, 4, backend="reference")[0]
        count = int(packed[-1])
        assert sorted(packed[:count].tolist()) == list(range(length))
        assert (packed[count:-1] == -1).all()
        out, lse = case.replace(block_ids=ids).call(backend="reference")
        assert float(out[0, 0, 0]) == pytest.approx((length - 1) / 2)
        assert float(lse[0, 0]) == pytest.approx(math.log(length))

    @pytest.mark.bug("O-07")
    def test_blocks_that_a_row_cannot_see_contribute_nothing(self):
        case = dial_case([64], dataclasses.replace(SMALL, top_k=16))
        everything = torch.arange(16, dtype=torch.int32).expand(64, 16)
        out, _ = case.replace(block_ids=everything).call(backend="reference")
        expected = torch.arange(64) / 2
        torch.testing.assert_close(out[:, 0, 0], expected, atol=1e-5, rtol=1e-6)

    def test_holes_order_and_ids_out_of_range_do_not_matter(self):
        case = dial_case([23]).rows([22])
        plain = torch.tensor([[0, 3, 4, -1]], dtype=torch.int32)
        holes = torch.tensor([[-1, 4, 1 << 30, 3, -7, -1, 0, 5]], dtype=torch.int32)
        expected, lse = case.replace(block_ids=plain).call(backend="reference")
        out, holes_lse = case.replace(block_ids=holes).call(backend="reference")
        assert torch.equal(out, expected) and torch.equal(lse, holes_lse)

    def test_a_reused_selection_attends_everything_since_it_was_made(self):
        """Draft rows 17 … 20 reuse the selection of row 16, whose open group began at 16."""
        case = dial_case([21]).rows(slice(17, 21))
        ids = torch.tensor([[0, 2, 4, -1]], dtype=torch.int32).expand(4, 4)
        case = case.replace(block_ids=ids, tail_start=torch.full((4,), 16))
        out, _ = case.call(backend="reference")
        for row, position in enumerate(range(17, 21)):
            tokens = [0, 1, 2, 3, 8, 9, 10, 11, *range(16, position + 1)]
            assert float(out[row, 0, 0]) == pytest.approx(sum(tokens) / len(tokens))

    def test_token_base_shifts_cells_even_across_pages(self):
        problem = make_problem([21], [21], SMALL)
        case = AttentionCase.of(problem)
        shifted = case.rows([9, 10, 11]).replace(token_base=torch.tensor([5, 5, 5]))
        shifted.check(backend="reference")

    @pytest.mark.bug("O-16")
    @pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 127, 2049, 2051])
    def test_a_partial_tile_gets_no_weight_from_keys_that_are_not_there(self, length):
        shape = Shape(heads=2, kv_heads=1, head_dim=256, page_size=64, top_k=512)
        problem = make_problem([length], [1], shape)
        keys, values = problem.kv_cache.chunk(2, -1)
        keys.fill_(-4.0)
        values.fill_(1.0)
        case = AttentionCase.of(problem, query=torch.ones_like(problem.query), gate=None)
        out, _ = case.call(backend="reference")
        assert out.flatten().tolist() == pytest.approx([1.0] * out.numel(), abs=1e-2)


class TestRowsWithoutTokens:
    @pytest.mark.bug("O-13", "O-14")
    @pytest.mark.parity("P41")
    def test_they_give_zeros_and_minus_infinity_and_leave_the_others_alone(self):
        problem = make_problem([16] * 8, [1] * 8, SMALL, padding=2)
        ids = problem.block_ids()
        ids[[2, 5]] = -1
        case = AttentionCase.of(problem, ids)
        out, lse = case.check(backend="reference")
        for row in (2, 5, 8, 9):
            assert (out[row] == 0).all() and (lse[row] == -torch.inf).all()
        # bits may depend on the batch, so both answers are compared with float64
        case.rows([0, 1, 3, 4, 6, 7]).check(backend="reference")
        assert (out != 12345).all()

    def test_no_rows_and_no_blocks(self):
        case = AttentionCase.of(make_problem([9], [9], SMALL))
        assert case.rows(slice(0, 0)).call(backend="reference")[0].shape == (0, 2, 16)
        none = torch.empty(9, 0, dtype=torch.int32)
        case.replace(block_ids=none).check(backend="reference")

    def test_an_empty_row_stays_zero_under_a_nan_gate(self):
        case = AttentionCase.of(make_problem([9], [2], SMALL, padding=1))
        assert case.gate[2].isnan().all()
        assert (case.call(backend="reference")[0][2] == 0).all()


class TestMemory:
    @pytest.mark.parametrize("of", ["key", "value"])
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_nan_reaches_the_rows_that_attend_it_and_no_others(self, of, deterministic):
        case, channel = case_with_nan(of)
        answer = case.call(backend="reference", deterministic=deterministic)
        assert_nan_stays(of, *answer, channel)

    @pytest.mark.bug("O-15")
    @pytest.mark.parity("P46")
    def test_unused_cells_may_hold_nan(self):
        shape = Shape(page_size=64, top_k=8)
        case = AttentionCase.of(make_problem([70, 203], [1, 5], shape))
        clean, clean_lse = case.check(backend="reference")
        out, lse = case.poisoned().call(backend="reference")
        assert torch.equal(out, clean) and torch.equal(lse, clean_lse)

    @pytest.mark.bug("O-33")
    def test_page_ids_beyond_two_to_the_16(self):
        far, near = far_and_near_pages()
        out, lse = far.check(backend="reference")
        expected, expected_lse = near.call(backend="reference")
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)

    def test_pages_that_do_not_exist_are_left_out(self):
        case = AttentionCase.of(make_problem([40], [6], SMALL))
        table = case.page_table.clone()
        table[0, 1], table[0, 4] = -1, 1 << 20
        case = case.replace(page_table=table)
        _, lse = case.check(backend="reference")
        assert torch.isfinite(lse).all()

    @settings(max_examples=6, deadline=None)
    @given(st.data())
    def test_permuting_pages_and_requests_changes_nothing(self, data):
        lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=2))
        rows = [data.draw(st.integers(1, length)) for length in lengths]
        case = AttentionCase.of(make_problem(lengths, rows, SMALL))
        pages = case.kv_cache.shape[0]
        order = torch.tensor(data.draw(st.permutations(range(pages))))
        table = torch.where(
            case.page_table >= 0, order.argsort()[case.page_table.long().clamp(min=0)], -1
        )
        moved = case.replace(kv_cache=case.kv_cache[order], page_table=table.int())
        out, lse = case.check(backend="reference")
        out_moved, lse_moved = moved.call(backend="reference")
        assert torch.equal(out, out_moved) and torch.equal(lse, lse_moved)

    @settings(max_examples=6, deadline=None)
    @given(st.integers(2, 20), st.data())
    def test_chunks_equal_one_prefill_bit_for_bit_when_deterministic(self, length, data):
        case = AttentionCase.of(make_problem([length], [length], SMALL))
        whole, whole_lse = case.call(deterministic=True, backend="reference")
        cut = data.draw(st.integers(1, length - 1))
        for part in (slice(0, cut), slice(cut, length)):
            out, lse = case.rows(part).call(deterministic=True, backend="reference")
            assert torch.equal(out, whole[part]) and torch.equal(lse, whole_lse[part])


class TestLayouts:
    @pytest.mark.parity("P46")
    @pytest.mark.parametrize("page_size", [16, 160, 784])
    @pytest.mark.parametrize("layout", ["heads-first", "tokens-first", "pair"])
    def test_page_sizes_and_strides(self, page_size, layout):
        shape = Shape(page_size=page_size, top_k=3)
        case = AttentionCase.of(make_problem([70, 200], [3, 2], shape))
        expected, _ = case.check(backend="reference")
        cache = case.kv_cache
        if layout == "tokens-first":
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "pair":
            cache = tuple(part.contiguous() for part in cache.chunk(2, -1))
        out, _ = case.replace(kv_cache=cache).call(backend="reference")
        assert torch.equal(out, expected)

    @pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 2), (16, 1)])
    @pytest.mark.parametrize("ratio, page_size", [(1, 4), (3, 12), (8, 16)])
    def test_groups_and_ratios(self, heads, kv_heads, ratio, page_size):
        shape = Shape(heads, kv_heads, 16, ratio=ratio, page_size=page_size, top_k=3)
        AttentionCase.of(make_problem([25, 7], [4, 7], shape)).check(backend="reference")

    @pytest.mark.bug("O-56")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("norm", [1.0, 100.0])
    def test_no_larger_error_than_plain_attention_in_the_same_dtype(self, dtype, norm):
        """Dense regime: RMS error against float64 below 1.1 times that of torch's attention."""
        shape = Shape(4, 2, 64, page_size=64, top_k=128)
        problem = make_problem([300], [10], shape, dtype=dtype)
        query = (problem.query.float() * norm / 8).to(dtype)
        case = AttentionCase.of(problem, query=query, gate=None)
        out, _ = case.check(backend="reference")
        truth = case.truth().out
        token = torch.arange(300)
        cells = problem.kv_cache[problem.plan.page_table[0].long()[token // 64], :, token % 64]
        k, v = (part.transpose(0, 1) for part in cells.chunk(2, -1))
        mask = token[None] <= problem.plan.positions[:, None]
        plain = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], k[None], v[None], mask[None, None], enable_gqa=True
        )[0].transpose(0, 1)
        rms = [(x.double() - truth).square().mean().sqrt() for x in (out, plain)]
        assert rms[0] <= 1.1 * rms[1]


class TestFP8:
    @pytest.mark.bug("O-42")
    @pytest.mark.parity("P41")
    @pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.uint8])
    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_scales_fold_and_large_values_saturate(self, storage, as_tensor):
        problem = make_problem([60], [5], Shape(page_size=16), dtype=torch.bfloat16)
        keys, values = (part.float() for part in problem.kv_cache.chunk(2, -1))
        keys[..., 0], values[..., 1] = 900.0, 2000.0
        stored = (to_storage(keys, storage, 0.5), to_storage(values, storage, 3.0))
        read = from_storage(stored[1])[~values.isnan()]
        assert float(from_storage(stored[0])[~keys.isnan()].max()) * 0.5 == 448 * 0.5
        assert float(read.max()) * 3.0 == 448 * 3.0
        scales = [torch.tensor([s]) if as_tensor else s for s in (0.5, 3.0)]
        case = AttentionCase.of(problem, kv_cache=stored, k_scale=scales[0], v_scale=scales[1])
        out, _ = case.check(backend="reference")
        assert torch.isfinite(out).all()
        if as_tensor:
            scales[1].fill_(6.0)
            doubled, _ = case.call(backend="reference")
            torch.testing.assert_close(doubled, 2 * out, rtol=0.01, atol=0.01)

    @pytest.mark.bug("O-41", "O-43")
    def test_typed_and_bytes_and_the_dequantised_cache_agree_in_prefill_and_decode(self):
        for lengths, rows in (([40], [40]), ([300], [20]), ([4000], [1])):
            problem = make_problem(
                lengths, rows, Shape(page_size=16, top_k=32), dtype=torch.bfloat16,
                kv_dtype=torch.float8_e4m3fn,
            )  # fmt: skip
            case = AttentionCase.of(problem)
            typed, _ = case.check(backend="reference")
            raw, _ = case.replace(kv_cache=problem.kv_cache.view(torch.uint8)).call()
            wide = from_storage(problem.kv_cache, torch.bfloat16)
            dequantised, _ = case.replace(kv_cache=wide).call()
            assert torch.equal(typed, raw) and torch.equal(typed, dequantised)


class TestDense:
    @settings(max_examples=6, deadline=None)
    @given(st.lists(st.integers(1, 24), min_size=1, max_size=2), st.data())
    def test_a_budget_above_the_visible_blocks_equals_dense_attention(self, lengths, data):
        rows = [data.draw(st.integers(1, length)) for length in lengths]
        problem = make_problem(lengths, rows, dataclasses.replace(SMALL, top_k=9), padding=1)
        case = AttentionCase.of(problem)
        out, _ = case.check(backend="reference")
        plan = problem.plan
        dense = dense_attention(
            case.query, case.kv_cache, plan.positions, plan.page_table, plan.request_ids,
            gate=case.gate,
        )  # fmt: skip
        torch.testing.assert_close(out, dense, rtol=2e-6, atol=2e-6)


class TestRefusals:
    @pytest.mark.parity("P46")
    @pytest.mark.parametrize(
        "name, change",
        [
            ("query", lambda c: {"query": c.query[..., 0]}),
            ("query", lambda c: {"query": c.query.double(), "gate": None}),
            ("query", lambda c: {"query": c.query.repeat(1, 1, 2)[..., ::2]}),
            (
                "query",
                lambda c: {
                    "query": c.query[:, :1],
                    "gate": None,
                    "kv_cache": c.kv_cache.repeat(1, 2, 1, 1),
                },
            ),
            ("kv_cache", lambda c: {"kv_cache": c.kv_cache[..., :-1]}),
            ("kv_cache", lambda c: {"kv_cache": c.kv_cache[:, :, :7]}),
            ("kv_cache", lambda c: {"kv_cache": c.kv_cache.half()}),
            ("block_ids", lambda c: {"block_ids": c.block_ids.long()}),
            ("block_ids", lambda c: {"block_ids": c.block_ids[1:]}),
            ("positions", lambda c: {"positions": c.positions.float()}),
            ("page_table", lambda c: {"page_table": c.page_table[0]}),
            ("request_ids", lambda c: {"request_ids": c.request_ids.long()}),
            ("gate", lambda c: {"gate": c.gate[:, :1]}),
            ("gate", lambda c: {"gate": c.gate.half()}),
            ("tail_start", lambda c: {"tail_start": c.positions[1:]}),
            ("token_base", lambda c: {"token_base": c.positions.short()}),
            ("compress_ratio", lambda c: {"compress_ratio": 0}),
            ("scale", lambda c: {"scale": float("inf")}),
            ("k_scale", lambda c: {"k_scale": 2.0}),
        ],
    )
    def test_each_is_named(self, name, change):
        case = AttentionCase.of(make_problem([9], [4], SMALL))
        with pytest.raises(ValueError, match=name):
            case.replace(**change(case)).call()

    def test_an_output_of_another_shape_and_an_unknown_backend(self):
        case = AttentionCase.of(make_problem([9], [4], SMALL))
        with pytest.raises(ValueError, match="out"):
            case.call(out=torch.empty(3, 2, 16))
        with pytest.raises(ValueError, match="backend"):
            case.call(backend="cuda")
        with pytest.raises(UnsupportedError, match="query: dtype"):
            sparse_attention(
                case.query.double(), case.kv_cache.double(), case.block_ids, case.positions,
                case.page_table, case.request_ids, compress_ratio=4,
            )  # fmt: skip
