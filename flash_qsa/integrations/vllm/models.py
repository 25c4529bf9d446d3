"""vLLM's Qwen4-Exp models with our attention layer; imported where a model is built.

Only the attention layer is ours: the classes are vLLM's own, and the name under which they look
their layer up is set to `build_attention`. One engine's --additional-config may still ask for
vLLM's layer. Imports vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

# The model module comes first: vLLM's attention module imports it in a circle.
import vllm.models.qwen4_exp.nvidia.model as stock
from vllm.models.qwen4_exp.nvidia.mtp import Qwen4ExpMTP
from vllm.platforms import current_platform

from flash_qsa.dispatch import choose
from flash_qsa.integrations.vllm.owner import QSAAttention
from flash_qsa.integrations.vllm.settings import Settings
from flash_qsa.integrations.vllm.warmup import install_warmup

logger = logging.getLogger("vllm.flash_qsa")

Qwen4ExpForCausalLM = stock.Qwen4ExpForCausalLM
Qwen4ExpForConditionalGeneration = stock.Qwen4ExpForConditionalGeneration

StockAttention = stock.Qwen4ExpQSAAttention

_announced: set[str] = set()


def build_attention(*, vllm_config: Any, **arguments: Any) -> Any:
    """The attention layer of a QSA decoder layer: ours, or vLLM's where the options say so."""
    settings = Settings.from_config(vllm_config.additional_config)
    if not settings.enabled:
        _say("flash-qsa is off (additional_config), vLLM's own QSA runs.")
        return StockAttention(vllm_config=vllm_config, **arguments)
    layer = QSAAttention(vllm_config=vllm_config, **arguments)
    chosen = choose(settings.backend, _device())
    _say(
        f"flash-qsa: QSA attention layers replaced ({StockAttention.__name__} by "
        f"{QSAAttention.__module__}.{QSAAttention.__name__}); backend {chosen.backend} "
        f"({chosen.reason}); main cache {layer.kv_cache_dtype}, index cache "
        f"{layer.indexer.index_dtype}, index projection "
        f"{'fused' if layer.fuse_indexer_projection else 'separate'}."
    )
    return layer


def _device() -> Any:
    import torch

    kind = current_platform.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _say(line: str) -> None:
    """Once a process: every layer says the same."""
    if line not in _announced:
        _announced.add(line)
        logger.info(line)


stock.Qwen4ExpQSAAttention = build_attention
install_warmup()

__all__ = [
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "Qwen4ExpMTP",
    "build_attention",
]
