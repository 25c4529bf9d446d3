"""The only comparisons that tests, `verify` and benchmarks use.

Bounds are derived from the arithmetic, element by element; nothing is a tolerance chosen to pass.
Unit roundoffs: 2^-24 FP32, 2^-11 FP16, 2^-8 BF16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from flash_qsa.ops.fp8 import from_storage
from flash_qsa.ops.paging import lookup_pages

U_FP32 = 2.0**-24


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Comparison:
    """Worst error against its bound, and where it sits."""

    worst_ratio: float
    max_error: float
    rms_error: float
    where: tuple[int, ...]

    @property
    def ok(self) -> bool:
        return self.worst_ratio <= 1.0


def within_bound(result: torch.Tensor, truth: torch.Tensor, bound: torch.Tensor) -> Comparison:
    """Compares a result with a float64 truth under an elementwise bound; NaN always fails."""
    error = (result.double() - truth).abs()
    error = torch.where(result.double() == truth, 0.0, error)  # equal infinities
    ratio = torch.where(error.isnan(), torch.inf, error / bound.clamp(min=1e-300))
    ratio = torch.where(error == 0, 0.0, ratio)
    if ratio.numel() == 0:
        return Comparison(0.0, 0.0, 0.0, ())
    flat = int(ratio.argmax())
    where = tuple(int(i) for i in numpy.unravel_index(flat, tuple(ratio.shape)))
    rms = float(error.square().mean().sqrt())
    return Comparison(float(ratio.flatten()[flat]), float(error.max()), rms, where)


def assert_within(result: torch.Tensor, truth: torch.Tensor, bound: torch.Tensor) -> None:
    """Raises AssertionError with the worst coordinate unless every element keeps its bound."""
    seen = within_bound(result, truth, bound)
    if not seen.ok:
        raise AssertionError(
            f"error {seen.max_error:.3e} is {seen.worst_ratio:.2f} times its bound at "
            f"{seen.where}: got {result[seen.where].item()!r}, truth {truth[seen.where].item()!r}"
        )


def selection_faults(
    block_ids: torch.Tensor,
    scores: torch.Tensor,
    rounding: torch.Tensor,
    visible: torch.Tensor,
    first: torch.Tensor | None = None,
) -> list[str]:
    """Everything wrong with a selection, given float64 scores [T, N] and their rounding [T].

    A row must hold min(K, candidates) distinct candidates, ascending, then -1. Every chosen score
    must reach the true cut less the rounding, every skipped one must not exceed it by more.
    """
    faults = []
    top_k, count = block_ids.shape[1], scores.shape[1]
    ids = torch.arange(count, device=scores.device)
    first = torch.zeros_like(visible) if first is None else first
    candidate = (ids >= first[:, None]) & (ids < visible[:, None])
    scores = scores.nan_to_num(nan=-1.0, posinf=torch.inf)
    for row in range(block_ids.shape[0]):
        got, able = block_ids[row].long(), candidate[row]
        want = min(top_k, int(able.sum()))
        chosen = got[:want]
        if (got[want:] != -1).any() or (chosen < 0).any() or (chosen >= count).any():
            faults.append(f"row {row}: expected {want} ids then -1, got {got.tolist()[:16]}…")
            continue
        if (chosen[1:] <= chosen[:-1]).any() or not able[chosen].all():
            faults.append(f"row {row}: ids are not ascending candidates")
            continue
        if want == int(able.sum()) or want == 0:
            continue
        cut = scores[row][able].topk(want).values[-1]
        taken = torch.zeros_like(able)
        taken[chosen] = True
        low = scores[row][taken].min()
        high = scores[row][able & ~taken].max()
        slack = rounding[row]
        if low < cut - slack or high > cut + slack:
            faults.append(
                f"row {row}: cut {float(cut)!r}, lowest chosen {float(low)!r}, highest skipped "
                f"{float(high)!r}, rounding {float(slack):.3e}"
            )
    return faults


def assert_selection(
    block_ids: torch.Tensor,
    scores: torch.Tensor,
    rounding: torch.Tensor,
    visible: torch.Tensor,
    first: torch.Tensor | None = None,
) -> None:
    """Raises AssertionError listing the first faults of a selection."""
    faults = selection_faults(block_ids, scores, rounding, visible, first)
    if faults:
        raise AssertionError(f"{len(faults)} faulty rows; " + "; ".join(faults[:3]))


def true_scores(
    index_query: torch.Tensor, key_cache: torch.Tensor, page_row: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 scores [T, count] of one request's blocks, and the FP32 rounding [T] of a kernel.

    A dot product of Di terms and a sum of Hi errs by at most (Di + Hi) · u · Σ|q||k| per block
    (Higham 2002, section 3.1); a cut compares two scores, hence twice that.
    """
    per_page = key_cache.shape[1]
    blocks = torch.arange(count, device=key_cache.device)
    pages = lookup_pages(page_row, blocks // per_page, key_cache.shape[0])
    keys = from_storage(key_cache)[pages.clamp(min=0), blocks % per_page, 0].double()
    query = from_storage(index_query).double()
    scores = torch.einsum("thd,nd->thn", query, keys).relu().sum(1)
    scores[:, pages < 0] = torch.nan
    magnitude = torch.einsum("thd,nd->tn", query.abs(), keys.abs()).nan_to_num(0.0, 0.0)
    terms = query.shape[1] + query.shape[2]
    return scores, 2 * terms * U_FP32 * magnitude.amax(-1).clamp(min=0)


@dataclass(frozen=True)
class AttentionTruth:
    """float64 attention and the bound that a kernel in `dtype` must keep, [T, Hq, D] each."""

    out: torch.Tensor
    bound: torch.Tensor
    lse: torch.Tensor
    lse_bound: torch.Tensor


def attention_truth(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: list[torch.Tensor],
    cells: list[torch.Tensor],
    scale: float,
    gate: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> AttentionTruth:
    """float64 attention of row t over cells[t] = (page, offset) pairs [n, 2] of its tokens.

    The bound: scores err by δ = (D + 2) u₃₂ · scale · Σ|q||k|, which moves probabilities by a
    factor e^±2δ; probabilities are rounded to the dtype (u) and summed in FP32 over n tokens
    (n u₃₂); the output is rounded (u); a gate rounds once more.
    """
    u = unit_roundoff(query.dtype) if query.dtype != torch.float64 else 2.0**-53
    rows, heads, dim = query.shape
    group = heads // keys.shape[1]
    shape = (rows, heads, dim)
    out = torch.zeros(shape, dtype=torch.float64, device=query.device)
    bound, lse = torch.zeros_like(out), out.new_full((rows, heads), -torch.inf)
    lse_bound = torch.zeros_like(lse)
    for row in range(rows):
        if tokens[row].numel() == 0:
            continue
        page, offset = cells[row].unbind(-1)
        k, v = (
            from_storage(cache[page, :, offset]).double().repeat_interleave(group, 1)
            for cache in (keys, values)
        )
        q = query[row].double()
        scores = torch.einsum("hd,nhd->hn", q, k) * scale * k_scale
        weights = scores.softmax(-1)
        out[row] = torch.einsum("hn,nhd->hd", weights, v) * v_scale
        spread = torch.einsum("hn,nhd->hd", weights, v.abs()) * v_scale
        reach = torch.einsum("hd,nhd->hn", q.abs(), k.abs()).amax(-1) * abs(scale) * k_scale
        delta = (dim + 2) * U_FP32 * reach
        count = tokens[row].numel()
        relative = torch.expm1(2 * delta) + u + 2 * (count + 4) * U_FP32
        bound[row] = spread * relative[:, None] + u * (out[row].abs() + spread * relative[:, None])
        lse[row] = scores.logsumexp(-1)
        lse_bound[row] = delta + (count + 4) * U_FP32 + 4 * U_FP32 * lse[row].abs()
    if gate is not None:
        factor = torch.sigmoid(gate.double())
        bound = bound * factor * (1 + 8 * U_FP32) + (u + 8 * U_FP32) * (out * factor).abs()
        out = out * factor
    tiny = torch.finfo(query.dtype).smallest_normal
    return AttentionTruth(out, bound + tiny, lse, lse_bound + U_FP32)
