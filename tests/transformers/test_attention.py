"""The layer's own arithmetic against hand-worked cases and a from-scratch oracle.

Claims:
- Scores are sums of rectified dot products, one selection for all heads (O-10).
- Groups are runs of tokens, never of equal positions; a block's key is rotated at the three-axis
  position of its first token (O-47).
- A group's pooled key is made once, whatever the number of queries.
- With images, logits and generated tokens equal transformers'; the vision tower runs under "qsa".
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flash_qsa.integrations.transformers import attention, pooling
from flash_qsa.integrations.transformers.layout import causal_layout
from flash_qsa.testing.tiny_models import (
    IMAGE_TOKEN,
    VISION_END,
    VISION_START,
    tiny_multimodal_model,
)


@pytest.mark.bug("O-10")
def test_rectified_scores_choose_the_blocks():
    """Dots per head A = (3, -5, 0, 0), B = (1, 1, .5, 0), C = (1, 1, 1, 1): right are A and C."""
    dots = torch.tensor([[3.0, -5, 0, 0], [1, 1, 0.5, 0], [1, 1, 1, 1]])
    heads = torch.eye(4).flatten().expand(1, 6, 16)
    projected = torch.cat((heads, dots.repeat_interleave(2, 0)[None]), -1)
    same = torch.nn.Identity()
    indexer = SimpleNamespace(
        index_qk_proj=same,
        q_layernorm=same,
        k_layernorm=same,
        index_head_dim=4,
        index_n_heads=4,
        block_topk=2,
        layer_idx=0,
    )
    layout = causal_layout(torch.arange(6), batch=1, kv_length=6, ratio=2)
    cos, sin = torch.ones(1, 6, 2), torch.zeros(1, 6, 2)
    chosen = attention._select(indexer, projected, cos, sin, layout, cache=None)
    assert chosen.tolist() == [[-1, -1], [0, -1], [0, -1], [0, 1], [0, 1], [0, 2]]


@pytest.fixture(scope="module")
def multimodal():
    return tiny_multimodal_model(), tiny_multimodal_model(attn_implementation="qsa")


def image_prompt(grid_height, grid_width, before=5, after=10):
    """Text, an image of grid_height x grid_width merged patches, text."""
    image = torch.full((1, grid_height * grid_width), IMAGE_TOKEN)
    ids = torch.cat(
        (
            torch.randint(3, 259, (1, before)),
            torch.tensor([[VISION_START]]),
            image,
            torch.tensor([[VISION_END]]),
            torch.randint(3, 259, (1, after - 1)),
        ),
        dim=1,
    )
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(4 * image.numel(), 48),
        "image_grid_thw": torch.tensor([[1, 2 * grid_height, 2 * grid_width]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }


@pytest.mark.bug("O-47")
def test_image_tokens_are_grouped_by_order(multimodal):
    """6 text tokens, 15 x 20 image tokens at one temporal position, 10 text tokens from 26 on."""
    _, ours = multimodal
    time, height, width = (torch.arange(6).expand(3, 6).clone() for _ in range(3))
    rows, columns = torch.meshgrid(torch.arange(15), torch.arange(20), indexing="ij")
    image = torch.stack((torch.zeros(300), rows.flatten(), columns.flatten())).long() + 6
    text = torch.arange(26, 36).expand(3, -1)
    positions = torch.cat((time, image, text), 1)[:, None]
    indexer = ours.model.language_model.layers[1].self_attn.indexer
    raw = torch.randn(1, 316, 16)
    cos, sin = ours.model.language_model.rotary_emb(raw, positions)
    layout = causal_layout(torch.arange(316), batch=1, kv_length=316, ratio=4)
    with torch.no_grad():
        got = pooling.pool_keys(indexer, raw, cos, sin, layout)
    assert got.shape == (1, 79, 16)
    torch.testing.assert_close(
        got[0].double(), oracle_keys(indexer, raw[0], positions[:, 0]), atol=1e-5, rtol=0
    )


def oracle_keys(indexer, raw, positions):
    """float64 keys [groups, Di] straight from the definition, one group at a time."""
    section, theta, rotary = [3, 3, 2], 10_000.0, 16
    gain = 1 + indexer.k_layernorm.weight.detach().double()
    keys = []
    for start in range(0, raw.shape[0] // 4 * 4, 4):
        key = raw[start : start + 4].double().mean(0)
        key = key * (key.square().mean() + 1e-6).rsqrt() * gain
        turned = key.clone()
        for pair in range(rotary // 2):
            axis = pair % 3 if pair < 3 * section[pair % 3] else 0
            angle = positions[axis, start].double() * theta ** (-2 * pair / rotary)
            low, high = key[pair], key[pair + rotary // 2]
            turned[pair] = low * angle.cos() - high * angle.sin()
            turned[pair + rotary // 2] = high * angle.cos() + low * angle.sin()
        keys.append(turned)
    return torch.stack(keys)


def test_images_equal_transformers(multimodal):
    stock, ours = multimodal
    inputs = image_prompt(5, 7)
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)
    how = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(ours.generate(**inputs, **how), stock.generate(**inputs, **how))


def test_keys_are_pooled_once_per_layer_and_call(ours, prompt, monkeypatch):
    calls = []
    pool = attention.pool_keys
    monkeypatch.setattr(attention, "pool_keys", lambda *a: calls.append(1) or pool(*a))
    with torch.no_grad():
        ours(prompt, use_cache=False)
    assert len(calls) == 2  # two QSA layers
