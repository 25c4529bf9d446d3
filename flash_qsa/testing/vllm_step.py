"""A QSA layer behind its projections, driven step by step on vLLM's layout, beside the oracle."""

from __future__ import annotations

import dataclasses

import torch

from flash_qsa.config import RopeConfig
from flash_qsa.integrations.vllm import selection
from flash_qsa.integrations.vllm.step import (
    StepOptions,
    attend_step,
    prepare_step,
    select_step,
)
from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.oracle import Oracle
from flash_qsa.testing.vllm_layout import PagedEngine

ROPE = RopeConfig(theta=1e4, rotary_dim=8, max_positions=256)


@dataclasses.dataclass
class StepLayer:
    """Random weights, the projections of whole requests, and the oracle's answer to them."""

    shape: Shape
    options: StepOptions
    rope: RopeTable
    norms: Norms
    qkv: list[torch.Tensor]
    index_qk: list[torch.Tensor]
    positions: list[torch.Tensor]

    @classmethod
    def make(
        cls,
        shape: Shape,
        lengths: list[int],
        *,
        rope: RopeConfig = ROPE,
        device: torch.device | str = "cpu",
        **options,
    ) -> StepLayer:
        """Requests of `lengths` tokens; options are `StepOptions`'."""
        generator = torch.Generator().manual_seed(7)

        def noise(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device)

        norms = Norms(
            *(0.2 * noise(dim) for dim in (shape.index_dim,) * 2 + (shape.head_dim,) * 2), 1e-6
        )
        width = 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
        positions = [torch.arange(n, device=device) for n in lengths]
        if rope.mrope_section:
            positions = [torch.stack((p, p // 2 + 3, p // 3 + 1), -1) for p in positions]
        return cls(
            shape,
            StepOptions(shape.top_k, shape.ratio, shape.head_dim**-0.5, **options),
            RopeTable.from_config(rope, torch.float32, device),
            norms,
            [noise(n, width) for n in lengths],
            [noise(n, (shape.index_heads + 1) * shape.index_dim) for n in lengths],
            positions,
        )

    def truth(self, request: int) -> torch.Tensor:
        """float64 output [n, Hq, D] of a whole request."""
        return self._oracle().run(*self._whole(request)).out

    def reused_truth(self, request: int, token: int, row: torch.Tensor) -> torch.Tensor:
        """[Hq, D] of a token that reuses selection row `row`: its blocks, and every token from the
        first one that the selecting token had not seen complete."""
        shape, oracle = self.shape, self._oracle()
        rows = oracle.rows(*self._whole(request))
        blocks = [block for block in row[: shape.top_k].tolist() if block >= 0]
        tokens = [block * shape.ratio + i for block in blocks for i in range(shape.ratio)]
        tokens += range(int(row[-1]) * shape.ratio, token + 1)
        return oracle.attend(rows.query[token], rows.gate[token], rows.key, rows.value, tokens)

    def _oracle(self) -> Oracle:
        shape = self.shape
        rope = dataclasses.replace(self.rope, cos_sin=self.rope.cos_sin.cpu())
        norms = Norms(*(weight.cpu() for weight in self.norms[:4]), self.norms.eps)
        return Oracle(
            rope, norms, shape.heads, shape.kv_heads, shape.head_dim,
            shape.index_heads, shape.index_dim, shape.ratio, shape.top_k,
        )  # fmt: skip

    def _whole(self, request: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sources = (self.qkv, self.index_qk, self.positions)
        return tuple(tensors[request].cpu() for tensors in sources)

    def rows_of(
        self, which: list[int], query_lens: list[int], seq_lens: list[int], padding: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The step's projections and positions; padding is NaN and an impossible position."""

        def gather(tensors: list[torch.Tensor], fill: float) -> torch.Tensor:
            parts = [
                tensors[request][length - count : length]
                for request, count, length in zip(which, query_lens, seq_lens)
            ]
            shape = (padding, *parts[0].shape[1:])
            return torch.cat((*parts, parts[0].new_full(shape, fill)))

        positions = gather(self.positions, 10**6)
        return (
            gather(self.qkv, float("nan")),
            gather(self.index_qk, float("nan")),
            positions if positions.dim() == 1 else positions.t(),
        )

    def run(
        self,
        engine: PagedEngine,
        which: list[int],
        query_lens: list[int],
        seq_lens: list[int],
        rows: torch.Tensor | None = None,
        *,
        padded: int = 0,
        reused: bool = False,
        **steering: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step; returns output [T + 3, Hq, D], rows behind the plan's included, and the
        selection rows. `steering` replaces host integers of the plan."""
        plan = engine.step(
            which,
            query_lens,
            seq_lens,
            padded_rows=padded,
            padded_requests=int(padded > 0),
            backend=self.options.backend,
        )
        plan = dataclasses.replace(plan, **steering)
        qkv, index_qk, positions = self.rows_of(which, query_lens, seq_lens, padded)
        prepared = prepare_step(
            self.options, qkv, index_qk, positions, self.rope, self.norms, engine.caches, plan
        )
        if rows is None:
            width = selection.row_width(self.shape.top_k)
            rows = plan.request_ids.new_full((plan.num_rows, width), 0x7FFFFFFF)
            compressed = engine.caches.compressed
            select_step(
                self.options, prepared.index_query, compressed, plan.page_table, plan, rows, True
            )
        output = qkv.new_full(
            (plan.num_rows + 3, self.shape.heads, self.shape.head_dim), float("nan")
        )
        attend_step(self.options, prepared, engine.caches.main, plan, rows, output, reused=reused)
        return output, rows
