"""Two attention layers, vLLM's and ours, with the same weights on memory of the same layout."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm.models.qwen4_exp.nvidia.model as stock_model  # first: vLLM imports in a circle
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.models.qwen4_exp.common.qsa_cache import QSAMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata

from flash_qsa.integrations.vllm import owner as our_owner
from flash_qsa.integrations.vllm.backend import MainMetadataBuilder
from flash_qsa.integrations.vllm.caches import SideMetadataBuilder
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.tiny_models import tiny_text_config
from flash_qsa.testing.vllm_layout import PagedEngine

StockAttention = stock_model.Qwen4ExpQSAAttention
PREFIX = "model.layers.1.self_attn"
MAX_TOKENS, MAX_REQUESTS = 128, 8


def text_config(**overrides: Any) -> Any:
    """Head sizes that vLLM's fused preparation has; the rest is tiny."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    fields = {
        "head_dim": 128,
        "indexer_head_dim": 128,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
    }
    return tiny_text_config(**{**fields, **overrides})


def engine_config(
    config: Any,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv: str = "auto",
    index: str = "auto",
    block_size: int = 48,
    drafts: int = 0,
    additional: Any = None,
    **changes: Any,
) -> SimpleNamespace:
    """The parts of a VllmConfig that attention layers and metadata builders read."""
    speculative = None
    if drafts:
        speculative = SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False, target_model_config=None
        )
    fields = {
        "model_config": SimpleNamespace(
            dtype=dtype,
            hf_text_config=config,
            multimodal_config=None,
            uses_mrope="mrope_section" in config.rope_parameters,
            max_model_len=512,
        ),
        "cache_config": SimpleNamespace(
            cache_dtype=kv, block_size=block_size, kv_cache_dtype_skip_layers=[]
        ),
        "parallel_config": SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1
        ),
        "scheduler_config": SimpleNamespace(
            max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_REQUESTS
        ),
        "compilation_config": SimpleNamespace(static_forward_context={}),
        "attention_config": SimpleNamespace(
            resolve_indexer_kv_dtype=lambda default: default if index == "auto" else index
        ),
        "speculative_config": speculative,
        "num_speculative_tokens": drafts,
        "lora_config": None,
        "quant_config": None,
        "additional_config": additional or {},
        "use_v2_model_runner": True,
    }
    return SimpleNamespace(**{**fields, **changes})


def build(kind: type, vllm_config: Any, *, layer_id: int = 1, quant_config: Any = None) -> Any:
    torch.set_default_dtype(vllm_config.model_config.dtype)
    prefix = PREFIX.replace(".1.", f".{layer_id}.")
    layer = kind(
        vllm_config=vllm_config,
        config=vllm_config.model_config.hf_text_config,
        layer_id=layer_id,
        quant_config=quant_config,
        prefix=prefix,
    )
    torch.set_default_dtype(torch.float32)
    return layer


