"""What the integration refuses, and what it stores where.

Claims: every refusal names the setting and the value seen, and is a NotImplementedError where
vLLM's own layer raises one; FP16 is accepted beside BF16; cache dtypes follow the layer.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flash_qsa.integrations.vllm import rules

PARALLEL = SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1)


@pytest.mark.parity("P01")
def test_a_paged_cache_and_a_16_bit_model_are_needed():
    with pytest.raises(ValueError, match="cache_config"):
        rules.require_cache(None)
    rules.require_cache(object())
    for dtype in (torch.bfloat16, torch.float16):
        rules.require_activation_dtype(dtype)
    with pytest.raises(NotImplementedError, match="float32"):
        rules.require_activation_dtype(torch.float32)


@pytest.mark.parity("P23")
@pytest.mark.parametrize("name", ["fp8_e5m2", "float32", "nvfp4", "turboquant"])
def test_other_main_caches_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"kv_cache_dtype.*{name}"):
        rules.require_main_cache_dtype(name)


@pytest.mark.parity("P23")
@pytest.mark.parametrize(
    ("config", "quant", "parallel", "named"),
    [
        ({}, {"kv_cache_scheme": {"num_bits": 8}}, {}, "kv_cache_scheme.*num_bits"),
        ({}, {}, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size.*2"),
        ({}, {}, {"decode_context_parallel_size": 4}, "decode_context_parallel_size.*4"),
        ({"is_causal": False}, {}, {}, "is_causal.*False"),
        ({"dual_chunk_attention_config": {"chunk": 1}}, {}, {}, "dual_chunk.*chunk"),
    ],
)
def test_unserved_layouts_are_refused_by_name(config, quant, parallel, named):
    arguments = (
        SimpleNamespace(**config),
        SimpleNamespace(**quant),
        SimpleNamespace(**{**vars(PARALLEL), **parallel}),
    )
    with pytest.raises(NotImplementedError, match=named):
        rules.require_supported(*arguments)


@pytest.mark.parity("P23")
def test_what_is_served_passes():
    rules.require_supported(SimpleNamespace(), None, PARALLEL)
    config = SimpleNamespace(is_causal=True, dual_chunk_attention_config=None)
    rules.require_supported(config, SimpleNamespace(kv_cache_scheme=None), PARALLEL)


@pytest.mark.parity("P28")
def test_storage_follows_the_layer():
    assert rules.layer_cache_dtype("fp8", ["0", "12"], 12) == "auto"
    assert rules.layer_cache_dtype("fp8", ["0", "12"], 1) == "fp8"
    bf16, fp16 = torch.bfloat16, torch.float16
    assert rules.main_cache_storage("auto", fp16) == fp16
    assert rules.main_cache_storage("bfloat16", bf16) == bf16
    assert rules.main_cache_storage("fp8", fp16) == rules.main_cache_storage("fp8_e4m3", bf16)
    assert rules.main_cache_storage("fp8", fp16) == torch.uint8
    with pytest.raises(NotImplementedError, match="bfloat16.*float16"):
        rules.main_cache_storage("bfloat16", fp16)


@pytest.mark.parity("P05")
def test_index_storage_is_the_models_or_fp8():
    assert rules.index_cache_storage("bf16", torch.bfloat16) == torch.bfloat16
    assert rules.index_cache_storage("bf16", torch.float16) == torch.float16
    assert rules.index_cache_storage("fp8", torch.bfloat16) == torch.float8_e4m3fn
    with pytest.raises(NotImplementedError, match="'bf16' or 'fp8', got 'int8'"):
        rules.index_cache_storage("int8", torch.bfloat16)


@pytest.mark.parity("P43")
@pytest.mark.parametrize(
    "given",
    [
        {"alibi_slopes": [0.5]},
        {"sliding_window": 128},
        {"sinks": torch.zeros(2)},
        {"logits_soft_cap": 30.0},
        {"attn_type": "encoder_only"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_other_attention_is_refused_by_name(given):
    plain = {
        "alibi_slopes": None,
        "sliding_window": None,
        "sinks": None,
        "logits_soft_cap": None,
        "attn_type": "decoder",
    }
    rules.require_plain_attention(**plain)
    with pytest.raises(NotImplementedError, match=next(iter(given))):
        rules.require_plain_attention(**{**plain, **given})


@pytest.mark.parity("P32")
def test_one_product_needs_one_quantisation_method_and_no_adapters():
    class Plain:
        pass

    class FP8:
        pass

    assert rules.fuses_index_projection(False, Plain(), Plain())
    assert rules.fuses_index_projection(False, FP8(), FP8())
    assert not rules.fuses_index_projection(True, Plain(), Plain())
    assert not rules.fuses_index_projection(False, FP8(), Plain())
