"""The ops that `flash-qsa bench` measures: implementations, correctness gate, cost.

To add a peer, add a function to PEERS under the op's name. It gets the problem and our selection
and returns a callable, or None where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right

from flash_qsa.ops import select_blocks, sparse_attention
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.ops.prepare.api import Prepared
from flash_qsa.testing.compare import (
    attention_truth,
    selection_faults,
    true_scores,
    within_bound,
)
from flash_qsa.testing.inputs import Problem
from flash_qsa.testing.measure.problem import (
    copies_of,
    problem_bytes,
    step_problem,
    workload_problem,
)
from flash_qsa.testing.measure.timing import Run
from flash_qsa.testing.selfcheck import Setting, run_stages
from flash_qsa.testing.workloads import Workload

GATE_ROWS = 8


@dataclass(frozen=True)
class Cost:
    """Least work of a call: bytes that must move, floating-point operations."""

    moved: float
    flops: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.moved + other.moved, self.flops + other.flops)


def select(problem: Problem, backend: str) -> torch.Tensor:
    plan = problem.plan
    return select_blocks(
        problem.index_query,
        problem.key_cache,
        plan.page_table,
        plan.request_ids,
        plan.visible_blocks,
        problem.shape.top_k,
        plan=plan,
        backend=backend,
    )


def attend(problem: Problem, block_ids: torch.Tensor, backend: str) -> torch.Tensor:
    plan = problem.plan
    return sparse_attention(
        problem.query,
        problem.kv_cache,
        block_ids,
        plan.positions,
        plan.page_table,
        plan.request_ids,
        compress_ratio=problem.shape.ratio,
        gate=problem.gate,
        plan=plan,
        backend=backend,
    )


def prepare_step(problem: Problem, ids: torch.Tensor, backend: str) -> Run:
    """The whole of `prepare` for the problem's rows, into caches of its own."""
    step = step_problem(problem)
    out = Prepared(
        torch.empty_like(problem.query),
        torch.empty_like(problem.query),
        torch.empty_like(problem.index_query),
    )
    return lambda: step.run(out=out, backend=backend)


OURS: dict[str, Callable[[Problem, torch.Tensor, str], Run]] = {
    "select": lambda problem, ids, backend: lambda: select(problem, backend),
    "attend": lambda problem, ids, backend: lambda: attend(problem, ids, backend),
    "select+attend": lambda problem, ids, backend: (
        lambda: attend(problem, select(problem, backend), backend)
    ),
    "prepare": prepare_step,
}


MAX_DENSE_PAIRS = 1 << 30
"""Row-token pairs up to which dense attention is timed: 8,192 rows at 128K; more take seconds."""


