"""Selection and expansion: the best blocks, the total order among equals, the packed form."""

from __future__ import annotations

import torch

from flash_qsa.ops import expand_blocks, select_blocks
from flash_qsa.testing.compare import selection_faults, true_scores
from flash_qsa.testing.inputs import Problem, score_dial
from flash_qsa.testing.selfcheck.problem import Cases, Outcome, Problems, Setting, exact


def select(problems: Problems) -> Cases:
    at = problems.setting

    def check(kind: str, fp8: bool) -> Outcome:
        problem = problems.get(kind, fp8)
        plan = problem.plan
        ids = selected(at, problem)
        faults = []
        for request in range(plan.num_requests):
            rows = (plan.request_ids == request).nonzero().flatten()
            visible = plan.visible_blocks[rows]
            count = max(int(visible.max()), 1)
            scores, rounding = true_scores(
                problem.index_query[rows], problem.key_cache, plan.page_table[request], count
            )
            faults += selection_faults(ids[rows], scores, rounding, visible)
        if (ids[plan.num_tokens :] != -1).any():
            faults.append("a padding row selected blocks")
        return float(len(faults)), 0.0, "; ".join(faults[:2])

    for kind in ("prefill", "decode"):
        yield f"{kind}, random scores", lambda kind=kind: check(kind, False)
    yield "decode, FP8 keys", lambda: check("decode", True)


def selected(at: Setting, problem: Problem) -> torch.Tensor:
    plan = problem.plan
    return select_blocks(
        problem.index_query,
        problem.key_cache,
        plan.page_table,
        plan.request_ids,
        plan.visible_blocks,
        at.shape.top_k,
        plan=plan,
        backend=at.backend,
    )


def ties(problems: Problems) -> Cases:
    """Scores that FP32 holds exactly: the total order leaves one answer, to be met id by id."""
    at = problems.setting
    count = problems.length // at.shape.ratio
    if count == 0:
        return
    top_k = at.shape.top_k

    visible = [max(count - 1 - 7 * row, 0) for row in range(3)]

    def check(values: torch.Tensor) -> Outcome:
        query, cache, table = score_dial(values, at.shape, at.dtype)
        ids = select_blocks(
            query.expand(len(visible), -1, -1).contiguous().to(at.device),
            cache.to(at.device),
            table.to(at.device),
            torch.zeros(len(visible), dtype=torch.int32, device=at.device),
            torch.tensor(visible, dtype=torch.int32, device=at.device),
            top_k,
            backend=at.backend,
        )
        truth = torch.full((len(visible), top_k), -1, dtype=torch.int32)
        scores = values.to(at.dtype).double().clamp(min=0).nan_to_num(nan=-1.0)
        for row, seen in enumerate(visible):
            order = scores[:seen].argsort(descending=True, stable=True)[:top_k]
            truth[row, : order.numel()] = order.sort().values.int()
        return exact(("block_ids", ids, truth.to(at.device)))

    generator = torch.Generator().manual_seed(at.seed)
    order = torch.randperm(count, generator=generator)
    scattered = torch.zeros(count)
    scattered[order[: count // 2]] = 1.0
    scattered[order[: min(top_k, count) * 3 // 4]] = 2.0
    clustered = 1.0 + torch.randint(0, 8, (count,), generator=generator) * 2.0**-7
    spoiled = torch.randint(0, 4, (count,), generator=generator).float()
    spoiled[order[: count // 3]] = float("nan")
    tempting = torch.randint(0, 4, (count,), generator=generator).float()
    tempting[visible] = 64.0
    yield "ties at the cut", lambda: check(scattered)
    yield "all scores zero", lambda: check(torch.zeros(count))
    yield "scores within 1/16", lambda: check(clustered)
    yield "a third NaN", lambda: check(spoiled)
    yield "best block out of sight", lambda: check(tempting)


def expand(problems: Problems) -> Cases:
    at = problems.setting

    def check() -> Outcome:
        problem = problems.get("prefill")
        plan, ratio = problem.plan, at.shape.ratio
        ids = problem.block_ids(at.seed)
        seen = expand_blocks(ids, plan.positions, plan.visible_blocks, ratio, backend=at.backend)
        truth = torch.full(tuple(seen.shape), -1, dtype=torch.int32)
        for row, tokens in enumerate(attended(problem, ids)):
            truth[row, : tokens.numel()] = tokens.int()
            truth[row, -1] = tokens.numel()
        return exact(("packed", seen, truth.to(at.device)))

    yield "blocks, tail, count", check


def attended(problem: Problem, ids: torch.Tensor) -> list[torch.Tensor]:
    """int64 tokens of each row in order: its blocks' tokens, then the open group."""
    ratio, out = problem.shape.ratio, []
    for row, position in enumerate(problem.plan.positions.tolist()):
        blocks = [b for b in ids[row].tolist() if b >= 0] if position >= 0 else []
        tokens = [block * ratio + i for block in blocks for i in range(ratio)]
        tokens += range((position + 1) // ratio * ratio, position + 1)
        out.append(torch.tensor(tokens, dtype=torch.int64))
    return out
