"""The oracle that other tests trust.

Claims: with transformers' weights it is transformers' own layer; hand-worked scores, selections
and open groups come out as written; norms and rotations of every kind equal the ops' in float64;
within the budget it is plain causal attention; a later token never changes an earlier row; with
`round_to` every result is representable in that dtype.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_qsa.config import RopeConfig
from flash_qsa.ops.norm import rms_norm
from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.testing.oracle import Oracle

ROPES = {
    "default": RopeConfig(rotary_dim=6, max_positions=64),
    "interleaved": RopeConfig(rotary_dim=6, max_positions=64, mrope_section=(1, 1, 1)),
    "uneven": RopeConfig(rotary_dim=8, max_positions=64, mrope_section=(2, 1, 1)),
    "runs": RopeConfig(
        rotary_dim=8, max_positions=64, mrope_section=(1, 2, 1), mrope_interleaved=False
    ),
    "pairs": RopeConfig(rotary_dim=6, max_positions=64, neox_style=False),
    "yarn": RopeConfig(
        rotary_dim=8, max_positions=64, rope_type="yarn", factor=4.0, original_max_positions=16
    ),
}


def make_oracle(rope: RopeConfig = ROPES["interleaved"], **changes) -> Oracle:
    weights = [torch.randn(8) * 0.2 for _ in range(4)]
    table = RopeTable.from_config(rope, torch.float32)
    return replace(Oracle(table, Norms(*weights, 1e-6), 4, 2, 8, 2, 8, ratio=4, top_k=2), **changes)


def make_inputs(count: int, axes: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    at = torch.randint(0, 64, (count, axes)) if axes == 3 else torch.arange(count)
    return torch.randn(count, 4 * 16 + 2 * 2 * 8), torch.randn(count, 24), at


def test_scores_are_relu_sums_over_heads() -> None:
    """Dots A = (3, -5, 0, 0), B = (1, 1, ½, 0), C = (1, 1, 1, 1): A = 3, B = 2½, C = 4."""
    oracle = make_oracle(index_heads=4)
    keys = torch.tensor([[3.0, -5, 0, 0], [1, 1, 0.5, 0], [1, 1, 1, 1]], dtype=torch.float64)
    scores = oracle.scores(torch.eye(4, dtype=torch.float64), keys)
    assert scores.tolist() == [3.0, 2.5, 4.0]
    assert oracle.select(scores) == [0, 2]


@pytest.mark.parametrize(
    ("scores", "top_k", "chosen"),
    [
        ([], 2, []),
        ([5.0], 2, [0]),
        ([1.0, 1.0, 1.0], 2, [0, 1]),
        ([0.0, 2.0, 0.0, 2.0, 2.0], 3, [1, 3, 4]),
        ([0.0, 2.0, 0.0, 3.0], 3, [0, 1, 3]),
    ],
)
def test_ties_go_to_the_lower_block(scores: list[float], top_k: int, chosen: list[int]) -> None:
    oracle = make_oracle(top_k=top_k)
    assert oracle.select(torch.tensor(scores, dtype=torch.float64)) == chosen


def test_open_groups_follow_the_position() -> None:
    oracle = make_oracle()
    tails = [oracle.attended([], token) for token in range(9)]
    assert tails == [[0], [0, 1], [0, 1, 2], [], [4], [4, 5], [4, 5, 6], [], [8]]
    assert oracle.attended([0, 2], 13) == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("kind", ROPES)
def test_norm_and_rotation_equal_the_ops(kind: str) -> None:
    oracle = make_oracle(ROPES[kind])
    qkv, index_qk, positions = make_inputs(7, 3 if oracle.rope.mrope_section else 1)
    rows = oracle.rows(qkv, index_qk, positions)
    at = positions.t() if positions.dim() == 2 else positions
    query = qkv[:, :64].double().view(7, 4, 16)[..., :8]
    expected = oracle.rope.apply(rms_norm(query, oracle.norms.query, 1e-6), at)
    torch.testing.assert_close(rows.query, expected, rtol=1e-12, atol=1e-12)
    raw = index_qk.double()[:, 16:]
    pooled = raw[:4].mean(0, keepdim=True)[None]
    first = at[..., :1]
    expected = oracle.rope.apply(rms_norm(pooled, oracle.norms.index_key, 1e-6), first)[0]
    torch.testing.assert_close(
        oracle.block_keys(rows.raw_key, positions), expected, rtol=1e-12, atol=1e-12
    )


def test_within_the_budget_it_is_causal_attention() -> None:
    oracle = make_oracle(top_k=8)
    result = oracle.run(*make_inputs(35))
    rows = result.rows
    assert result.tokens == [list(range(token + 1)) for token in range(35)]
    q, k, v = (x.transpose(0, 1) for x in (rows.query, rows.key, rows.value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
    )
    expected = expected.transpose(0, 1) * torch.sigmoid(rows.gate)
    torch.testing.assert_close(result.out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changed", [9, 12, 15])
def test_a_later_token_changes_no_earlier_row(changed: int) -> None:
    oracle = make_oracle()
    qkv, index_qk, positions = make_inputs(20)
    before = oracle.run(qkv, index_qk, positions)
    qkv[changed:], index_qk[changed:], positions[changed:] = 3.0, -2.0, 1
    after = oracle.run(qkv, index_qk, positions)
    assert torch.equal(after.out[:changed], before.out[:changed])
    assert after.selected[:changed] == before.selected[:changed]
    assert not torch.equal(after.out[changed], before.out[changed])


def test_rounding_follows_the_dtype() -> None:
    oracle = make_oracle(round_to=torch.bfloat16)
    rows = oracle.run(*make_inputs(9)).rows
    for rounded in (rows.query, rows.key, rows.index_query):
        assert torch.equal(rounded, rounded.bfloat16().double())


def test_an_empty_request_has_no_rows() -> None:
    result = make_oracle().run(*make_inputs(0))
    assert result.out.shape == (0, 4, 8) and result.block_keys.shape == (0, 8)


@pytest.mark.hf
@pytest.mark.parametrize("image", [False, True])
def test_with_transformers_weights_it_is_the_stock_layer(image: bool) -> None:
    stock = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    from flash_qsa.config import QSAConfig
    from flash_qsa.testing.tiny_models import tiny_text_config

    config = tiny_text_config(indexer_n_heads=8)
    config._attn_implementation = "sdpa"
    layer = stock.Qwen4ExpTextAttention(config, 1).float().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    count, geometry = 53, QSAConfig.from_hf(config)
    hidden = torch.randn(count, config.hidden_size)
    at = torch.arange(count).expand(3, -1).clone()
    if image:
        patch = torch.arange(20)
        at[:, 16:36] = 16 + torch.stack([torch.zeros_like(patch), patch // 5, patch % 5])
    with torch.no_grad():
        rotary = stock.Qwen4ExpTextRotaryEmbedding(config)(hidden[None], at[:, None])
        causal = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        expected = layer(hidden[None], rotary, causal, None)[0][0]
        indexer = layer.indexer
        norms = Norms(
            indexer.q_layernorm.weight,
            indexer.k_layernorm.weight,
            layer.q_norm.weight,
            layer.k_norm.weight,
            geometry.rms_norm_eps,
        )
        oracle = Oracle(
            RopeTable.from_config(geometry.rope, torch.float32, max_positions=64),
            norms,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.index_heads,
            geometry.index_head_dim,
            geometry.compress_ratio,
            geometry.top_k,
        )
        projections = (layer.q_proj, layer.k_proj, layer.v_proj)
        qkv = torch.cat([projection(hidden) for projection in projections], -1)
        result = oracle.run(qkv, indexer.index_qk_proj(hidden), at.t())
        assert any(len(blocks) == oracle.top_k for blocks in result.selected)
        assert len(result.scores[-1]) > oracle.top_k
        mine = layer.o_proj(result.out.flatten(1).float())
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
