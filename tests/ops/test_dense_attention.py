"""dense_attention, the oracle of the dense regime, against torch's own attention.

* Every row attends all tokens of its request at or before it, through the page table.
* Scales multiply keys and values, the gate is applied to the rounded output in FP32.
* Rows without a request or a position give zeros; unused memory may hold NaN.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.ops import dense_attention
from flash_qsa.ops.fp8 import from_storage
from flash_qsa.testing.inputs import Shape, make_problem


def torch_attention(problem, *, scale=None, k_scale=1.0, v_scale=1.0) -> torch.Tensor:
    """float64 attention over gathered tokens, one request after the other; [rows, Hq, D]."""
    plan, size, parts = problem.plan, problem.shape.page_size, []
    for request, length in enumerate(plan.seq_lens.tolist()):
        rows = plan.request_ids == request
        token = torch.arange(length)
        cells = problem.kv_cache[plan.page_table[request].long()[token // size]]
        cells = from_storage(cells)[torch.arange(length), :, token % size].double()
        k, v = (part.transpose(0, 1) for part in cells.chunk(2, -1))
        mask = token[None] <= plan.positions[rows][:, None]
        query = problem.query[rows].double().transpose(0, 1)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[None], (k * k_scale)[None], (v * v_scale)[None], mask, scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        )  # fmt: skip
    return torch.cat(parts)


def run(problem, **options) -> torch.Tensor:
    plan = problem.plan
    return dense_attention(
        problem.query, problem.kv_cache, plan.positions, plan.page_table, plan.request_ids,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_torch_over_pages(heads, kv_heads, scale):
    shape = Shape(heads, kv_heads, 16, page_size=12)
    problem = make_problem([37, 5, 12], [9, 5, 1], shape, padding=2)
    out = run(problem, scale=scale)
    expected = torch_attention(problem, scale=scale)
    torch.testing.assert_close(out[:15].double(), expected, rtol=1e-5, atol=1e-6)
    assert (out[15:] == 0).all()


def test_the_gate_applies_to_the_rounded_output():
    problem = make_problem([21], [6], dtype=torch.bfloat16)
    plain, gated = run(problem), run(problem, gate=problem.gate)
    expected = (plain.float() * problem.gate.float().sigmoid()).bfloat16()
    assert torch.equal(gated, expected)


@pytest.mark.bug("O-42")
def test_fp8_scales():
    problem = make_problem([21], [4], kv_dtype=torch.float8_e4m3fn)
    out = run(problem, k_scale=0.5, v_scale=3.0)
    expected = torch_attention(problem, k_scale=0.5, v_scale=3.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
