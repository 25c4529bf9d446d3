"""The comparison of a prepared step with float64, and of what it may not have touched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from flash_qsa.ops.compress_keys.ring_rows import unpack_positions
from flash_qsa.ops.fp8 import as_bytes
from flash_qsa.ops.norm import rms_norm
from flash_qsa.ops.prepare.api import Caches, Prepared
from flash_qsa.ops.rotary import RopeTable, canonical_positions, rotate
from flash_qsa.testing.compare import U_FP32, assert_within, unit_roundoff
from flash_qsa.testing.steps import StepProblem, plan_to


@dataclass(frozen=True)
class HeadsTruth:
    """float64 heads and the elementwise bound that one norm and one rotation must keep."""

    out: torch.Tensor
    bound: torch.Tensor


def heads_truth(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rope: RopeTable,
    positions: torch.Tensor,
) -> HeadsTruth:
    """Norm and rotation of heads x [T, H, D] in float64, from inputs as they are rounded.

    The bound: a sum of D squares errs by D · u₃₂ and its inverse root by half that; with the
    products, (D / 2 + 8) u₃₂. The norm is rounded to the dtype (u), rotated, and rounded again.
    """
    u = unit_roundoff(x.dtype)
    once = u + (x.shape[-1] / 2 + 8) * U_FP32
    normed = rms_norm(x.double(), weight.double(), eps)
    cos, sin = (part.double() for part in rope.rows(positions))
    out = rotate(normed, cos, sin, rope.neox_style)
    # the same sums with every term positive: |y c| + |y' s|
    reach = _rotated_reach(normed.abs(), cos.abs(), sin.abs(), rope.neox_style)
    bound = reach * (once + 4 * U_FP32) * (1 + u) + u * out.abs()
    return HeadsTruth(out, bound + torch.finfo(x.dtype).smallest_normal)


def _rotated_reach(
    normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool
) -> torch.Tensor:
    """rotate() with plus signs: of absolute values, the size of the terms of each sum."""
    half = cos.shape[-1]
    first, second = (
        (normed[..., :half], normed[..., half : 2 * half])
        if neox
        else (normed[..., 0 : 2 * half : 2], normed[..., 1 : 2 * half : 2])
    )
    cos, sin = cos[:, None], sin[:, None]
    turned = (first * cos + second * sin, second * cos + first * sin)
    joined = torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
    return torch.cat((joined, normed[..., 2 * half :]), -1)


def split(problem: StepProblem) -> dict[str, torch.Tensor]:
    """The projections' heads [T, H, D] of real rows."""
    shape, real = problem.shape, problem.plan.num_tokens
    qkv, index = problem.qkv[:real], problem.index_qk[:real]
    width = shape.heads * 2 * shape.head_dim
    paired = qkv[:, :width].reshape(real, shape.heads, 2, shape.head_dim)
    packed = qkv[:, width:].reshape(real, 2, shape.kv_heads, shape.head_dim)
    heads = index.reshape(real, shape.index_heads + 1, shape.index_dim)
    return {
        "query": paired[:, :, 0],
        "gate": paired[:, :, 1],
        "key": packed[:, 0],
        "value": packed[:, 1],
        "index_query": heads[:, :-1],
        "raw_key": heads[:, -1],
    }


