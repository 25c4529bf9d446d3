"""How transformers finds flash-qsa: an attention name, its mask function, and one class-level hook.

A model whose configuration does not say "qsa" runs exactly the code it ran before.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flash_qsa.integrations.transformers.attention import qsa_attention
from flash_qsa.integrations.transformers.mask import CompactMask, qsa_mask

try:
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextAttention
except ImportError as error:
    raise ImportError(
        "flash_qsa.hf needs transformers 5.16 or later, the first with the Qwen4-Exp models"
    ) from error

NAME = "qsa"
"""The attention implementation's name: `attn_implementation="qsa"`."""

_WAS = "_flash_qsa_previous"
"""Attribute of a patched attention module: (implementation before, accelerate's forward)."""


def register() -> None:
    """Registers "qsa" with transformers; importing `flash_qsa.hf` does it. Harmless to repeat."""
    AttentionInterface.register(NAME, dense_attention_function)
    AttentionMaskInterface.register(NAME, qsa_mask)
    if not hasattr(Qwen4ExpTextAttention.forward, "stock"):
        Qwen4ExpTextAttention.forward = _dispatching(Qwen4ExpTextAttention.forward)


def _dispatching(stock: Any) -> Any:
    @functools.wraps(stock)
    def forward(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs):
        if self.config._attn_implementation != NAME or not isinstance(attention_mask, CompactMask):
            return stock(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        if needs := _needs_weights(self, kwargs):
            _warn_dense(needs)
            dense = attention_mask.to_dense()
            return stock(self, hidden_states, position_embeddings, dense, *args, **kwargs)
        # The cache follows the mask; its name changed from past_key_values to cache in 5.24.
        cache = args[0] if args else kwargs.get("cache", kwargs.get("past_key_values"))
        layout = attention_mask.layout
        return qsa_attention(self, hidden_states, position_embeddings, layout, cache), None

    forward.stock = stock
    return forward


def _needs_weights(module: torch.nn.Module, kwargs: dict[str, Any]) -> str | None:
    """What a call asks for that only attention with explicit weights can give."""
    if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
        return "output_attentions"
    if module.training and module.attention_dropout > 0:
        return f"attention_dropout = {module.attention_dropout} in training"
    return None


@torch.compiler.disable
def _warn_dense(reason: str) -> None:
    warnings.warn(
        f"{reason}: this needs the weights that sparse attention never forms, so transformers' own "
        "dense and much slower QSA runs instead",
        stacklevel=3,
    )


def dense_attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | CompactMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of everything under the name "qsa" that is not a QSA layer on its fast path.

    The vision tower comes here, and QSA layers with a mask of the user's own. It is SDPA, or eager
    attention where weights are asked for.

    Returns:
        [B, Q, H, D], and weights [B, H, Q, L] with output_attentions.
    """
    if isinstance(attention_mask, CompactMask):
        attention_mask = attention_mask.to_dense()
    wanted = kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if wanted and eager is not None:
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            attention_mask = query.new_zeros(()).where(attention_mask, lowest)
        return eager(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _qsa_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, Qwen4ExpTextAttention)]


def patch(model: torch.nn.Module) -> torch.nn.Module:
    """Switches the QSA layers of a loaded model, however wrapped, to flash-qsa.

    For models that `set_attn_implementation` does not reach: inside adapters and other wrappers, or
    with accelerate hooks that were attached before flash_qsa.hf was imported. A vision tower keeps
    its implementation.

    Returns:
        The model, changed in place.

    Raises:
        ValueError: the model has no QSA layer.
    """
    register()
    modules = _qsa_modules(model)
    if not modules:
        raise ValueError(f"model: {type(model).__name__} has no Qwen4-Exp QSA layer")
    before = [module.config._attn_implementation for module in modules]
    for module, implementation in zip(modules, before):
        if _is_enabled(module):
            continue
        hooked = module.__dict__.get("_old_forward")  # what an accelerate hook calls
        module.__dict__[_WAS] = (implementation, hooked)
        if hooked is not None:
            module._old_forward = types.MethodType(type(module).forward, module)
        module.config._attn_implementation = NAME
    return model


def unpatch(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes `patch`; a model that was switched by name goes to transformers' "sdpa"."""
    for module in _qsa_modules(model):
        implementation, hooked = module.__dict__.pop(_WAS, ("sdpa", None))
        if hooked is not None:
            module._old_forward = hooked
        if module.config._attn_implementation == NAME:
            module.config._attn_implementation = (
                "sdpa" if implementation == NAME else implementation
            )
    return model


def is_enabled(model: torch.nn.Module) -> bool:
    """Whether every QSA layer of `model` (and at least one) runs on flash-qsa."""
    modules = _qsa_modules(model)
    return bool(modules) and all(_is_enabled(module) for module in modules)


def _is_enabled(module: torch.nn.Module) -> bool:
    if module.config._attn_implementation != NAME:
        return False
    called = module.__dict__.get("_old_forward", type(module).forward)
    return hasattr(getattr(called, "__func__", called), "stock")
