"""The growing cache layer: transformers' dynamic layer without its copies.

Claims:
- Through any series of appends, crops, reorderings, repeats and selections it holds what
  transformers' own layer holds.
- `generate` gets it by itself; keys and values are not moved from one step to the next.
- Compressed keys equal pooling everything again, with left padding, after a beam reordering, after
  a crop, and after a change of padding; a decode step reads no raw key of a finished group (O-53).
- Caches of other kinds, and calls that record gradients, keep transformers' behaviour.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import StaticCache
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer

from flash_qsa.integrations.transformers import cache as cache_module
from flash_qsa.integrations.transformers.cache import GrowingIndexedLayer
from flash_qsa.integrations.transformers.mask import qsa_mask
from flash_qsa.integrations.transformers.pooling import pool_keys
from flash_qsa.testing.tiny_models import tiny_text_config, tiny_text_model

ONE_LAYER = {"full_attention_interval": 1, "num_hidden_layers": 1, "ple_layer_ids": []}


@pytest.fixture(scope="module")
def small():
    return tiny_text_model(attn_implementation="qsa", **ONE_LAYER)


def test_holds_what_transformers_layer_holds(monkeypatch):
    monkeypatch.setattr(cache_module, "_SPARE_TOKENS", 3)  # so that buffers are outgrown
    ours, theirs = GrowingIndexedLayer(), DynamicIndexedLayer()
    generator = torch.Generator().manual_seed(7)
    batch = 2

    def draw(high):
        return int(torch.randint(high, (), generator=generator))

    for step in range(200):
        kind = draw(8) if step else 7
        length = theirs.keys.shape[2] if step else 0
        if kind == 0 and length > 4:
            removed = -1 - draw(3)
            for layer in (ours, theirs):
                layer.crop(removed)
        elif kind == 1:
            rows = torch.randint(batch, (batch,), generator=generator)
            for layer in (ours, theirs):
                layer.reorder_cache(rows)
        elif kind == 2 and batch < 5:
            batch *= 2
            for layer in (ours, theirs):
                layer.batch_repeat_interleave(2)
        elif kind == 3 and batch > 2:
            batch = 2
            for layer in (ours, theirs):
                layer.batch_select_indices(torch.tensor([1, 0]))
        else:
            queries = 1 + draw(5)
            states = torch.randn(batch, 2, queries, 8, generator=generator)
            for layer in (ours, theirs):
                layer.update(states, -states)
                layer.update_indexer(states[:, 0])
        assert ours.get_seq_length() == theirs.get_seq_length()
        for name in ("keys", "values", "indexer_keys"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (step, name)


def cache_argument(model, cache):
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def test_generate_moves_no_keys(small, monkeypatch):
    cache = DynamicCache(config=small.config)
    seen = []
    update = GrowingIndexedLayer.update

    def spy(self, *args, **kwargs):
        result = update(self, *args, **kwargs)
        seen.append([t.data_ptr() for t in (*result, self.indexer_keys)])
        return result

    monkeypatch.setattr(GrowingIndexedLayer, "update", spy)
    ids = torch.randint(3, 259, (1, 30))
    argument = cache_argument(small, cache)
    small.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, **argument)
    assert type(cache.layers[0]) is GrowingIndexedLayer
    assert len(seen) == 6 and all(pointers == seen[0] for pointers in seen)


@pytest.mark.bug("O-53")
def test_a_step_reads_no_finished_group(small):
    ids = torch.randint(3, 259, (2, 43))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    cache, reference = (DynamicCache(config=small.config) for _ in range(2))
    with torch.no_grad():
        for tokens in (40, 41, 42, 43):
            steps = [
                small(
                    ids[:, :40] if tokens == 40 else ids[:, tokens - 1 : tokens],
                    attention_mask=mask[:, :tokens],
                    **cache_argument(small, used),
                ).logits
                for used in (cache, reference)
            ]
            assert torch.equal(*steps)
            # Row 0 has 34 tokens behind its padding, row 1 has 40: groups of four from there.
            cache.layers[0].indexer_keys[0, : 6 + (tokens - 6) // 4 * 4] = float("nan")
            cache.layers[0].indexer_keys[1, : tokens // 4 * 4] = float("nan")


def test_compressed_keys_equal_pooling_again(small, monkeypatch):
    config = tiny_text_config(**ONE_LAYER)
    indexer = small.model.layers[0].self_attn.indexer
    layer = GrowingIndexedLayer()
    starts = torch.tensor([0, 5, 11])
    length = 0
    pooled_at = []
    monkeypatch.setattr(
        "flash_qsa.integrations.transformers.cache.pool_keys",
        lambda *arguments: pooled_at.append(length) or pool_keys(*arguments),
    )

    def check(padding):
        layout = qsa_mask(
            batch_size=3, q_length=1, kv_length=length, q_offset=length - 1, config=config,
            attention_mask=torch.arange(length) >= padding[:, None],
        ).layout  # fmt: skip
        angles = torch.arange(length)[None, :, None] * torch.rand(8).cumsum(0)
        cos, sin = (torch.cat((f(angles), f(angles)), -1).expand(3, -1, -1) for f in TABLES)
        got = layer.compressed_keys(indexer, layer.indexer_keys, cos, sin, layout)
        expected = pool_keys(indexer, layer.indexer_keys, cos, sin, layout)
        for row, visible in enumerate(layout.visible_blocks.tolist()):
            assert torch.equal(got[row, :visible], expected[row, :visible])

    torch.manual_seed(3)
    with torch.no_grad():
        for queries in (13, 1, 1, 1, 1, 6, 1, 300, 1):
            states = torch.randn(3, 2, queries, 4)
            layer.update(states, states)
            layer.update_indexer(torch.randn(3, queries, 16))
            length += queries
            torch.manual_seed(3)  # the same rotation at every step
            check(starts)
        assert pooled_at[:4] == [13, 15, 16, 17]  # at 14 tokens no row has closed a group
        layer.reorder_cache(torch.tensor([2, 0, 0]))
        starts = starts[[2, 0, 0]]
        assert layer.run_starts == (11, 0, 0)
        torch.manual_seed(3)
        check(starts)
        layer.crop(-7)
        length -= 7
        torch.manual_seed(3)
        check(starts)
        torch.manual_seed(3)
        check(torch.tensor([11, 2, 0]))  # the same tokens under another mask


TABLES = (torch.cos, torch.sin)


def test_static_caches_stay_static(small):
    cache = StaticCache(config=small.config, max_cache_len=64)
    kind = type(cache.layers[0])
    with torch.no_grad():
        small(torch.randint(3, 259, (1, 30)), **cache_argument(small, cache))
    assert type(cache.layers[0]) is kind


def test_gradients_flow_through_a_cache(small):
    ids = torch.randint(3, 259, (1, 30))
    weight = small.model.layers[0].self_attn.k_proj.weight
    gradients = []
    for cache in (None, DynamicCache(config=small.config)):
        small.zero_grad()
        kwargs = {"use_cache": False} if cache is None else cache_argument(small, cache)
        small(ids, **kwargs).logits.square().sum().backward()
        gradients.append(weight.grad.clone())
    torch.testing.assert_close(*gradients)
