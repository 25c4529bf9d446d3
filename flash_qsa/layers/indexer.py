"""QSAIndexer: the weights of the index side, and the rows that it selects."""

from __future__ import annotations

import torch
from torch import nn

from flash_qsa import ops
from flash_qsa.config import QSAConfig
from flash_qsa.layers.cache_dtypes import index_cache_dtype
from flash_qsa.layers.norm import ZeroCentredRMSNorm
from flash_qsa.layers.preparation import prepare_index, real_positions
from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan


class QSAIndexer(nn.Module):
    """Scores compressed keys and selects blocks, once for all heads of a layer.

    Trainable names are those of a checkpoint below `…self_attn.indexer`: `index_qk_proj`,
    `q_layernorm`, `k_layernorm`. They are whole on every tensor-parallel rank. A selection is not
    differentiable, so they receive no gradients from attention.

    A *selection row* is int32 [K + 1]: K block ids, ascending, -1 behind the last, then the number
    of complete blocks that the row saw when it was selected. Ids and count stay together when rows
    are moved, and give both what is attended and where the open group begins.

    Args:
        config: geometry.
        cache_dtype: of the compressed keys, "bf16" (what the model computes in) or "fp8_e4m3".
        max_batched_tokens: rows of the layer's own selection buffer, which lets later draft steps
            reuse an earlier selection; None for no buffer.
        own_projection: False where the attention's packed projection holds the index rows.
        workspace: bytes that scoring may hold at a time, or None for the op's default.
        backend: as the ops take it.

    Attributes:
        selection: the buffer, int32 [max_batched_tokens, K + 1], not part of the state dict, or
            None.

    Raises:
        UnsupportedError: another cache dtype, or an activation dtype that QSA does not run in.
    """

    def __init__(
        self,
        config: QSAConfig,
        *,
        cache_dtype: str = "bf16",
        max_batched_tokens: int | None = None,
        own_projection: bool = True,
        workspace: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        index_cache_dtype(cache_dtype, dtype or torch.get_default_dtype())
        self.config, self.cache_dtype_name = config, cache_dtype
        self.workspace, self.backend = workspace, backend
        dim, eps = config.index_head_dim, config.rms_norm_eps
        if own_projection:
            width = (config.index_heads + config.index_kv_heads) * dim
            self.index_qk_proj = nn.Linear(
                config.hidden_size, width, bias=False, device=device, dtype=dtype
            )
        self.q_layernorm = ZeroCentredRMSNorm(dim, eps, device, dtype)
        self.k_layernorm = ZeroCentredRMSNorm(dim, eps, device, dtype)
        rows = None
        if max_batched_tokens is not None:
            rows = empty_rows(max_batched_tokens, config.top_k, device)
        self.register_buffer("selection", rows, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        before = self.selection
        super()._apply(fn, recurse)
        if before is not None and before.is_meta:
            clear_rows(self.selection)
        return self

    @property
    def cache_dtype(self) -> torch.dtype:
        """Storage of the compressed keys under the layer's present activation dtype."""
        return index_cache_dtype(self.cache_dtype_name, self.q_layernorm.weight.dtype)

    def rows(self, count: int, given: torch.Tensor | None, reuse: bool = False) -> torch.Tensor:
        """`count` selection rows: those given, the layer's own buffer, or new ones.

        Raises:
            ValueError: rows of another shape or dtype; more rows than the buffer has.
            RuntimeError: `reuse` with neither given rows nor a buffer.
        """
        shape = (count, self.config.top_k + 1)
        if given is not None:
            if tuple(given.shape) != shape or given.dtype != torch.int32:
                raise ValueError(
                    f"selection: expected int32 {list(shape)}, got {given.dtype} "
                    f"{list(given.shape)}"
                )
            return given
        if self.selection is not None:
            if count > self.selection.shape[0]:
                raise ValueError(
                    f"selection: {count} rows exceed max_batched_tokens {self.selection.shape[0]}"
                )
            return self.selection[:count]
        if reuse:
            raise RuntimeError(
                "selection: reuse needs the rows of an earlier step; pass them, or give the layer "
                "max_batched_tokens"
            )
        return torch.empty(shape, dtype=torch.int32, device=self.q_layernorm.weight.device)

    def select(
        self,
        index_query: torch.Tensor,
        compressed: torch.Tensor,
        plan: BatchPlan,
        rows: torch.Tensor | None = None,
        reuse: bool = False,
    ) -> torch.Tensor:
        """Fills and returns selection rows [T, K + 1]; with `reuse` they stay as they are."""
        rows = self.rows(plan.num_rows, rows, reuse)
        if reuse:
            return rows
        top_k = self.config.top_k
        ops.select_blocks(
            index_query,
            compressed,
            plan.page_table,
            plan.request_ids,
            plan.visible_blocks,
            top_k,
            plan=plan,
            workspace=self.workspace,
            out=rows[:, :top_k],
            backend=self.backend,
        )
        rows[:, top_k].copy_(plan.visible_blocks)
        return rows

    def packed(
        self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Selection rows as token lists that other engines read.

        Args:
            rows: int32 [T, K + 1] of this step. positions: [T], logical.

        Returns:
            int32 [T, W + 1]: tokens, -1 behind the last, then their count.
        """
        top_k = self.config.top_k
        return ops.expand_blocks(
            rows[:, :top_k],
            positions,
            rows[:, top_k].contiguous(),
            self.config.compress_ratio,
            out=out,
            backend=self.backend,
        )

    def compact(self, kept: torch.Tensor) -> None:
        """Moves the buffer's rows `kept` (int64 [n]) to its front, ids and counts together."""
        if self.selection is None:
            raise RuntimeError("selection: the layer has no buffer, give it max_batched_tokens")
        self.selection[: kept.shape[0]] = self.selection.index_select(0, kept)

    def norms(self, query: torch.Tensor | None = None, key: torch.Tensor | None = None) -> Norms:
        """The ops' form of the norms; the main ones are the attention's."""
        index_query, index_key = self.q_layernorm.weight, self.k_layernorm.weight
        return Norms(
            index_query,
            index_key,
            index_query if query is None else query,
            index_key if key is None else key,
            self.config.rms_norm_eps,
        )

    @torch.no_grad()
    def forward(
        self,
        hidden_states: torch.Tensor | None,
        positions: torch.Tensor,
        *,
        rope: RopeTable,
        compressed: torch.Tensor | None = None,
        ring: torch.Tensor | None = None,
        plan: BatchPlan | None = None,
        index_qk: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        reuse: bool = False,
    ) -> torch.Tensor:
        """The index side of a step on its own, for engines that attend packed token lists.

        Args:
            hidden_states: [T', hidden], T' ≥ T; ignored where `index_qk` is given.
            positions: rotary positions, [T'], [1, T'], [3, T'] or [T', 1, 3].
            rope: in the activation dtype. compressed, ring: the layer's state, updated in place.
            plan: the step's batch of T rows; None for a dummy step, whose rows are all empty.
            index_qk: [T', (Hi + 1)·Di], projected already.
            out: int32 [T, W + 1] to fill (T' rows without a plan).
            reuse: keep `out` as an earlier step left it; the state is updated all the same.

        Returns:
            int32 [T, W + 1]: tokens, -1 behind the last, then their count.

        Raises:
            RuntimeError: `reuse` without `out`; a plan without state.
            ValueError: shapes that do not fit.
        """
        given = hidden_states if index_qk is None else index_qk
        count = given.shape[0] if plan is None else plan.num_rows
        if reuse and out is None:
            raise RuntimeError("out: reuse needs the buffer that an earlier step filled")
        shape = (count, self.config.packed_width)
        if out is not None and (tuple(out.shape) != shape or out.dtype != torch.int32):
            raise ValueError(
                f"out: expected int32 {list(shape)}, got {out.dtype} {list(out.shape)}"
            )
        if plan is None:
            if out is None:
                out = given.new_empty(shape, dtype=torch.int32)
            if not reuse:
                clear_rows(out)
            return out
        if compressed is None or ring is None:
            raise RuntimeError("compressed, ring: the layer's index caches are not bound")
        if index_qk is None:
            index_qk = self.index_qk_proj(hidden_states[:count])
        at = real_positions(first_rows(positions, count), plan)
        query = prepare_index(
            index_qk[:count], at, rope, self.norms(), compressed, ring, plan, backend=self.backend
        )
        if reuse:
            return out
        rows = self.select(query, compressed, plan)
        return self.packed(rows, plan.positions, out)


def empty_rows(count: int, top_k: int, device: torch.device | str | None = None) -> torch.Tensor:
    """int32 [count, K + 1] selection rows that select nothing."""
    rows = torch.empty(count, top_k + 1, dtype=torch.int32, device=device)
    clear_rows(rows)
    return rows


def clear_rows(rows: torch.Tensor) -> None:
    """Empties rows of either form: ids -1, count 0."""
    rows.fill_(-1)
    rows[:, -1] = 0


def first_rows(positions: torch.Tensor, count: int) -> torch.Tensor:
    """Rotary positions of the first `count` rows, in whichever form they came."""
    return positions[:count] if positions.dim() == 3 else positions[..., :count]
