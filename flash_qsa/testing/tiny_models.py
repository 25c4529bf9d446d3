"""Small Qwen4-Exp models with the whole architecture: random weights, nothing to download.

Gated delta net, QSA, experts with a shared expert, hyper-connections and per-layer embeddings, at
sizes that a laptop runs. The vocabulary is the ByT5 tokenizer's (bytes and a few special tokens),
so `ByT5Tokenizer()` encodes text for these models without any file. transformers is imported when
a function runs.
"""

from __future__ import annotations

from typing import Any

import torch

BYT5_VOCAB = 384
"""256 bytes behind pad 0, end 1 and unknown 2, and the tokenizer's 125 extra ids."""

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 380, 381, 382, 383
"""Ids of the multimodal model's placeholders, the last of the vocabulary."""


def tiny_text_config(**overrides: Any) -> Any:
    """A `Qwen4ExpTextConfig` of four layers, every second one QSA.

    The budget is 16 tokens in blocks of 4, so attention is sparse from the 20th token on.

    Args:
        overrides: fields of the transformers configuration; `full_attention_interval` sets how
            often a QSA layer comes.
    """
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    fields: dict[str, Any] = {
        "vocab_size": BYT5_VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32_768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 101,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "output_gate_type": "silu",
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return Qwen4ExpTextConfig(**{**fields, **overrides})


def tiny_text_model(seed: int = 0, attn_implementation: str = "sdpa", **overrides: Any) -> Any:
    """A `Qwen4ExpForCausalLM` in evaluation mode, the same for the same arguments.

    Args:
        attn_implementation: "sdpa" or "eager" for transformers' own path, "qsa" for ours (after
            `import flash_qsa.hf`).
        overrides: see `tiny_text_config`.
    """
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    config = tiny_text_config(**overrides)
    config._attn_implementation = attn_implementation
    return randomize(Qwen4ExpForCausalLM(config), seed)


def tiny_multimodal_model(
    seed: int = 0, attn_implementation: str = "sdpa", **text_overrides: Any
) -> Any:
    """A `Qwen4ExpForConditionalGeneration`: the tiny text model behind a one-block vision tower.

    An image of grid (t, h, w) patches takes t · h · w rows of `pixel_values` with 3 · 1 · 4 · 4 =
    48 channels and t · h · w / 4 placeholders `IMAGE_TOKEN` in the text.
    """
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForConditionalGeneration

    text = tiny_text_config(**text_overrides)
    config = Qwen4ExpConfig(
        text_config=text.to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "out_hidden_size": text.hidden_size,
            "num_position_embeddings": 64,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    config._attn_implementation = attn_implementation
    return randomize(Qwen4ExpForConditionalGeneration(config), seed)


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> Any:
    """Fills every parameter with noise large enough that no part of the model is a bystander.

    transformers' initial values leave norm gains at one and the lexical convolution at zero, so
    that a missing gain would go unseen. Matrices get a spread of fan_in ** -0.5.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "A_log" in name or "dt_bias" in name:
            continue
        spread = 0.2 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
        noise = torch.randn(parameter.shape, generator=generator) * spread
        gain_of_one = parameter.dim() == 1 and bool((parameter == 1).all())
        parameter.copy_(1 + noise if gain_of_one else noise)
    for name, parameter in model.named_parameters():
        if "A_log" in name:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2 - 1)
    return model.eval()
