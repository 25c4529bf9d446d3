"""The QSA attention layer that vLLM's Qwen4-Exp models build instead of their own. Imports vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import vllm.envs as envs
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.qwen3_vl import mrope_positions_factor
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    extract_layer_index,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, get_kv_quant_mode

from flash_qsa import dispatch
from flash_qsa.config import QSAConfig
from flash_qsa.integrations.vllm import rules
from flash_qsa.integrations.vllm.backend import QSABackend, QSAImpl
from flash_qsa.integrations.vllm.caches import register_layer, ring_capacity
from flash_qsa.integrations.vllm.indexer import QSAIndexer
from flash_qsa.integrations.vllm.metadata import step_plan
from flash_qsa.integrations.vllm.profiling import LayerSizes, largest_steps, scratch_bytes
from flash_qsa.integrations.vllm.projection import PackedProjection
from flash_qsa.integrations.vllm.settings import Settings
from flash_qsa.integrations.vllm.step import StepOptions, prepare_step
from flash_qsa.layers.sharding import INDEX_SHARD, share_heads
from flash_qsa.ops.prepare.api import Caches, Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.targets import device_target


class QSAAttention(nn.Module, AttentionLayerBase):
    """Projections, the index side branch, and attention over what it selects.

    Weights carry the checkpoint's names. A sigmoid gate is always packed beside Q, head by head.
    """

    supports_dcp = False

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        config: Any,
        layer_id: int,
        quant_config: Any = None,
        reduce_results: bool = True,
        prefix: str = "",
    ) -> None:
        super().__init__()
        model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
        rules.require_cache(cache_config)
        rules.require_activation_dtype(model_config.dtype)
        rules.require_main_cache_dtype(cache_config.cache_dtype)
        rules.require_supported(config, quant_config, vllm_config.parallel_config)
        self.config = config
        self.qsa = QSAConfig.from_hf(config)
        self.settings = Settings.from_config(vllm_config.additional_config)
        self.hidden_size, self.head_dim = self.qsa.hidden_size, self.qsa.head_dim
        self.total_num_heads, self.total_num_kv_heads = self.qsa.num_heads, self.qsa.num_kv_heads
        share = share_heads(
            self.total_num_heads,
            self.total_num_kv_heads,
            get_tensor_model_parallel_world_size(),
        )
        self.num_heads, self.num_kv_heads = share.heads, share.kv_heads
        self.q_size, self.kv_size = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        self.scaling = self.qsa.scale

        # ModelOpt's FP4 checkpoints keep every attention input projection in 16 bits
        projection_quant = without_modelopt_fp4(quant_config)
        self.qkv_proj = QKVParallelLinear(
            self.hidden_size,
            self.head_dim,
            2 * self.total_num_heads,
            self.total_num_kv_heads,
            bias=False,
            quant_config=projection_quant,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            self.total_num_heads * self.head_dim,
            self.hidden_size,
            bias=False,
            reduce_results=reduce_results,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(
            head_size=self.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            mrope_positions_factor=mrope_positions_factor(vllm_config),
        )
        self.q_norm = GemmaRMSNorm(self.head_dim, eps=self.qsa.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(self.head_dim, eps=self.qsa.rms_norm_eps)
        self._rope: RopeTable | None = None
        self._rope_source: torch.Tensor | None = None

        self.layer_name = f"{prefix}.attn"
        self.attn_type = AttentionType.DECODER
        self.kv_sharing_target_layer_name = None
        self.kv_cache_dtype = rules.layer_cache_dtype(
            cache_config.cache_dtype,
            cache_config.kv_cache_dtype_skip_layers,
            extract_layer_index(prefix),
        )
        self.kv_cache_torch_dtype = rules.main_cache_storage(
            self.kv_cache_dtype, model_config.dtype
        )
        self.kv_cache = torch.tensor([])
        set_default_quant_scales(self, register_buffer=True)
        self.attn_backend = QSABackend
        self.impl = QSAImpl(
            self.num_heads,
            self.head_dim,
            self.scaling,
            self.num_kv_heads,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        self.options = StepOptions(
            top_k=self.qsa.top_k,
            compress_ratio=self.qsa.compress_ratio,
            scale=self.scaling,
            fused=self.settings.fused_prepare,
            backend=self.settings.backend,
            deterministic=self.settings.deterministic or envs.VLLM_BATCH_INVARIANT,
            workspace=self._workspace_bytes(),
        )
        self.indexer = QSAIndexer(
            vllm_config=vllm_config,
            config=self.qsa,
            options=self.options,
            layer_id=layer_id,
            reusable=layer_id >= config.num_hidden_layers,
            quant_config=projection_quant,
            prefix=f"{prefix}.indexer",
        )
        self._join_index_projection(vllm_config, projection_quant)
        self.step_limits = (
            vllm_config.scheduler_config.max_num_seqs,
            1 + vllm_config.num_speculative_tokens,
            model_config.max_model_len,
        )
        self.register_buffer(
            "topk_indices_buffer",
            torch.empty(
                vllm_config.scheduler_config.max_num_batched_tokens,
                self.indexer.row_width,
                dtype=torch.int32,
            ),
            persistent=False,
        )
        register_layer(vllm_config, self.layer_name, self)

    def _workspace_bytes(self) -> int:
        size = self.settings.workspace_mib
        return (envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB if size is None else size) << 20

    def _join_index_projection(self, vllm_config: VllmConfig, quant_config: Any) -> None:
        index = self.indexer.index_qk_proj
        self.index_qk_size = index.output_size
        self.fuse_indexer_projection = rules.fuses_index_projection(
            vllm_config.lora_config is not None, self.qkv_proj.quant_method, index.quant_method
        )
        if self.fuse_indexer_projection:
            self.qkv_proj = PackedProjection(self.qkv_proj, self.index_qk_size, quant_config)
            del self.indexer.index_qk_proj

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        mapper = None
        if self.fuse_indexer_projection:
            mapper = WeightsMapper(
                orig_to_new_stacked={"indexer.index_qk_proj.": ("qkv_proj.", INDEX_SHARD)}
            )
        return AutoWeightsLoader(self).load_weights(weights, mapper=mapper)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            head_size_v=self.head_dim,
            dtype=self.kv_cache_torch_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
        )

    def rope_table(self, dtype: torch.dtype) -> RopeTable:
        """vLLM's own cosines and sines, in the activation dtype."""
        table = self.rotary_emb.cos_sin_cache
        if self._rope is None or self._rope_source is not table:
            section = getattr(self.rotary_emb, "mrope_section", None)
            self._rope_source = table
            self._rope = RopeTable(
                table.to(dtype),
                mrope_section=tuple(section) if section else None,
                mrope_interleaved=bool(getattr(self.rotary_emb, "mrope_interleaved", False)),
                neox_style=bool(self.rotary_emb.is_neox_style),
            )
        return self._rope

    def norms(self) -> Norms:
        return Norms(
            self.indexer.q_layernorm.weight,
            self.indexer.k_layernorm.weight,
            self.q_norm.weight,
            self.k_norm.weight,
            self.qsa.rms_norm_eps,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; positions [T] or [3, T]."""
        qkv, _ = self.qkv_proj(hidden_states)
        if self.fuse_indexer_projection:
            qkv, index_qk = qkv.split(
                (2 * self.q_size + 2 * self.kv_size, self.index_qk_size), dim=-1
            )
        else:
            index_qk, _ = self.indexer.index_qk_proj(hidden_states)
        rows = hidden_states.shape[0]
        output = qkv.new_empty(rows, self.num_heads, self.head_dim)
        self._run_qsa(qkv, index_qk, positions, output)
        projected, _ = self.o_proj(output.view(rows, -1))
        return projected

    @eager_break_during_capture
    def _run_qsa(
        self,
        qkv: torch.Tensor,
        index_qk: torch.Tensor,
        positions: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Prepares, selects and attends; `output` is written in place.

        Raises:
            RuntimeError: an unbound main cache, or metadata that disagrees.
        """
        step = get_forward_context().attn_metadata
        step = step[0] if isinstance(step, list) else step
        if not isinstance(step, dict):
            self._profile(output)
            return
        main = step[self.layer_name]
        if self.kv_cache.numel() == 0:
            raise RuntimeError(f"{self.layer_name}: the main cache is not bound")
        ring, compressed = self.indexer.side_metadata(step)
        caches = Caches(
            self.impl.typed_cache(self.kv_cache),
            self.indexer.compressed_key_cache.kv_cache,
            self.indexer.raw_key_cache.kv_cache,
        )
        plan = step_plan(main, ring, compressed, caches.ring.shape[1])
        if plan.num_rows == 0:
            output.zero_()
            return
        k_scale, v_scale = self.impl.scales(self)
        prepared = prepare_step(
            self.options,
            qkv,
            index_qk,
            positions,
            self.rope_table(qkv.dtype),
            self.norms(),
            caches,
            plan,
            k_scale,
            v_scale,
        )
        rows = self.topk_indices_buffer[: plan.num_rows]
        self.indexer.select(prepared.index_query, compressed.block_table, plan, rows)
        self.impl.forward_qsa(
            self,
            prepared,
            self.kv_cache,
            plan,
            self.options,
            output,
            reused=self.indexer.skip_topk,
        )

    def _profile(self, output: torch.Tensor) -> None:
        """Allocates a step's peak scratch once, so that the engine leaves room for it: query, gate
        and index queries, and beside them what selecting or attending takes."""
        rows, device = output.shape[0], output.device
        index = rows * self.qsa.index_heads * self.qsa.index_head_dim * output.element_size()
        prepared = 2 * output.numel() * output.element_size() + index
        scratch = self._scratch_bytes(rows, device)
        torch.empty(scratch + prepared, dtype=torch.uint8, device=device)
        self.indexer.without_step(self.topk_indices_buffer[: output.shape[0]])
        output.zero_()

    def _scratch_bytes(self, rows: int, device: torch.device) -> int:
        """Of the kernels, for the largest step of `rows` rows; a CPU's memory is not planned."""
        if rows == 0 or device.type == "cpu":
            return 0
        if dispatch.choose(self.options.backend, device).backend != "triton":
            return 0
        max_requests, max_draft_rows, max_seq_len = self.step_limits
        ratio = self.qsa.compress_ratio
        sizes = LayerSizes(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            index_heads=self.qsa.index_heads,
            index_dim=self.qsa.index_head_dim,
            page_size=self.indexer.compressed_key_cache.page_size(ratio),
            ring_capacity=ring_capacity(ratio, max_draft_rows - 1),
            dtype=self.q_norm.weight.dtype,
            main_dtype=self.kv_cache_torch_dtype,
            index_dtype=self.indexer.index_dtype,
        )
        shapes = largest_steps(rows, max_requests, max_draft_rows, max_seq_len)
        return scratch_bytes(sizes, self.options, shapes, device_target(device))


def without_modelopt_fp4(quant_config: Any) -> Any:
    """No quantisation where ModelOpt's FP4 checkpoints have none."""
    if quant_config is not None and quant_config.get_name() == "modelopt_fp4":
        return None
    return quant_config
