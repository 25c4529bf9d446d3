"""QSAAttention: a whole QSA layer, from hidden states to hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flash_qsa import ops
from flash_qsa.checks import UnsupportedError
from flash_qsa.config import QSAConfig
from flash_qsa.layers.cache_dtypes import layer_cache_dtype, main_cache_dtype
from flash_qsa.layers.indexer import QSAIndexer, clear_rows, first_rows
from flash_qsa.layers.norm import ZeroCentredRMSNorm
from flash_qsa.layers.preparation import prepare_unfused
from flash_qsa.layers.projections import keep_checkpoint_names
from flash_qsa.layers.rotary import QSARotary
from flash_qsa.layers.sequences import attend_sequences
from flash_qsa.layers.sharding import shard_sizes, share_heads
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.ops.prepare.api import Caches, Norms
from flash_qsa.plan import BatchPlan

_SCALES = ("k_scale", "v_scale")


class QSAAttention(nn.Module):
    """Projections, preparation, selection, attention and output projection of one layer.

    Trainable names are those of a checkpoint below `…self_attn`: `q_proj` (each head's query, then
    its gate), `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm` and `indexer`; none has a bias. So
    the state dict of transformers' Qwen4-Exp attention loads.

    Two ways to call it. With `plan` and `caches` it is one step of an engine: it writes the paged
    state and is not differentiable. With `query_start` it attends whole packed sequences without
    any cache, and is.

    Args:
        config: geometry of the whole model.
        rotary: the table, shared by all layers; a new one by default.
        ranks, rank: tensor parallelism. Weights are this rank's (`sharding.shard_state_dict`).
        reduce: adds the output projection's partial sums over the ranks; None leaves them.
        pack_projections: one product for Q, gate, K, V and index, with the same answer. The layer
            then has one parameter `qkv_proj.weight`; its state dict keeps the checkpoint's names.
        fused_preparation: one launch, or separate ops with the same answer. The fused op takes
            every rotary form, head dim and ratio that the configuration allows.
        cache_dtype: of K and V: "auto", "bfloat16", "fp8" or "fp8_e4m3".
        cache_dtype_by_prefix: exceptions, by layer prefix or a parent of it. prefix: this layer's.
        index_cache_dtype, max_batched_tokens, workspace, backend: as in `QSAIndexer`.
        deterministic: a row's bits do not depend on its batch.
        alibi_slopes, sinks, sliding_window, output_scale: refused unless None; QSA has none.

    Attributes:
        k_scale, v_scale: FP32 [1] buffers, read on the device where the main cache is FP8.
        heads, kv_heads, kv_replicas: this rank's.

    Raises:
        ValueError: heads that do not divide by the ranks.
        UnsupportedError: a dtype or a feature that QSA does not have, named.
    """

    def __init__(
        self,
        config: QSAConfig,
        *,
        rotary: QSARotary | None = None,
        ranks: int = 1,
        rank: int = 0,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        pack_projections: bool = False,
        fused_preparation: bool = True,
        cache_dtype: str = "auto",
        cache_dtype_by_prefix: Mapping[str, str] | None = None,
        prefix: str = "",
        index_cache_dtype: str = "bf16",
        max_batched_tokens: int | None = None,
        workspace: int | None = None,
        deterministic: bool = False,
        backend: str = "auto",
        alibi_slopes: Any = None,
        sinks: Any = None,
        sliding_window: Any = None,
        output_scale: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _refuse(
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            sliding_window=sliding_window,
            output_scale=output_scale,
        )
        share = share_heads(config.num_heads, config.num_kv_heads, ranks)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank: expected 0 to {ranks - 1}, got {rank}")
        self.config, self.prefix = config, prefix
        self.heads, self.kv_heads, self.kv_replicas = share.heads, share.kv_heads, share.kv_replicas
        self.ranks, self.rank, self.reduce = ranks, rank, reduce
        self.fused_preparation, self.deterministic = fused_preparation, deterministic
        self.backend = backend
        self.cache_dtype_name = layer_cache_dtype(prefix, cache_dtype, cache_dtype_by_prefix or {})
        main_cache_dtype(self.cache_dtype_name, dtype or torch.get_default_dtype())

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        sizes = shard_sizes(config, ranks)
        self.pack_projections = pack_projections
        self._main_width = sum(sizes[:3])
        if pack_projections:
            self.qkv_proj = linear(config.hidden_size, sum(sizes))
            keep_checkpoint_names(self, sizes)
        else:
            self.q_proj = linear(config.hidden_size, sizes[0])
            self.k_proj = linear(config.hidden_size, sizes[1])
            self.v_proj = linear(config.hidden_size, sizes[2])
        self.o_proj = linear(self.heads * config.head_dim, config.hidden_size)
        self.q_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps, device, dtype)
        self.k_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps, device, dtype)
        self.indexer = QSAIndexer(
            config,
            cache_dtype=index_cache_dtype,
            max_batched_tokens=max_batched_tokens,
            own_projection=not pack_projections,
            workspace=workspace,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.rotary = QSARotary(config.rope, None, device, dtype) if rotary is None else rotary
        for name in _SCALES:
            scale = torch.ones(1, dtype=torch.float32, device=device)
            self.register_buffer(name, scale, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        before = {name: getattr(self, name) for name in _SCALES}
        super()._apply(fn, recurse)
        for name, scale in before.items():
            after = getattr(self, name)
            if scale.is_meta:
                setattr(self, name, torch.ones(1, dtype=torch.float32, device=after.device))
            elif after.dtype != scale.dtype:  # a change of the model's dtype is not the scales'
                setattr(self, name, scale.to(after.device))
        return self

    @property
    def cache_dtype(self) -> torch.dtype:
        """Storage of K and V under the layer's present activation dtype."""
        return main_cache_dtype(self.cache_dtype_name, self.q_norm.weight.dtype)

    def norms(self) -> Norms:
        """The ops' form of the layer's four norms."""
        return self.indexer.norms(self.q_norm.weight, self.k_norm.weight)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """qkv [T, Hq·2·D + 2·Hkv·D] and index_qk [T, (Hi + 1)·Di] of hidden states [T, hidden]."""
        if self.pack_projections:
            packed = self.qkv_proj(hidden_states)
            return packed[:, : self._main_width], packed[:, self._main_width :]
        projections = (self.q_proj, self.k_proj, self.v_proj)
        qkv = torch.cat([project(hidden_states) for project in projections], -1)
        return qkv, self.indexer.index_qk_proj(hidden_states)

    def attend(
        self,
        qkv: torch.Tensor,
        index_qk: torch.Tensor,
        positions: torch.Tensor,
        plan: BatchPlan,
        caches: Caches,
        *,
        selection: torch.Tensor | None = None,
        reuse: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Everything between the projections: what a captured graph of an engine may break around.

        Args:
            qkv, index_qk, positions: at least plan.num_rows rows; those behind are ignored.
            selection: int32 [T, K + 1] rows to fill or reuse; the layer's own buffer by default.
            reuse: attend an earlier step's selection. Both caches are updated all the same, and
                every token since that step's last complete block is attended.
            out: [T, Hq, D] to fill.

        Returns:
            [T, Hq, D], gated; zeros in padding rows.
        """
        rows, top_k, ratio = plan.num_rows, self.config.top_k, self.config.compress_ratio
        if torch.is_grad_enabled() and (qkv.requires_grad or index_qk.requires_grad):
            raise RuntimeError(
                "plan: a step that writes caches is not differentiable; run it under "
                "torch.no_grad(), or train on whole sequences with query_start"
            )
        if plan.compress_ratio != ratio:
            raise ValueError(f"plan: compress_ratio {plan.compress_ratio}, the layer has {ratio}")
        scales = {}
        if is_fp8(caches.main.dtype):
            scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        prepared = (ops.prepare if self.fused_preparation else prepare_unfused)(
            qkv[:rows],
            index_qk[:rows],
            first_rows(positions, rows),
            self.rotary.table(),
            self.norms(),
            caches,
            plan,
            backend=self.backend,
            **scales,
        )
        chosen = self.indexer.select(
            prepared.index_query, caches.compressed, plan, selection, reuse
        )
        return ops.sparse_attention(
            prepared.query,
            caches.main,
            chosen[:, :top_k],
            plan.positions,
            plan.page_table,
            plan.request_ids,
            compress_ratio=ratio,
            scale=self.config.scale,
            gate=prepared.gate,
            tail_start=chosen[:, top_k] * ratio if reuse else None,
            plan=plan,
            deterministic=self.deterministic,
            out=out,
            backend=self.backend,
            **scales,
        )

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """The output projection of [T, Hq, D], added up over the ranks where `reduce` is given."""
        projected = self.o_proj(attended.flatten(1))
        return projected if self.reduce is None else self.reduce(projected)

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        positions: torch.Tensor | None = None,
        *,
        plan: BatchPlan | None = None,
        caches: Caches | None = None,
        query_start: torch.Tensor | None = None,
        qkv: torch.Tensor | None = None,
        index_qk: torch.Tensor | None = None,
        selection: torch.Tensor | None = None,
        reuse: bool = False,
    ) -> torch.Tensor:
        """Attention of hidden states [T', hidden].

        Args:
            hidden_states: T' ≥ T rows, T the plan's; may be None where both projections are given.
            positions: rotary positions, [T'], [1, T'], [3, T'] or [T', 1, 3]. With `query_start`
                they default to the positions inside each sequence.
            plan, caches: one step of an engine. Without a plan (and without `query_start`) the
                step is a dummy: the output is zero and selection rows are emptied, except for
                those being reused.
            query_start: int32 [R + 1], first row of each sequence, then T: no caches.
            qkv, index_qk: projected already, as `project` returns them.
            selection, reuse: as in `attend`.

        Returns:
            [T', hidden]; rows behind the plan's are zero.

        Raises:
            RuntimeError: a plan without caches; a step where gradients are recorded; reuse
                without rows.
            ValueError: shapes that do not fit.
        """
        if query_start is not None and plan is not None:
            raise ValueError("query_start: whole sequences and a plan exclude each other")
        given = hidden_states if qkv is None else qkv
        if given is None or (hidden_states is None and index_qk is None):
            raise ValueError("hidden_states: needed unless both qkv and index_qk are given")
        if query_start is None and plan is None:
            self._dummy_step(given.shape[0], selection, reuse)
            return given.new_zeros(given.shape[0], self.config.hidden_size)
        if query_start is None and caches is None:
            raise RuntimeError("caches: the layer's main cache is not bound")
        if positions is None and query_start is None:
            raise ValueError("positions: a step needs the rotary positions of its rows")
        count = given.shape[0] if plan is None else plan.num_rows
        if given.shape[0] < count:
            raise ValueError(f"hidden_states: {given.shape[0]} rows, the plan has {count}")
        if qkv is None or index_qk is None:
            projected = self.project(hidden_states[:count])
            qkv = projected[0] if qkv is None else qkv
            index_qk = projected[1] if index_qk is None else index_qk
        if query_start is None:
            attended = self.attend(
                qkv, index_qk, positions, plan, caches, selection=selection, reuse=reuse
            )
        else:
            attended = self._attend_sequences(qkv, index_qk, positions, query_start)
        out = self.output(attended)
        behind = given.shape[0] - count
        return torch.cat((out, out.new_zeros(behind, out.shape[1]))) if behind else out

    def _attend_sequences(self, qkv, index_qk, positions, query_start) -> torch.Tensor:
        config = self.config
        return attend_sequences(
            qkv,
            index_qk,
            positions,
            query_start,
            self.rotary.table(),
            self.norms(),
            kv_heads=self.kv_heads,
            head_dim=config.head_dim,
            index_head_dim=config.index_head_dim,
            top_k=config.top_k,
            compress_ratio=config.compress_ratio,
            workspace=self.indexer.workspace,
            deterministic=self.deterministic,
            backend=self.backend,
        )

    def _dummy_step(self, count: int, selection: torch.Tensor | None, reuse: bool) -> None:
        if not reuse and (selection is not None or self.indexer.selection is not None):
            clear_rows(self.indexer.rows(count, selection))


def _refuse(**features: Any) -> None:
    for name, value in features.items():
        if value is not None:
            raise UnsupportedError(f"{name}: QSA has none, got {value!r}")
