"""vLLM's Qwen4-Exp models with our attention layer; imported where a model is built.

Only the attention layer is ours: the classes are vLLM's own, and the name under which they look
their layer up is set to `build_attention`. One engine's --additional-config may still ask for
vLLM's layer. Imports vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.models.qwen4_exp import (
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpMTP,
)
from vllm.platforms import current_platform

from flash_qsa.dispatch import choose
from flash_qsa.integrations.vllm.owner import QSAAttention
from flash_qsa.integrations.vllm.settings import Settings
from flash_qsa.integrations.vllm.warmup import install_warmup

logger = logging.getLogger("vllm.flash_qsa")

_announced: set[str] = set()


def build_attention(*, vllm_config: Any, **arguments: Any) -> Any:
    """The attention layer of a QSA decoder layer: ours, or vLLM's where the options say so."""
    settings = Settings.from_config(vllm_config.additional_config)
    if not settings.enabled:
        _say("flash-qsa is off (additional_config), vLLM's own QSA runs.")
        return stock_attention()(vllm_config=vllm_config, **arguments)
    layer = QSAAttention(vllm_config=vllm_config, **arguments)
    chosen = choose(settings.backend, _device())
    _say(
        f"flash-qsa: QSA attention layers replaced ({stock_attention().__name__} by "
        f"{QSAAttention.__module__}.{QSAAttention.__name__}); backend {chosen.backend} "
        f"({chosen.reason}); main cache {layer.kv_cache_dtype}, index cache "
        f"{layer.indexer.index_dtype}, index projection "
        f"{'fused' if layer.fuse_indexer_projection else 'separate'}."
    )
    return layer


def stock_attention() -> type:
    """vLLM's own layer."""
    from vllm.models.qwen4_exp.nvidia.qsa import Qwen4ExpQSAAttention

    return Qwen4ExpQSAAttention


def _device() -> Any:
    import torch

    kind = current_platform.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _say(line: str) -> None:
    """Once a process: every layer says the same."""
    if line not in _announced:
        _announced.add(line)
        logger.info(line)


def install() -> None:
    """Puts `build_attention` where vLLM's decoder layers look their attention up; safe to repeat.

    The three classes import vLLM's CUDA model files, which a CPU uses too. Elsewhere they are
    another platform's, with an attention layer of their own, and stay as they are.
    """
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        _say(f"flash-qsa is inactive on {current_platform.device_name}, vLLM's own QSA runs.")
        return
    import vllm.models.qwen4_exp.nvidia.model as model

    model.Qwen4ExpQSAAttention = build_attention
    install_warmup()


install()

__all__ = [
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "Qwen4ExpMTP",
    "build_attention",
    "install",
]