def dense(problem: Problem, ids: torch.Tensor) -> Run | None:
    """PyTorch's scaled_dot_product_attention over the whole context: what QSA replaces.

    It reads contiguous keys and values, gathered outside the measurement: no pages to follow.
    """
    plan, shape = problem.plan, problem.shape
    if is_fp8(problem.kv_cache.dtype) or plan.num_rows * plan.max_seq_len > MAX_DENSE_PAIRS:
        return None
    requests, rows, length = plan.num_requests, plan.max_query_len, plan.max_seq_len
    token = torch.arange(length, device=problem.query.device)
    pages = plan.page_table.long()[:, token // shape.page_size]
    kv = problem.kv_cache[pages, :, token % shape.page_size]  # [R, L, Hkv, 2·D]
    keys, values = kv.permute(0, 2, 1, 3).chunk(2, -1)
    query = problem.query.view(requests, rows, shape.heads, shape.head_dim).transpose(1, 2)
    gate = problem.gate.view(requests, rows, shape.heads, shape.head_dim).transpose(1, 2)
    options = {"enable_gqa": True}
    if rows == length:
        options["is_causal"] = True
    elif rows > 1:
        options["attn_mask"] = causal_lower_right(rows, length)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(query, keys, values, **options) * torch.sigmoid(gate)


PEERS: dict[str, dict[str, Callable[[Problem, torch.Tensor], Run | None]]] = {
    "select": {},
    "attend": {"torch dense": dense},
    "select+attend": {"torch dense": dense},
    "prepare": {},
}


def peer_runs(op: str, pairs: list[tuple[Problem, torch.Tensor]]) -> dict[str, list[Run]]:
    """Calls of every peer that applies, one for each problem with our selection."""
    runs = {name: [peer(*pair) for pair in pairs] for name, peer in PEERS[op].items()}
    return {name: calls for name, calls in runs.items() if all(calls)}


def rotating(
    workload: Workload, ops: list[str], dtype: torch.dtype, device: torch.device, backend: str
) -> list[tuple[Problem, torch.Tensor]]:
    """Copies of a workload's problem with our selections: as many as the op of `ops` that moves
    least asks for, see `copies_of`."""
    problem = workload_problem(workload, dtype, device)
    first = problem, select(problem, backend)
    least = min(cost(op, *first).moved for op in ops)
    count = copies_of(least, problem_bytes(workload, dtype), device)
    others = (workload_problem(workload, dtype, device, seed) for seed in range(1, count))
    return [first, *((problem, select(problem, backend)) for problem in others)]


def cost(op: str, problem: Problem, ids: torch.Tensor) -> Cost:
    """Least work of `op`: every key, selected token and row moved once, no score computed twice."""
    parts = {"select": _select_cost, "attend": _attend_cost, "prepare": _prepare_cost}
    costs = [parts[part](problem, ids) for part in op.split("+")]
    return sum(costs[1:], costs[0])


def _select_cost(problem: Problem, ids: torch.Tensor) -> Cost:
    shape, plan = problem.shape, problem.plan
    item = problem.key_cache.element_size()
    scored = plan.visible_blocks.where(plan.visible_blocks > shape.top_k, 0).double()
    deepest = torch.zeros(plan.num_requests, dtype=torch.float64, device=scored.device)
    deepest.scatter_reduce_(0, plan.request_ids.long(), scored, "amax")
    keys = float(deepest.sum()) * shape.index_dim * item
    rows = ids.shape[0] * (shape.index_heads * shape.index_dim * item + 4 * shape.top_k)
    return Cost(keys + rows, 2.0 * shape.index_heads * shape.index_dim * float(scored.sum()))


def _attend_cost(problem: Problem, ids: torch.Tensor) -> Cost:
    shape, plan = problem.shape, problem.plan
    blocks = -(-plan.max_seq_len // shape.ratio)
    wanted = torch.zeros(plan.num_requests, blocks + 1, dtype=torch.bool, device=ids.device)
    for request in range(plan.num_requests):
        chosen = ids[plan.request_ids == request].long()
        wanted[request].scatter_(0, chosen.where(chosen >= 0, blocks).flatten(), True)
    union = float(wanted[:, :blocks].sum()) * shape.ratio
    attended = float((ids >= 0).sum()) * shape.ratio
    item = problem.kv_cache.element_size()
    moved = union * 2 * shape.kv_heads * shape.head_dim * item
    moved += 3 * problem.query.numel() * problem.query.element_size()
    return Cost(moved, 4.0 * shape.heads * shape.head_dim * attended)


def _prepare_cost(problem: Problem, ids: torch.Tensor) -> Cost:
    """Projections read once; queries, gates, keys, values and index queries written once."""
    shape, rows = problem.shape, problem.plan.num_rows
    heads, pairs = 2 * shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    index = shape.index_heads * shape.index_dim
    read = (heads + pairs + index + shape.index_dim) * problem.query.element_size()
    written = (heads + shape.index_dim) * problem.query.element_size()
    written += pairs * problem.kv_cache.element_size() + index * problem.index_query.element_size()
    return Cost(float(rows * (read + written)), 0.0)


def gate(op: str, problem: Problem, ids: torch.Tensor, backend: str) -> list[str]:
    """Faults of our implementation on sampled rows against float64; none means it may be timed."""
    if op == "prepare":
        return _preparation_gate(problem, backend)
    faults = []
    if "select" in op:
        faults += _selection_faults(problem, ids)
    if "attend" in op:
        faults += attention_faults(problem, ids, attend(problem, ids, backend))
    return faults


def _sampled(problem: Problem) -> torch.Tensor:
    return torch.linspace(0, problem.plan.num_tokens - 1, GATE_ROWS).long().unique()


def _preparation_gate(problem: Problem, backend: str) -> list[str]:
    """The self-check's stage on a step of as many rows, up to 300, at the problem's length."""
    query, plan = problem.query, problem.plan
    rows = min(plan.max_query_len, 300)
    setting = Setting(query.device, backend, query.dtype, problem.shape, rows)
    length = min(plan.max_seq_len, 32_768)
    return [result.detail for result in run_stages(setting, length, ("prepare",)) if not result.ok]


def _selection_faults(problem: Problem, ids: torch.Tensor) -> list[str]:
    plan, faults = problem.plan, []
    for row in _sampled(problem).tolist():
        at = slice(row, row + 1)
        count = max(int(plan.visible_blocks[row]), 1)
        table = plan.page_table[int(plan.request_ids[row])]
        scores, rounding = true_scores(problem.index_query[at], problem.key_cache, table, count)
        faults += selection_faults(ids[at], scores, rounding, plan.visible_blocks[at])
    return faults


def attention_faults(problem: Problem, ids: torch.Tensor, out: torch.Tensor) -> list[str]:
    """Whether sampled rows of `out`, the attention over `ids`, keep their float64 bound."""
    plan, shape, size = problem.plan, problem.shape, problem.shape.page_size
    rows = _sampled(problem)
    tokens, cells = [], []
    for row in rows.tolist():
        position = int(plan.positions[row])
        blocks = ids[row][ids[row] >= 0].long()
        inside = blocks[:, None] * shape.ratio + torch.arange(shape.ratio, device=ids.device)
        tail = torch.arange((position + 1) // shape.ratio * shape.ratio, position + 1)
        tokens.append(torch.cat((inside.flatten(), tail.to(ids.device))))
        page = plan.page_table[int(plan.request_ids[row])].long()[tokens[-1] // size]
        cells.append(torch.stack((page, tokens[-1] % size), -1))
    keys, values = problem.kv_cache.chunk(2, -1)
    rows = rows.to(out.device)
    truth = attention_truth(
        problem.query[rows],
        keys,
        values,
        tokens,
        cells,
        shape.head_dim**-0.5,
        problem.gate[rows],
    )
    seen = within_bound(out[rows], truth.out, truth.bound)
    if seen.ok:
        return []
    return [f"attention is off by {seen.max_error:.2e}, {seen.worst_ratio:.1f} times its bound"]
