"""The main cache's backend, its metadata builder and its attention. Imports vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from flash_qsa.checks import UnsupportedError, expect_dtype
from flash_qsa.integrations.vllm.metadata import MainMetadata
from flash_qsa.integrations.vllm.rules import (
    ACTIVATION_DTYPES,
    require_main_cache_dtype,
    require_plain_attention,
)
from flash_qsa.integrations.vllm.step import StepOptions, attend_step
from flash_qsa.layers.cache_dtypes import FP8_CACHE_DTYPES, MAIN_CACHE_DTYPES
from flash_qsa.layers.preparation import store_keys_values
from flash_qsa.ops.prepare.api import Prepared
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import device_target


class MainMetadataBuilder(AttentionMetadataBuilder[MainMetadata]):
    """Passes on what QSA reads of a step; uniform decode batches run under full graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MainMetadata:
        common = common_attn_metadata
        return MainMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class QSABackend(AttentionBackend):
    """What the engine may ask of a QSA layer's main cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(ACTIVATION_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list] = list(MAIN_CACHE_DTYPES)
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "FLASH_QSA"

    @staticmethod
    def get_impl_cls() -> type[QSAImpl]:
        return QSAImpl

    @staticmethod
    def get_builder_cls() -> type[MainMetadataBuilder]:
        return MainMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        # compressed keys and rings are state too, and connectors would not move them
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class QSAImpl(AttentionImpl[MainMetadata]):
    """Sparse attention over a layer's pages.

    Raises (at construction):
        UnsupportedError: ALiBi, sinks, sliding windows, soft caps, encoder attention, a cache dtype
            that is not served, or decode context parallelism.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        kind = str(getattr(attn_type, "value", attn_type))
        require_plain_attention(alibi_slopes, sliding_window, sinks, logits_soft_cap, kind)
        require_main_cache_dtype(kv_cache_dtype)
        if kv_sharing_target_layer_name is not None:
            raise UnsupportedError(
                f"kv_sharing_target_layer_name: QSA layers keep their own cache, got "
                f"{kv_sharing_target_layer_name!r}"
            )
        if self.dcp_world_size != 1:
            raise UnsupportedError(
                f"decode_context_parallel_size: QSA has none, got {self.dcp_world_size}"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    @property
    def is_fp8(self) -> bool:
        return self.kv_cache_dtype in FP8_CACHE_DTYPES

    def typed_cache(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """vLLM allocates FP8 as uint8; typed where the device's compiler has the type."""
        if not self.is_fp8 or not has_e4m3(kv_cache.device):
            return kv_cache
        return kv_cache.view(torch.float8_e4m3fn)

    def scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The layer's K and V scales, read on the device; none without an FP8 cache."""
        return (layer._k_scale, layer._v_scale) if self.is_fp8 else (None, None)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores keys and values [T, Hkv, D] apart from preparation; the same bytes."""
        rows = slot_mapping.shape[0]
        cache = self.typed_cache(kv_cache)
        store_keys_values(cache, slot_mapping, key[:rows], value[:rows], *self.scales(layer))

    def forward_qsa(
        self,
        layer: Any,
        prepared: Prepared,
        kv_cache: torch.Tensor,
        plan: BatchPlan,
        options: StepOptions,
        output: torch.Tensor,
        *,
        reused: bool = False,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fills `output` from the layer's selection rows; rows behind the step become zero.

        Raises:
            RuntimeError: the layer has no selection buffer.
            UnsupportedError: fused output quantisation, or dtypes that are not served.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: fused output quantisation is not supported")
        if plan.num_rows == 0:
            return output.zero_()
        buffer = getattr(layer, "topk_indices_buffer", None)
        if buffer is None:
            raise RuntimeError("topk_indices_buffer: the layer has no selection buffer")
        expect_dtype("query", prepared.query, ACTIVATION_DTYPES)
        k_scale, v_scale = self.scales(layer)
        attend_step(
            options,
            prepared,
            self.typed_cache(kv_cache),
            plan,
            buffer[: plan.num_rows],
            output,
            reused=reused,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return output

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refused: QSA needs a selection, which this call does not carry."""
        raise UnsupportedError("QSAImpl.forward: QSA layers call forward_qsa")


def has_e4m3(device: torch.device) -> bool:
    """Whether kernels on `device` take FP8 pointers; elsewhere they decode bytes."""
    return device.type != "cuda" or device_target(device).has_e4m3
