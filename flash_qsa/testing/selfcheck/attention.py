"""Attention: plain, gated, against dense attention, and twice the same."""

from __future__ import annotations

from typing import Any

import torch

from flash_qsa.ops import sparse_attention
from flash_qsa.testing.compare import attention_truth
from flash_qsa.testing.inputs import Problem
from flash_qsa.testing.selfcheck.problem import Cases, Outcome, Problems, Setting, exact, within
from flash_qsa.testing.selfcheck.selection import attended, selected


def _attention(
    at: Setting, problem: Problem, ids: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The op on a problem's rows and blocks."""
    plan = problem.plan
    return sparse_attention(
        problem.query,
        options.pop("kv_cache", problem.kv_cache),
        ids,
        plan.positions,
        plan.page_table,
        plan.request_ids,
        compress_ratio=problem.shape.ratio,
        plan=plan,
        backend=at.backend,
        **options,
    )


def _attention_outcome(
    at: Setting,
    problem: Problem,
    ids: torch.Tensor,
    tokens: list[torch.Tensor],
    gated: bool,
    scales: tuple[float, float] | None,
) -> Outcome:
    plan, size = problem.plan, problem.shape.page_size
    k_scale, v_scale = scales or (None, None)
    out, lse = _attention(
        at,
        problem,
        ids,
        gate=problem.gate if gated else None,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
    )
    table, requests = plan.page_table.cpu().long(), plan.request_ids.tolist()
    cells = [
        torch.stack((table[requests[row]][token // size], token % size), -1).to(at.device)
        for row, token in enumerate(tokens)
    ]
    keys, values = problem.kv_cache.chunk(2, -1)
    real = plan.num_tokens
    truth = attention_truth(
        problem.query[:real],
        keys,
        values,
        tokens[:real],
        cells[:real],
        problem.shape.head_dim**-0.5,
        problem.gate[:real] if gated else None,
        *(scales or (1.0, 1.0)),
    )
    if not bool((out[real:] == 0).all()):
        return float("nan"), 0.0, "a padding row is not zero"
    return within(
        ("out", out[:real], truth.out, truth.bound),
        ("lse", lse[:real], truth.lse, truth.lse_bound),
    )


def attend(problems: Problems) -> Cases:
    def check(kind: str, fp8: bool) -> Outcome:
        problem = problems.get(kind, fp8)
        ids = problem.block_ids(problems.setting.seed)
        scales = (0.5, 3.0) if fp8 else None
        return _attention_outcome(
            problems.setting, problem, ids, attended(problem, ids), False, scales
        )

    def hostile() -> Outcome:
        # What selection never returns is ignored: open and future blocks, ids of no block, holes.
        problem = problems.get("prefill")
        honest = problem.block_ids(problems.setting.seed)
        tokens = attended(problem, honest)
        visible = problem.plan.visible_blocks[:, None]
        extra = torch.cat((visible, visible + 1, honest[:, :1].where(honest[:, :1] < 0, -7)), 1)
        ids = torch.cat((extra, honest, torch.full_like(extra, 1 << 30)), 1).int()
        return _attention_outcome(problems.setting, problem, ids, tokens, False, None)

    def spoiled(of: str) -> Outcome:
        # NaN in a block that the last row attends and the first has lost, though they share loads;
        # where there is no block yet, in the last row's own token.
        at, problem = problems.setting, problems.get("prefill")
        plan, size, ratio = problem.plan, problem.shape.page_size, problem.shape.ratio
        ids, last = problem.block_ids(at.seed), plan.num_tokens - 1
        block = int(ids[last].max())
        ids[0][ids[0] == block] = -1
        cache, own = problem.kv_cache.clone(), int(plan.positions[last])
        token = own if block < 0 else block * ratio
        page = int(plan.page_table[int(plan.request_ids[last]), token // size])
        cache.chunk(2, -1)[of == "value"][page, :, token % size, 5] = torch.nan
        out = _attention(at, problem, ids, kv_cache=cache, gate=problem.gate.nan_to_num())
        open_group = (plan.positions + 1) // ratio * ratio
        attends = (open_group <= token) & (token <= plan.positions)
        attends |= (ids == block).any(1) & (block >= 0)
        attends &= plan.request_ids == plan.request_ids[last]
        return exact(("rows with NaN", out.isnan().flatten(1).any(1), attends))

    for kind in ("prefill", "decode"):
        yield f"{kind}, random blocks", lambda kind=kind: check(kind, False)
    yield "prefill, blocks out of sight", hostile
    for of in ("key", "value"):
        yield f"prefill, NaN in a {of}", lambda of=of: spoiled(of)
    yield "decode, FP8 cache with scales", lambda: check("decode", True)


def gate(problems: Problems) -> Cases:
    def check(kind: str) -> Outcome:
        problem = problems.get(kind)
        ids = problem.block_ids(problems.setting.seed + 1)
        return _attention_outcome(
            problems.setting, problem, ids, attended(problem, ids), True, None
        )

    for kind in ("prefill", "decode"):
        yield f"{kind}, sigmoid gate", lambda kind=kind: check(kind)


def dense(problems: Problems) -> Cases:
    """Within the budget QSA is dense attention: select, attend, compare with every token."""
    at = problems.setting
    budget = (at.shape.top_k + 1) * at.shape.ratio - 1

    def check() -> Outcome:
        problem = Problems(at, min(problems.length, budget)).get("prefill")
        everything = [torch.arange(p + 1) for p in problem.plan.positions.tolist()]
        return _attention_outcome(at, problem, selected(at, problem), everything, True, None)

    yield f"rows up to token {min(problems.length, budget)}", check


def repeat(problems: Problems) -> Cases:
    """Two runs of the same step give the same bits."""
    at = problems.setting

    def check() -> Outcome:
        problem = problems.get("prefill")
        runs = []
        for _ in range(2):
            ids = selected(at, problem)
            runs.append((ids, _attention(at, problem, ids, gate=problem.gate)))
        return exact(("block_ids", runs[0][0], runs[1][0]), ("out", runs[0][1], runs[1][1]))

    yield "same bits twice", check
