"""Attention cases: every argument of sparse_attention, its float64 truth, and hostile memory.

Which tokens a row attends is worked out here token by token, apart from the reference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from flash_qsa.checks import Scale
from flash_qsa.ops.fp8 import as_bytes, is_fp8
from flash_qsa.ops.sparse_attention.api import sparse_attention
from flash_qsa.plan import BatchPlan
from flash_qsa.testing.compare import AttentionTruth, assert_within, attention_truth
from flash_qsa.testing.inputs import Problem, Shape, make_problem


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of one call, named as in `sparse_attention`."""

    query: torch.Tensor
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    block_ids: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    request_ids: torch.Tensor
    compress_ratio: int
    scale: float | None = None
    gate: torch.Tensor | None = None
    k_scale: Scale | None = None
    v_scale: Scale | None = None
    tail_start: torch.Tensor | None = None
    token_base: torch.Tensor | None = None
    plan: BatchPlan | None = None

    @classmethod
    def of(cls, problem: Problem, block_ids: torch.Tensor | None = None, **options):
        """The case of a problem's rows, gated unless `gate` says otherwise."""
        plan = problem.plan
        case = cls(
            problem.query,
            problem.kv_cache,
            problem.block_ids() if block_ids is None else block_ids,
            plan.positions,
            plan.page_table,
            plan.request_ids,
            problem.shape.ratio,
            gate=problem.gate,
            plan=plan,
        )
        return dataclasses.replace(case, **options)

    def replace(self, **options) -> AttentionCase:
        return dataclasses.replace(self, **options)

    @property
    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.kv_cache, torch.Tensor):
            return self.kv_cache.chunk(2, -1)
        return self.kv_cache

    def call(self, **options):
        """(out, lse) of the op, into an output full of 12345."""
        arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        out = torch.full_like(self.query, 12345.0, memory_format=torch.contiguous_format)
        return sparse_attention(**arguments, **{"out": out, "return_lse": True, **options})

    def rows(self, rows: list[int] | slice) -> AttentionCase:
        """The same case for some of its rows, without the plan."""
        per_row = ("query", "block_ids", "positions", "request_ids", "gate", "tail_start")
        picked = {name: getattr(self, name) for name in (*per_row, "token_base")}
        picked = {name: value[rows] for name, value in picked.items() if value is not None}
        return self.replace(**picked, plan=None)

    def cells(self) -> list[torch.Tensor]:
        """(page, offset) of every token that each row attends, int64 [n, 2], ascending."""
        keys, _ = self.keys_values
        pages, size = keys.shape[0], keys.shape[2]
        table, ratio = self.page_table.tolist(), self.compress_ratio
        requests, positions = self.request_ids.tolist(), self.positions.tolist()
        bases = [0] * len(positions) if self.token_base is None else self.token_base.tolist()
        result = []
        for row, ids in enumerate(self.block_ids.tolist()):
            position, request, found = positions[row], requests[row], []
            start = (position + 1) // ratio * ratio
            if self.tail_start is not None:
                start = int(self.tail_start[row])
            if position >= 0 and 0 <= request < len(table):
                whole = {block for block in ids if block >= 0 and (block + 1) * ratio <= start}
                tokens = {block * ratio + i for block in whole for i in range(ratio)}
                tokens = {t for t in tokens if (t // ratio + 1) * ratio <= position + 1}
                tokens |= set(range(max(start, 0), position + 1))
                for token in sorted(tokens):
                    place = token + bases[row]
                    if 0 <= place < len(table[request]) * size:
                        page = table[request][place // size]
                        if 0 <= page < pages:
                            found.append((page, place % size))
            result.append(torch.tensor(found, dtype=torch.long).view(-1, 2))
        return result

    def truth(self) -> AttentionTruth:
        """float64 on the case's device, whose vendor's library multiplies; the answer is on the
        CPU."""
        cells = self.cells()
        empty = torch.tensor([len(cell) == 0 for cell in cells])
        cells = [cell.to(self.query.device) for cell in cells]
        scales = [1.0 if scale is None else float(scale) for scale in (self.k_scale, self.v_scale)]
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        truth = attention_truth(
            self.query, *self.keys_values, cells, cells, scale, self.gate, *scales
        )
        return AttentionTruth(
            truth.out.cpu().masked_fill(empty[:, None, None], 0.0),
            truth.bound.cpu().masked_fill(empty[:, None, None], 0.0),
            truth.lse.cpu(),
            truth.lse_bound.cpu(),
        )

    def check(self, truth: AttentionTruth | None = None, **options):
        """Calls the op and compares it with the truth; returns (out, lse)."""
        out, lse = self.call(**options)
        truth = self.truth() if truth is None else truth
        assert_within(out.cpu(), truth.out, truth.bound)
        assert_within(lse.cpu(), truth.lse, truth.lse_bound)
        return out, lse

    def poisoned(self) -> AttentionCase:
        """The same case with NaN in every cell that no row attends."""
        keys, _ = self.keys_values
        used = torch.zeros(keys.shape[0], keys.shape[2], dtype=torch.bool)
        for cells in self.cells():
            used[cells[:, 0], cells[:, 1]] = True
        unused = ~used.to(keys.device)[:, None, :, None]

        def poison(cache: torch.Tensor) -> torch.Tensor:
            nan = 0x7F if is_fp8(cache.dtype) else torch.nan
            return as_bytes(cache).masked_fill(unused, nan).view(cache.dtype)

        if isinstance(self.kv_cache, torch.Tensor):
            return self.replace(kv_cache=poison(self.kv_cache))
        return self.replace(kv_cache=tuple(map(poison, self.kv_cache)))


def case_with_nan(of: str) -> tuple[AttentionCase, int]:
    """Eight rows of one request, of which the first three attend a token whose "key" or "value" has
    NaN in one channel; and that channel."""
    problem = make_problem([64], [8], Shape(heads=2, kv_heads=1, top_k=12))
    ids = torch.arange(12, dtype=torch.int32).repeat(8, 1)
    ids[3:, 10] = -1
    token, channel = 41, 8
    case = AttentionCase.of(problem, ids)
    cache = case.keys_values[of == "value"]
    page = problem.plan.page_table[0, token // problem.shape.page_size]
    cache[page, :, token % problem.shape.page_size, channel] = torch.nan
    return case, channel


def assert_nan_stays(of: str, out: torch.Tensor, lse: torch.Tensor, channel: int) -> None:
    """What `case_with_nan(of)` must give: NaN in the rows that attend it, and nowhere else."""
    assert out[3:].isfinite().all() and lse[3:].isfinite().all()
    if of == "key":
        assert out[:3].isnan().all() and lse[:3].isnan().all()
    else:
        assert out[:3, :, channel].isnan().all() and out.isnan().sum() == 3 * out.shape[1]


def far_and_near_pages(device: torch.device | str = "cpu") -> tuple[AttentionCase, AttentionCase]:
    """The same rows over pages 65,535, 65,536 and 70,000 of a large FP8 pool, and over three.

    Elements of the far pages lie beyond 2^31. Nothing else of the pool is ever touched, so on a CPU
    it takes address space rather than memory.
    """
    shape = Shape(heads=2, kv_heads=2, head_dim=128, page_size=64, top_k=8)
    problem = make_problem(
        [150, 190], [3, 2], shape, dtype=torch.float16, kv_dtype=torch.uint8, spare_pages=0
    )
    named = torch.tensor([65535, 65536, 70000])
    table = problem.plan.page_table.clamp(min=0) % 3
    near_cache = problem.kv_cache[:3].clone()
    near_cache[near_cache % 128 == 0x7F] = 0
    far_cache = torch.empty(70001, 2, 64, 256, dtype=torch.uint8, device=device)
    far_cache[named.to(device)] = near_cache.to(device)
    near = AttentionCase.of(problem, kv_cache=near_cache, page_table=table.int(), plan=None)
    near = dataclasses.replace(
        near,
        **{
            field.name: getattr(near, field.name).to(device)
            for field in dataclasses.fields(near)
            if isinstance(getattr(near, field.name), torch.Tensor)
        },
    )
    far_table = named[table.long()].int().to(device)
    return near.replace(kv_cache=far_cache, page_table=far_table), near