def checkpoint(config: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Weights under the checkpoint's names, below the layer's prefix."""
    generator = torch.Generator().manual_seed(11)
    hidden, dim, index_dim = config.hidden_size, config.head_dim, config.indexer_head_dim
    sizes = {
        "q_proj": 2 * config.num_attention_heads * dim,
        "k_proj": config.num_key_value_heads * dim,
        "v_proj": config.num_key_value_heads * dim,
        "indexer.index_qk_proj": (config.indexer_n_heads + 1) * index_dim,
    }
    weights = {
        f"{name}.weight": torch.randn(rows, hidden, generator=generator) * hidden**-0.5
        for name, rows in sizes.items()
    }
    width = config.num_attention_heads * dim
    weights["o_proj.weight"] = torch.randn(hidden, width, generator=generator) * width**-0.5
    for name, size in (
        ("q_norm", dim),
        ("k_norm", dim),
        ("indexer.q_layernorm", index_dim),
        ("indexer.k_layernorm", index_dim),
    ):
        weights[f"{name}.weight"] = 0.2 * torch.randn(size, generator=generator)
    return {name: weight.to(dtype) for name, weight in weights.items()}


class Quantised(QuantizationConfig):
    """A quantisation that leaves every layer in 16 bits, and notes which layers asked."""

    def __init__(self, name: str, **fields) -> None:
        super().__init__()
        self.name, self.asked = name, []
        vars(self).update(fields)

    def get_name(self) -> str:
        return self.name

    def get_quant_method(self, layer, prefix):
        self.asked.append(prefix)
        return UnquantizedLinearMethod()

    def get_supported_act_dtypes(self):
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config):
        raise NotImplementedError


STACKED = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


def load(layer: Any, weights: dict[str, torch.Tensor]) -> set[str]:
    """As vLLM's model does: q, k and v arrive as named shards of qkv_proj."""

    def named():
        for name, weight in weights.items():
            part = name.split(".")[0]
            if part in STACKED:
                weight = weight.clone()
                weight.shard_id = STACKED[part]
                name = name.replace(part, "qkv_proj")
            yield name, weight

    return layer.load_weights(named())


def finish_loading(layer: Any) -> None:
    """vLLM's step after the weights are there."""
    for module in layer.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


class Side:
    """A layer with its caches bound and metadata built the way the engine does."""

    def __init__(self, kind: type, vllm_config: Any, shape: Shape, requests: int, length: int):
        self.config = vllm_config
        self.layer = build(kind, vllm_config)
        self.specs = {
            name: layer.get_kv_cache_spec(vllm_config)
            for name, layer in vllm_config.compilation_config.static_forward_context.items()
        }
        self.main_name = self.layer.layer_name
        self.ring_name = self.layer.indexer.raw_key_cache.prefix
        self.key_name = self.layer.indexer.compressed_key_cache.prefix
        self.memory = PagedEngine(
            shape,
            requests,
            length,
            vllm_config.model_config.dtype,
            main_dtype=self.specs[self.main_name].dtype,
            index_dtype=self.specs[self.key_name].dtype,
            with_positions=vllm_config.model_config.uses_mrope,
        )
        self.layer.bind_kv_cache(self.memory.main)
        self.layer.indexer.compressed_key_cache.bind_kv_cache(
            self.memory.compressed.transpose(1, 2)
        )
        self.layer.indexer.raw_key_cache.bind_kv_cache(self.memory.ring.transpose(1, 2))
        self.ours = kind is not StockAttention
        self.seen: dict[str, Any] = {}
        self._watch()
        builder = SideMetadataBuilder if self.ours else QSAMetadataBuilder
        self.builders = {
            name: builder(self.specs[name], [name], vllm_config, torch.device("cpu"))
            for name in (self.ring_name, self.key_name)
        }
        self.main_builder = MainMetadataBuilder(
            self.specs[self.main_name], [self.main_name], vllm_config, torch.device("cpu")
        )

    def _watch(self) -> None:
        """Keeps the attention's output of the last step, and what ours prepared for it."""
        run, output_at = self.layer._run_qsa, 3 if self.ours else 5

        def run_qsa(*args):
            run(*args)
            self.seen["output"] = args[output_at]

        self.layer._run_qsa = run_qsa
        if self.ours:
            attend = self.layer.impl.forward_qsa

            def forward_qsa(layer, prepared, *args, **kwargs):
                self.seen["prepared"] = prepared
                return attend(layer, prepared, *args, **kwargs)

            self.layer.impl.forward_qsa = forward_qsa

    def metadata(self, which, query_lens, seq_lens, **padding) -> dict[str, Any]:
        def common(ring: bool) -> CommonAttentionMetadata:
            fields = self.memory.common(which, query_lens, seq_lens, ring=ring, **padding)
            return CommonAttentionMetadata(**vars(fields))

        return {
            self.main_name: self.main_builder.build(0, common(False)),
            self.ring_name: self.builders[self.ring_name].build(0, common(True)),
            self.key_name: self.builders[self.key_name].build(0, common(False)),
        }

    def forward(self, metadata: Any, positions: torch.Tensor, hidden: torch.Tensor):
        with forward_context(metadata), torch.inference_mode():
            return self.layer(positions=positions, hidden_states=hidden)


@contextlib.contextmanager
def forward_context(metadata: Any):
    """What `get_forward_context` answers inside, in vLLM's modules and in ours."""
    import vllm.models.qwen4_exp.nvidia.indexer_qsa as stock_indexer
    import vllm.models.qwen4_exp.nvidia.qsa as stock_qsa

    context = SimpleNamespace(attn_metadata=metadata)
    with contextlib.ExitStack() as stack:
        for module in (stock_indexer, stock_qsa, our_owner):
            stack.enter_context(mock.patch.object(module, "get_forward_context", lambda: context))
        yield
