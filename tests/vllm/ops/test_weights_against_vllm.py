"""The packed projection among vLLM's own classes.

Claims: weights carry the checkpoint's names; on every rank, for both loader generations and named
shards, the packed weight equals vLLM's own packing; rank fields come back even after an error;
LoRA and two quantisation methods keep the index projection apart; ModelOpt's FP4 stays away from
the attention's input projections.
"""

from __future__ import annotations

import pytest
import torch
from harness import (
    PREFIX,
    Quantised,
    StockAttention,
    build,
    checkpoint,
    engine_config,
    load,
    text_config,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from flash_qsa.integrations.vllm.owner import QSAAttention


@pytest.mark.parity("P03", "P04", "P32")
def test_weights_carry_the_checkpoints_names_and_the_joint_product_is_whole():
    config = text_config()
    separate = build(QSAAttention, engine_config(config, lora_config=object()))
    assert not separate.fuse_indexer_projection
    names = {name for name, _ in separate.named_parameters()}
    assert {f"indexer.{n}.weight" for n in ("index_qk_proj", "q_layernorm", "k_layernorm")} <= names
    fused = build(QSAAttention, engine_config(config))
    assert fused.fuse_indexer_projection and not hasattr(fused.indexer, "index_qk_proj")
    assert fused.indexer.q_layernorm.variance_epsilon == config.rms_norm_eps
    weights = checkpoint(config)
    assert {name.split(".")[0] for name in load(fused, weights)} >= {"qkv_proj", "o_proj"}
    load(separate, weights)
    index = weights["indexer.index_qk_proj.weight"]
    assert torch.equal(fused.qkv_proj.weight[-len(index) :], index)
    assert torch.equal(separate.indexer.index_qk_proj.weight, index)


@pytest.mark.parity("P24", "P32")
@pytest.mark.parametrize("version", ["weight_loader", "weight_loader_v2"])
@pytest.mark.parametrize(("count", "heads", "kv_heads"), [(2, 4, 2), (4, 4, 2), (4, 8, 1)])
def test_every_rank_packs_what_vllm_packs(ranks, version, count, heads, kv_heads):
    config = text_config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    weights = checkpoint(config)
    shards = [weights[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")]
    shards.append(weights["indexer.index_qk_proj.weight"])
    for rank in range(count):
        ranks(count, rank)
        packed = []
        for kind in (StockAttention, QSAAttention):
            projection = build(kind, engine_config(config)).qkv_proj
            for number, weight in enumerate(shards):
                getattr(projection, version)(projection.weight, weight, number)
            assert projection.tp_rank == rank
            packed.append(projection.weight.detach().clone())
        assert torch.equal(*packed)
        dim, replicas = 128, max(1, count // kv_heads)
        rows = 2 * heads * dim // count
        assert torch.equal(packed[1][:rows], shards[0][rank * rows : (rank + 1) * rows])
        kv_rows = max(1, kv_heads // count) * dim
        first = rank // replicas * kv_rows
        assert torch.equal(packed[1][rows : rows + kv_rows], shards[1][first : first + kv_rows])


@pytest.mark.parity("P32")
def test_rank_fields_come_back_even_after_an_error(ranks):
    ranks(4, 3)
    projection = build(QSAAttention, engine_config(text_config())).qkv_proj
    projection.weight.tp_rank = 3
    with pytest.raises((IndexError, RuntimeError, AssertionError)):
        projection.weight_loader(projection.weight, torch.zeros(1, 64, dtype=torch.bfloat16), 1)
    assert projection.tp_rank == 3 and projection.weight.tp_rank == 3
    with pytest.raises(ValueError, match="shard"):
        projection.weight_loader(projection.weight, torch.zeros(1, 64), "gate")
    assert projection.tp_rank == 3


@pytest.mark.parity("P24")
@pytest.mark.parametrize(
    ("count", "heads", "kv_heads", "named"),
    [(3, 4, 2, "4.*3"), (2, 6, 3, "3.*2"), (3, 6, 2, "2.*3")],
)
def test_heads_that_do_not_divide_are_refused_with_their_numbers(
    ranks, count, heads, kv_heads, named
):
    ranks(count)
    config = text_config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    with pytest.raises(ValueError, match=named):
        build(QSAAttention, engine_config(config))


@pytest.mark.parity("P27")
def test_modelopt_fp4_leaves_the_attention_projections_alone():
    quant = Quantised("modelopt_fp4")
    layer = build(QSAAttention, engine_config(text_config()), quant_config=quant)
    assert quant.asked == [f"{PREFIX}.o_proj"]
    assert layer.fuse_indexer_projection


@pytest.mark.parity("P32")
def test_projections_of_two_quantisation_methods_stay_apart():
    class Mixed(Quantised):
        def get_quant_method(self, layer, prefix):
            class Other(UnquantizedLinearMethod):
                pass

            return Other() if "index_qk_proj" in prefix else UnquantizedLinearMethod()

    layer = build(QSAAttention, engine_config(text_config()), quant_config=Mixed("fp8"))
    assert not layer.fuse_indexer_projection and hasattr(layer.indexer, "index_qk_proj")
