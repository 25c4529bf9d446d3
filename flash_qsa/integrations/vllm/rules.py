"""What the vLLM integration accepts, as plain functions of plain values.

A refusal names the setting and the value seen, before any weight is loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_qsa.checks import UnsupportedError
from flash_qsa.layers import cache_dtypes

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)


def require_cache(cache_config: Any) -> None:
    """Requires an engine with a paged cache."""
    if cache_config is None:
        raise ValueError("cache_config: QSA needs a paged KV cache, the engine has none")


def require_activation_dtype(dtype: torch.dtype) -> None:
    """Requires a 16-bit model."""
    if dtype not in ACTIVATION_DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedError(f"model dtype: QSA in vLLM runs in bfloat16 or float16, got {name}")


def require_main_cache_dtype(name: str) -> None:
    """Requires a main cache that the kernels read: `--kv-cache-dtype`."""
    cache_dtypes.require_main_cache_dtype(name, "kv_cache_dtype")


def layer_cache_dtype(name: str, skip_layers: list[str], layer: int) -> str:
    """The main cache dtype of one layer under `--kv-cache-dtype-skip-layers`."""
    return "auto" if str(layer) in skip_layers else name


def main_cache_storage(name: str, activation: torch.dtype) -> torch.dtype:
    """Bytes in which a layer's keys and values are stored; FP8 is allocated as uint8.

    Raises:
        UnsupportedError: a BF16 cache under an FP16 model.
    """
    stored = cache_dtypes.main_cache_dtype(name, activation, setting="kv_cache_dtype")
    return torch.uint8 if stored == torch.float8_e4m3fn else stored


def index_cache_storage(name: str, activation: torch.dtype) -> torch.dtype:
    """Dtype of the compressed keys for vLLM's `indexer_kv_dtype`, "auto" resolved to "bf16"."""
    return cache_dtypes.index_cache_dtype(
        name, activation, setting="indexer_kv_dtype", fp8_name="fp8"
    )


def require_supported(config: Any, quant_config: Any, parallel_config: Any) -> None:
    """Refuses checkpoints and layouts that this layer does not serve.

    Raises:
        UnsupportedError: naming the setting and its value.
    """
    scheme = getattr(quant_config, "kv_cache_scheme", None)
    if scheme is not None:
        raise UnsupportedError(f"kv_cache_scheme: quantised KV checkpoints, got {scheme!r}")
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel_config, name, 1)
        if size > 1:
            raise UnsupportedError(f"{name}: QSA has no context parallelism, got {size}")
    if not getattr(config, "is_causal", True):
        raise UnsupportedError("is_causal: QSA attends causally, got False")
    dual = getattr(config, "dual_chunk_attention_config", None)
    if dual is not None:
        raise UnsupportedError(f"dual_chunk_attention_config: QSA has one rotary, got {dual!r}")


def require_plain_attention(
    alibi_slopes: Any, sliding_window: Any, sinks: Any, logits_soft_cap: Any, attn_type: str
) -> None:
    """Refuses attention variants that QSA does not define."""
    given = {
        "alibi_slopes": alibi_slopes,
        "sliding_window": sliding_window,
        "sinks": sinks,
        "logits_soft_cap": logits_soft_cap or None,
    }
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(f"{name}: QSA has none, got {value!r}")
    if attn_type != "decoder":
        raise UnsupportedError(f"attn_type: expected 'decoder', got {attn_type!r}")


def fuses_index_projection(has_lora: bool, qkv_method: Any, index_method: Any) -> bool:
    """Whether the index projection joins the Q/gate, K, V product.

    LoRA adapters name their target modules, so both must keep their own; and one product has one
    quantisation method.
    """
    return not has_lora and type(qkv_method) is type(index_method)