def assert_prepared(problem: StepProblem, out: Prepared, caches: Caches, before: Caches) -> None:
    """Every claim about a step with caches in the activation dtype, `before` it and after.

    Heads and compressed keys keep their bound against float64, gates, values and ring rows are
    bit for bit, and nothing else changed, nor the memory between a view's elements.
    """
    shape, plan, real = problem.shape, problem.plan, problem.plan.num_tokens
    parts, at = split(problem), canonical_positions(problem.positions)[:real]
    main = plan.main_slots[:real]
    stored = caches.main[main // shape.page_size, :, main % shape.page_size]
    for name, got in (
        ("query", out.query[:real]),
        ("index_query", out.index_query[:real]),
        ("key", stored[..., : shape.head_dim]),
    ):
        weight = getattr(problem.norms, name)
        truth = heads_truth(parts[name], weight, problem.norms.eps, problem.rope, at)
        assert_within(got, truth.out, truth.bound)
    assert torch.equal(out.gate[:real], parts["gate"])
    assert torch.equal(stored[..., shape.head_dim :], parts["value"])

    closed = (plan.compressed_slots >= 0).nonzero().flatten()
    for row in closed.tolist():
        request, position = int(plan.request_ids[row]), int(plan.positions[row])
        raw, where = problem.history[request]
        group = slice(position - shape.ratio + 1, position + 1)
        total = torch.zeros(shape.index_dim)
        for member in raw[group]:
            total = total + member.float()
        pooled = (total / shape.ratio).to(raw.dtype)[None, None]
        first = where[position - shape.ratio + 1][None]
        truth = heads_truth(pooled, problem.norms.index_key, problem.norms.eps, problem.rope, first)
        slot = int(plan.compressed_slots[row])
        per_page = shape.page_size // shape.ratio
        got = caches.compressed[slot // per_page, slot % per_page]
        assert_within(got[None], truth.out, truth.bound)

    for request, (raw, where) in enumerate(problem.history):
        slot = int(plan.ring_table[request, 0])
        length = int(plan.seq_lens[request])
        for position in range(max(0, length - shape.ring_capacity), length):
            row = caches.ring[slot, position % shape.ring_capacity, 0]
            assert torch.equal(row[: shape.index_dim], raw[position])
            if row.shape[0] > shape.index_dim:
                assert torch.equal(unpack_positions(row[None], shape.index_dim), where[position])

    page_cells = {
        "main": (caches.main.transpose(1, 2), before.main.transpose(1, 2), plan.main_slots),
        "compressed": (caches.compressed, before.compressed, plan.compressed_slots),
        "ring": (caches.ring, before.ring, plan.ring_slots),
    }
    for name, (after, earlier, slots) in page_cells.items():
        touched = torch.zeros(after.shape[0] * after.shape[1], dtype=torch.bool)
        touched[slots[slots >= 0]] = True
        one, two = (bits(t).flatten(0, 1)[~touched] for t in (after, earlier))
        assert torch.equal(one, two), f"{name}: a cell that no row names was written"
        assert torch.equal(between(after), between(earlier)), f"{name}: memory outside the view"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Values as integers, so that NaN equals itself."""
    if tensor.element_size() == 1:
        return as_bytes(tensor)
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def between(view: torch.Tensor) -> torch.Tensor:
    """Bits of the memory that a view spans, its own elements zeroed."""
    raw = bits(view)
    reach = sum((n - 1) * s for n, s in zip(raw.shape, raw.stride())) + 1
    whole = raw.as_strided((reach,), (1,), raw.storage_offset()).clone()
    whole.as_strided(raw.shape, raw.stride()).zero_()
    return whole


def on_cpu(problem: StepProblem, out: Prepared, *caches: Caches) -> tuple:
    """A problem and its results copied from a device, strides kept, for `assert_prepared`."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        raw = as_bytes(tensor)
        reach = sum((n - 1) * s for n, s in zip(raw.shape, raw.stride())) + 1
        whole = raw.as_strided((reach,), (1,), raw.storage_offset()).cpu()
        return whole.as_strided(raw.shape, raw.stride()).view(tensor.dtype)

    here = dataclasses.replace(
        problem,
        qkv=problem.qkv.cpu(),
        index_qk=problem.index_qk.cpu(),
        positions=problem.positions.cpu(),
        rope=dataclasses.replace(problem.rope, cos_sin=problem.rope.cos_sin.cpu()),
        norms=type(problem.norms)(*(w.cpu() for w in problem.norms[:4]), problem.norms.eps),
        plan=plan_to(problem.plan, "cpu"),
    )
    results = Prepared(*(part.cpu() for part in out))
    return here, results, *(Caches(*(moved(c) for c in one)) for one in caches)
