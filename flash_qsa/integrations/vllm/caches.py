"""vLLM layers that own the compressed keys and the raw-key rings, with their backend and metadata.

They hold memory and describe it; the attention layer (`owner`) computes. Imports vLLM.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheLayout,
    KVCacheSpec,
    MLAAttentionSpec,
)

from flash_qsa.integrations.vllm.metadata import BatchSplit, SideBuffers, SideMetadata
from flash_qsa.integrations.vllm.rules import ACTIVATION_DTYPES
from flash_qsa.integrations.vllm.settings import Settings
from flash_qsa.layers.cache_dtypes import MAIN_CACHE_DTYPES
from flash_qsa.ops.compress_keys.ring_rows import ring_width


def ring_capacity(compress_ratio: int, draft_tokens: int) -> int:
    """Rows of a ring: the open group and every drafted row, in whole groups.

    A narrower ring would let a rejected draft overwrite a key that the next step still pools.
    """
    return -(-(compress_ratio + draft_tokens) // compress_ratio) * compress_ratio


class SideMetadataBuilder(AttentionMetadataBuilder[SideMetadata]):
    """Builds `SideMetadata` in place, once a step and group, for uniform batches under graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        scheduler = vllm_config.scheduler_config
        self.buffers = SideBuffers(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, device)
        self.is_ring = isinstance(kv_cache_spec, CircularBufferSpec)
        self.backend = Settings.from_config(vllm_config.additional_config).backend

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SideMetadata:
        common = common_attn_metadata
        counts = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        split = BatchSplit.of(counts, common.query_start_loc_cpu)
        spec = self.kv_cache_spec
        if self.is_ring:
            return self.buffers.ring_step(common, split, spec.block_size, self.backend)
        return self.buffers.compressed_step(
            common, split, spec.tokens_per_state, spec.num_states, self.backend
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> SideMetadata:
        """The graph is replayed for longer requests than the ones it is captured with, so its
        bound on their length is the model's."""
        metadata = self.build(0, common_attn_metadata)
        metadata.max_seq_len = self.vllm_config.model_config.max_model_len
        return metadata


class SideCacheBackend(AttentionBackend):
    """Describes caches that no attention call reads by itself."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(ACTIVATION_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list] = list(MAIN_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "FLASH_QSA_STATE"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError("flash-qsa's side caches have no attention of their own")

    @staticmethod
    def get_builder_cls() -> type[SideMetadataBuilder]:
        return SideMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # side pages share a block with the main pages, so blocks come first
        return (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)


class _SideCache(nn.Module, AttentionLayerBase):
    supports_dcp = False

    def __init__(
        self,
        prefix: str,
        width: int,
        dtype: torch.dtype,
        compress_ratio: int,
        cache_config: CacheConfig,
        vllm_config: VllmConfig,
    ) -> None:
        super().__init__()
        self.prefix, self.width, self.dtype = prefix, width, dtype
        self.compress_ratio, self.cache_config = compress_ratio, cache_config
        self.page_size(compress_ratio)
        self.kv_cache = torch.tensor([])
        register_layer(vllm_config, prefix, self)

    def page_size(self, unit: int) -> int:
        """Tokens of a page, which hybrid models raise after their layers are built.

        Raises:
            ValueError: pages that are not a multiple of `unit` tokens.
        """
        size = self.cache_config.block_size
        if size % unit:
            raise ValueError(
                f"block_size: pages of {size} tokens are not a multiple of {unit} (compress ratio "
                f"{self.compress_ratio})"
            )
        return size

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Takes vLLM's view [blocks, 1, rows, width] as [blocks, rows, 1, width]."""
        if (
            kv_cache.dim() != 4
            or kv_cache.shape[1] != 1
            or kv_cache.shape[3] != self.width
            or kv_cache.dtype != self.dtype
        ):
            raise ValueError(
                f"{self.prefix}: expected a {self.dtype} cache [blocks, 1, rows, {self.width}], "
                f"got {kv_cache.dtype} {list(kv_cache.shape)}"
            )
        super().bind_kv_cache(kv_cache.transpose(1, 2))

    def get_attn_backend(self) -> type[AttentionBackend]:
        return SideCacheBackend

    def forward(self) -> None:
        """Never called; vLLM requires modules to have one."""


class KeyRing(_SideCache):
    """Raw keys of each request's open group, with their exact positions in mRoPE models."""

    def __init__(self, head_dim: int, dtype: torch.dtype, with_positions: bool, **common) -> None:
        super().__init__(width=ring_width(head_dim, dtype, with_positions), dtype=dtype, **common)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        capacity = ring_capacity(self.compress_ratio, vllm_config.num_speculative_tokens)
        self.page_size(capacity)  # the scheduler's block is a multiple of every group's
        return CircularBufferSpec(
            block_size=capacity,
            num_kv_heads=1,
            head_size=self.width,
            head_size_v=0,
            dtype=self.dtype,
        )


class CompressedKeys(_SideCache):
    """One normed and rotated key for each complete group, beside the main pages."""

    def __init__(self, head_dim: int, **common) -> None:
        super().__init__(width=head_dim, **common)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=self.page_size(self.compress_ratio),
            num_kv_heads=1,
            head_size=self.width,
            dtype=self.dtype,
            tokens_per_state=self.compress_ratio,
        )


def register_layer(vllm_config: VllmConfig, name: str, layer: nn.Module) -> None:
    """Makes a layer known to the engine by name.

    Raises:
        ValueError: the name is taken.
    """
    known = vllm_config.compilation_config.static_forward_context
    if name in known:
        raise ValueError(f"layer name: {name!r} is already registered")
    known[name] = layer
