"""QSAIndexer on its own: the index side of a step, as packed token lists.

Claims:
* the packed form is each row's blocks, its open group, -1, and the count last, equal to the
  from-scratch oracle's tokens through chunks and decode, with padded rows ignored;
* it works for any heads, dims, budget and ratio, own projection or projected tensor;
* a dummy step gives empty rows, a reused buffer is left alone while the caches move on;
* buffers of another shape and a missing state are refused.
"""

from __future__ import annotations

import pytest
import torch
from layer_engine import Engine, same_bits, small_config

from flash_qsa.layers import QSAIndexer, QSARotary
from flash_qsa.testing.oracle import Oracle


def make_indexer(config, **options) -> QSAIndexer:
    torch.manual_seed(4)
    indexer = QSAIndexer(config, **options).requires_grad_(False)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return indexer


def oracle_tokens(indexer: QSAIndexer, rope, hidden, at) -> list[list[int]]:
    config = indexer.config
    main = torch.zeros(config.head_dim)
    oracle = Oracle(
        rope,
        indexer.norms(main, main),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.index_heads,
        config.index_head_dim,
        config.compress_ratio,
        config.top_k,
    )
    width = (config.num_heads + config.num_kv_heads) * 2 * config.head_dim
    qkv = torch.zeros(hidden.shape[0], width)
    return oracle.run(qkv, indexer.index_qk_proj(hidden), at.t()).tokens


@pytest.mark.parity("P02", "P03", "P04", "P06", "P08", "P10", "P21")
@pytest.mark.parametrize(
    "sizes",
    [
        {"index_heads": 8},
        {"index_heads": 5, "index_head_dim": 24, "token_budget": 9, "compress_ratio": 3},
        {"index_heads": 6, "token_budget": 6, "compress_ratio": 1},
    ],
)
def test_packed_rows_equal_the_oracle(sizes: dict) -> None:
    config = small_config(**sizes)
    indexer, rope = make_indexer(config), QSARotary(config.rope).table()
    engine = Engine(config, page_size=4 * config.compress_ratio)
    hidden, at = torch.randn(45, config.hidden_size), torch.randint(0, 200, (3, 45))
    got = []
    for count in (17, 5, 1, 1, 21):
        rows = slice(engine.lengths[0], engine.lengths[0] + count)
        plan = engine.plan({0: count}, padding=2)
        junk = torch.full((2, config.hidden_size), float("nan"))
        packed = indexer(
            torch.cat([hidden[rows], junk]),
            torch.cat([at[:, rows], torch.full((3, 2), 10**9)], 1),
            rope=rope,
            compressed=engine.caches.compressed,
            ring=engine.caches.ring,
            plan=plan,
        )
        assert packed.shape == (count + 2, config.packed_width)
        assert (packed[count:, :-1] == -1).all() and (packed[count:, -1] == 0).all()
        got += packed[:count].tolist()
    expected = oracle_tokens(indexer, rope, hidden, at)
    for row, tokens in zip(got, expected):
        assert row[-1] == len(tokens)
        assert row[: row[-1]] == tokens
        assert row[row[-1] : -1] == [-1] * (config.selection_width - row[-1])


def test_projected_tensor_and_own_buffer() -> None:
    config = small_config()
    indexer, rope = make_indexer(config, max_batched_tokens=16), QSARotary(config.rope).table()
    bare = QSAIndexer(config, own_projection=False)
    bare.load_state_dict(
        {n: t for n, t in indexer.state_dict().items() if not n.startswith("index_qk_proj")}
    )
    hidden, results = torch.randn(12, config.hidden_size), []
    for module, given in ((indexer, {}), (bare, {"index_qk": indexer.index_qk_proj(hidden)})):
        engine = Engine(config)
        state = {"compressed": engine.caches.compressed, "ring": engine.caches.ring}
        results.append(
            module(hidden, torch.arange(12), rope=rope, plan=engine.plan({0: 12}), **state, **given)
        )
    assert torch.equal(*results)
    assert indexer.selection[:12, -1].tolist() == [(p + 1) // 4 for p in range(12)]


@pytest.mark.parity("P09")
def test_without_metadata() -> None:
    config = small_config()
    indexer, rope = make_indexer(config), QSARotary(config.rope).table()
    hidden, at = torch.full((3, config.hidden_size), float("nan")), torch.arange(3)
    out = torch.full((3, config.packed_width), 5, dtype=torch.int32)
    assert indexer(hidden, at, rope=rope, out=out, reuse=True) is out and (out == 5).all()
    for rows in (indexer(hidden, at, rope=rope, out=out), indexer(hidden, at, rope=rope)):
        assert (rows[:, :-1] == -1).all() and (rows[:, -1] == 0).all()
    assert (out[:, -1] == 0).all()


@pytest.mark.parity("P17", "P18", "P37")
def test_reuse_and_refusals() -> None:
    config = small_config()
    indexer, rope = make_indexer(config), QSARotary(config.rope).table()
    engine = Engine(config)
    plan, at, hidden = engine.plan({0: 9}), torch.arange(9), torch.randn(9, config.hidden_size)
    state = {"compressed": engine.caches.compressed, "ring": engine.caches.ring}
    out = torch.full((9, config.packed_width), 5, dtype=torch.int32)
    before = engine.snapshot()
    assert indexer(hidden, at, rope=rope, plan=plan, out=out, reuse=True, **state) is out
    assert (out == 5).all()
    assert not same_bits(before.compressed, engine.caches.compressed)
    assert not same_bits(before.ring, engine.caches.ring)
    with pytest.raises(RuntimeError, match="^out: reuse needs the buffer"):
        indexer(hidden, at, rope=rope, plan=plan, reuse=True, **state)
    with pytest.raises(RuntimeError, match="^compressed, ring: .* not bound"):
        indexer(hidden, at, rope=rope, plan=plan)
    for bad in (out[:8], out[:, :-1], out.long()):
        with pytest.raises(ValueError, match="^out: expected int32"):
            indexer(hidden, at, rope=rope, plan=plan, out=bad, **state)
    with pytest.raises(RuntimeError, match="^selection: the layer has no buffer"):
        indexer.compact(torch.tensor([0]))
