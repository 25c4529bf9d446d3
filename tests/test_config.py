"""QSAConfig and RopeConfig.

Claims: a transformers config, text or multimodal, object or dict, under either spelling of the
layer, gives the same geometry; fields that are missing or impossible are refused with their name
and value; nothing is wired to 4 heads, 2,048 tokens or ratio 4; reading a config needs no torch.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest

from flash_qsa.config import QSA_LAYER_TYPES, QSAConfig, RopeConfig

QWEN = {
    "model_type": "qwen4_exp_text",
    "hidden_size": 2560,
    "num_hidden_layers": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
INDEX_FIELDS = [name for name in QWEN if name.startswith("indexer_")]


def changed(**changes) -> dict:
    return {**copy.deepcopy(QWEN), **changes}


def without(*names: str) -> dict:
    return {name: value for name, value in QWEN.items() if name not in names}


def rope(**changes) -> dict:
    return changed(rope_parameters={**QWEN["rope_parameters"], **changes})


def as_object(config: dict) -> SimpleNamespace:
    return SimpleNamespace(**config)


@pytest.mark.parity("P02", "P25")
def test_the_defaults_are_qwen() -> None:
    config = QSAConfig()
    assert config == QSAConfig.from_hf(QWEN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (24, 2, 256)
    assert (config.index_heads, config.index_kv_heads, config.index_head_dim) == (4, 1, 128)
    assert (config.top_k, config.selection_width, config.packed_width) == (512, 2051, 2052)
    assert config.scale == 256**-0.5 and config.group_size == 12
    assert config.rope.rotary_dim == 64 and config.rope.mrope_section == (11, 11, 10)


@pytest.mark.parametrize("convert", [dict, as_object], ids=["dict", "object"])
def test_text_and_multimodal_configs_read_alike(convert) -> None:
    text = convert(QWEN)
    whole = convert({"model_type": "qwen4_exp", "hidden_size": 7, "text_config": text})
    assert QSAConfig.from_hf(text) == QSAConfig.from_hf(whole) == QSAConfig()
    assert QSAConfig.is_qsa_layer(whole, 3) and not QSAConfig.is_qsa_layer(whole, 2)


@pytest.mark.bug("O-50")
@pytest.mark.parametrize("spelling", [*QSA_LAYER_TYPES])
@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "qwen3_8_next", "an_older_name"])
def test_every_spelling_names_the_same_layer(spelling: str, model_type: str) -> None:
    config = changed(
        layer_types=["linear_attention", spelling], model_type=model_type, num_hidden_layers=2
    )
    assert "full_attention" in QSA_LAYER_TYPES and "qwen_sparse_attention" in QSA_LAYER_TYPES
    assert [QSAConfig.is_qsa_layer(config, layer) for layer in range(2)] == [False, True]
    assert QSAConfig.from_hf(config) == QSAConfig()


@pytest.mark.bug("O-50")
@pytest.mark.parametrize("spelling", [*QSA_LAYER_TYPES])
def test_without_index_fields_a_layer_is_ordinary_attention(spelling: str) -> None:
    config = {**without(*INDEX_FIELDS), "layer_types": [spelling]}
    assert not QSAConfig.is_qsa_layer(config, 0)
    with pytest.raises(ValueError, match="has no QSA layer: .*indexer_n_heads.*ordinary attention"):
        QSAConfig.from_hf(config)


@pytest.mark.bug("O-50")
def test_without_layer_types_every_fourth_layer_is_full_attention() -> None:
    config = without("layer_types")
    assert [QSAConfig.is_qsa_layer(config, i) for i in range(8)] == [False, False, False, True] * 2
    config["full_attention_interval"] = 2
    assert [QSAConfig.is_qsa_layer(config, i) for i in range(4)] == [False, True] * 2


@pytest.mark.parametrize("layer", [-1, 4])
def test_layers_outside_the_list_are_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layer_idx {layer} is outside layer_types, which has 4"):
        QSAConfig.is_qsa_layer(QWEN, layer)


@pytest.mark.parity("P02")
@pytest.mark.bug("O-51")
@pytest.mark.parametrize(
    ("budget", "ratio", "blocks", "width"),
    [
        (2048, 4, 512, 2051),
        (8192, 4, 2048, 8195),
        (4096, 2, 2048, 4097),
        (1000, 4, 250, 1003),
        (16, 4, 4, 19),
        (2050, 4, 512, 2053),
        (7, 1, 7, 7),
        (100, 3, 33, 102),
    ],
)
def test_any_budget_and_ratio(budget: int, ratio: int, blocks: int, width: int) -> None:
    config = QSAConfig.from_hf(changed(indexer_budget=budget, indexer_compress_ratio=ratio))
    assert (config.token_budget, config.compress_ratio) == (budget, ratio)
    assert (config.top_k, config.selection_width) == (blocks, width)
    assert config.packed_width == width + 1


@pytest.mark.parity("P02")
@pytest.mark.parametrize("name", INDEX_FIELDS)
def test_a_missing_index_field_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"fields \['{name}'\] are missing or None"):
        QSAConfig.from_hf(without(name))
    with pytest.raises(ValueError, match=name):
        QSAConfig.from_hf(changed(**{name: None}))


@pytest.mark.bug("O-51")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_compress_ratio": 0}, "compress_ratio must be a positive integer, got 0"),
        ({"indexer_budget": -4}, "token_budget must be a positive integer, got -4"),
        ({"indexer_budget": 3}, r"token_budget \(3\) must hold at least one block"),
        ({"indexer_n_heads": 2.0}, "index_heads must be a positive integer, got 2.0"),
        ({"indexer_n_heads": True}, "index_heads must be a positive integer, got True"),
        ({"indexer_kv_heads": 2}, "index_kv_heads must be 1, got 2"),
        ({"num_key_value_heads": 5}, r"num_heads \(24\) must be a multiple of num_kv_heads \(5\)"),
        ({"rms_norm_eps": 0.0}, None),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be positive, got -1e-06"),
        ({"indexer_head_dim": 32}, r"rotary_dim \(64\) must fit .*index_head_dim \(32\)"),
        ({"max_position_embeddings": 0}, "max_positions must be a positive integer, got 0"),
        ({"hidden_size": None}, "no field 'hidden_size'"),
        ({"num_attention_heads": None}, "no field 'num_attention_heads'"),
    ],
)
def test_impossible_values_are_refused_by_name(changes: dict, message: str | None) -> None:
    with pytest.raises(ValueError, match=message or "rms_norm_eps must be positive, got 0.0"):
        QSAConfig.from_hf(changed(**changes))


@pytest.mark.parity("P25")
@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_head_dim_defaults_to_hidden_over_heads(absent: dict) -> None:
    config = {**without("head_dim"), "hidden_size": 1920, "num_attention_heads": 24, **absent}
    config["rope_parameters"] = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    read = QSAConfig.from_hf(config)
    assert read.head_dim == 80 and read.scale == 80**-0.5 and read.rope.rotary_dim == 40


def test_missing_kv_heads_mean_one_for_each_query_head() -> None:
    assert QSAConfig.from_hf(without("num_key_value_heads")).num_kv_heads == 24


@pytest.mark.parity("P04")
def test_epsilon_defaults_to_a_millionth() -> None:
    assert QSAConfig.from_hf(without("rms_norm_eps")).rms_norm_eps == 1e-6
    assert QSAConfig.from_hf(changed(rms_norm_eps=1e-5)).rms_norm_eps == 1e-5


@pytest.mark.parity("P28")
@pytest.mark.bug("O-48")
def test_yarn_parameters_are_read() -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 262_144,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
        "mscale": 0.5,
        "mscale_all_dim": 0.25,
        "truncate": False,
    }
    read = QSAConfig.from_hf({**rope(**yarn), "max_position_embeddings": 1_048_576}).rope
    assert (read.rope_type, read.factor, read.attention_factor) == ("yarn", 4.0, 1.25)
    assert (read.beta_fast, read.beta_slow, read.truncate) == (16.0, 2.0, False)
    assert (read.mscale, read.mscale_all_dim) == (0.5, 0.25)
    assert (read.original_max_positions, read.max_positions) == (262_144, 1_048_576)


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_older_names_of_the_rope_fields_are_read(where: str, key: str) -> None:
    config = without("rope_parameters")
    config[where] = {key: "mrope", "mrope_section": [11, 11, 10]}
    config |= {"rope_theta": 5e5, "partial_rotary_factor": 0.25}
    read = QSAConfig.from_hf(config).rope
    assert (read.theta, read.rotary_dim, read.rope_type) == (5e5, 64, "default")
    assert read.mrope_section == (11, 11, 10)


def test_a_config_without_rope_fields_rotates_whole_heads() -> None:
    config = {**without("rope_parameters"), "head_dim": 64}
    read = QSAConfig.from_hf(config).rope
    assert (read.rotary_dim, read.theta, read.mrope_section) == (64, 10_000.0, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "longrope"}, "rope_type must be 'default' or 'yarn', got 'longrope'"),
        ({"dual_chunk_attention_config": {}}, "dual_chunk_attention_config is not supported"),
        ({"mrope_section": [11, 11, 11]}, r"sum to rotary_dim / 2 = 32, got \(11, 11, 11\)"),
        ({"mrope_section": [16, 16]}, r"three sizes .* got \(16, 16\)"),
        ({"rope_theta": 0}, "theta must be positive, got 0.0"),
        ({"partial_rotary_factor": 0.254}, "rotary_dim must be even, got 65"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor must be at least 1 for YaRN, got 0.5"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor must be at least 1 .* got nan"),
    ],
)
def test_impossible_rope_values_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QSAConfig.from_hf(rope(**changes))


def test_configs_are_frozen_and_hashable() -> None:
    config = QSAConfig(rope=RopeConfig(mrope_section=[16, 8, 8]))
    assert config.rope.mrope_section == (16, 8, 8) and hash(config) == hash(copy.copy(config))
    with pytest.raises(FrozenInstanceError):
        config.token_budget = 1
    with pytest.raises(FrozenInstanceError):
        config.rope.theta = 1.0


def test_reading_a_config_needs_no_torch() -> None:
    script = (
        "import sys, json; sys.modules['torch'] = None\n"
        "from flash_qsa.config import QSAConfig\n"
        "print(QSAConfig.from_hf(json.loads(sys.argv[1])).top_k)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(QWEN)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "512"


def test_transformers_own_config_reads_alike() -> None:
    module = pytest.importorskip("transformers.models.qwen4_exp")
    fields = {name: value for name, value in QWEN.items() if name != "model_type"}
    config = module.Qwen4ExpTextConfig(**copy.deepcopy(fields))
    assert QSAConfig.from_hf(config) == QSAConfig()
    assert [QSAConfig.is_qsa_layer(config, i) for i in range(4)] == [False, False, False, True]
