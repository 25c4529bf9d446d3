"""The index side of a QSA layer: its weights, its two caches and the block selection.

Imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear

from flash_qsa.config import QSAConfig
from flash_qsa.integrations.vllm import rules, selection
from flash_qsa.integrations.vllm.caches import CompressedKeys, KeyRing
from flash_qsa.integrations.vllm.metadata import SideMetadata
from flash_qsa.integrations.vllm.step import StepOptions, select_step
from flash_qsa.plan import BatchPlan


class QSAIndexer(nn.Module):
    """Weights under the checkpoint's `model.layers.N.self_attn.indexer`, replicated over ranks.

    Attributes:
        skip_topk: set by multi-token prediction: later draft steps reuse the rows that step 0
            selected, while both caches are still updated.
    """

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        config: QSAConfig,
        options: StepOptions,
        layer_id: int,
        reusable: bool,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        model_config = vllm_config.model_config
        rules.require_cache(vllm_config.cache_config)
        rules.require_activation_dtype(model_config.dtype)
        self.layer_id, self.prefix = layer_id, prefix
        self.config, self.options, self.reusable = config, options, reusable
        self.skip_topk = False
        dot = f"{prefix}." if prefix else ""
        self.index_qk_proj = ReplicatedLinear(
            config.hidden_size,
            (config.index_heads + config.index_kv_heads) * config.index_head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{dot}index_qk_proj",
        )
        self.q_layernorm = GemmaRMSNorm(config.index_head_dim, eps=config.rms_norm_eps)
        self.k_layernorm = GemmaRMSNorm(config.index_head_dim, eps=config.rms_norm_eps)
        name = vllm_config.attention_config.resolve_indexer_kv_dtype("bf16")
        self.index_dtype = rules.index_cache_storage(name, model_config.dtype)
        common = {
            "head_dim": config.index_head_dim,
            "compress_ratio": config.compress_ratio,
            "cache_config": vllm_config.cache_config,
            "vllm_config": vllm_config,
        }
        self.raw_key_cache = KeyRing(
            prefix=f"{dot}raw_key_cache",
            dtype=model_config.dtype,
            with_positions=bool(model_config.uses_mrope),
            **common,
        )
        self.compressed_key_cache = CompressedKeys(
            prefix=f"{dot}compressed_key_cache", dtype=self.index_dtype, **common
        )

    @property
    def output_width(self) -> int:
        """Token columns of a packed selection: budget + ratio - 1."""
        return self.config.selection_width

    @property
    def packed_output_width(self) -> int:
        """Columns of a packed selection with its count."""
        return self.config.packed_width

    @property
    def row_width(self) -> int:
        """Columns of a selection row: block ids, then the visible count."""
        return selection.row_width(self.config.top_k)

    def side_metadata(self, step: dict[str, Any]) -> tuple[SideMetadata, SideMetadata]:
        """The step's metadata of ring and compressed keys, from the engine's by layer name."""
        return step[self.raw_key_cache.prefix], step[self.compressed_key_cache.prefix]

    def without_step(self, rows: torch.Tensor) -> torch.Tensor:
        """Profiling and dummy batches: rows that select nothing; reused rows stay as they are."""
        if not self.skip_topk:
            selection.clear(rows)
        return rows

    def select(
        self,
        index_query: torch.Tensor,
        page_table: torch.Tensor,
        plan: BatchPlan,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Selects into `rows` (or into new ones), or keeps them while `skip_topk` is set.

        Raises:
            RuntimeError: reuse without a buffer, or in a layer whose rows carry no counts.
            ValueError: a buffer of another shape.
        """
        if self.skip_topk:
            if rows is None:
                raise RuntimeError("skip_topk: reusing a selection needs the buffer that holds it")
            if not self.reusable:
                raise RuntimeError(f"skip_topk: layer {self.layer_id} is no draft layer")
            return rows
        if rows is None:
            shape = (plan.num_rows, self.row_width)
            rows = torch.empty(shape, dtype=torch.int32, device=index_query.device)
        select_step(
            self.options,
            index_query,
            self.compressed_key_cache.kv_cache,
            page_table,
            plan,
            rows,
            self.reusable,
        )
        return rows

    def expand(self, rows: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """The step's selection as vLLM's own kernels read it, [T, packed_output_width].

        Only where the rows carry counts; elsewhere the plan's are the same.
        """
        if not self.reusable:
            rows = rows.clone()
            selection.visible(rows).copy_(plan.visible_blocks)
        return selection.expand(rows, plan.positions, self.config.compress_ratio, self.config.top_k)
