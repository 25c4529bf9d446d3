"""Tensor parallelism: the arithmetic of shards, and ranks that add up to the whole layer.

Claims:
* head counts divide, or KV heads repeat evenly, or the error names the numbers;
* Q shards by rank, K and V by rank // replicas, the index is whole; ids are 0 to 3 or names;
* the slices of all ranks tile each projection; a packed projection holds them in order;
* summed over ranks, layers with sharded weights give the unsharded layer's output;
* a packed layer reads and writes the checkpoint's names, and says what is missing.
"""

from __future__ import annotations

import copy

import pytest
import torch
from layer_engine import Engine, small_config

from flash_qsa.config import QSAConfig
from flash_qsa.layers import QSAAttention
from flash_qsa.layers.sharding import (
    SHARD_WEIGHTS,
    SHARDS,
    HeadShare,
    checkpoint_slice,
    output_slice,
    packed_slice,
    shard_id,
    shard_rank,
    shard_sizes,
    shard_state_dict,
    share_heads,
)


@pytest.mark.parity("P24")
@pytest.mark.parametrize(
    "heads, kv_heads, ranks, expected",
    [
        (24, 2, 1, HeadShare(24, 2, 1)),
        (24, 2, 2, HeadShare(12, 1, 1)),
        (24, 2, 4, HeadShare(6, 1, 2)),
        (24, 2, 8, HeadShare(3, 1, 4)),
        (24, 8, 4, HeadShare(6, 2, 1)),
        (6, 1, 3, HeadShare(2, 1, 3)),
    ],
)
def test_shares(heads, kv_heads, ranks, expected) -> None:
    assert share_heads(heads, kv_heads, ranks) == expected


@pytest.mark.parity("P24")
@pytest.mark.parametrize(
    "numbers, message",
    [
        ((24, 2, 16), "num_heads: 24 query heads do not divide by 16 ranks"),
        ((24, 4, 3), "num_kv_heads: 4 KV heads do not divide by 3 ranks"),
        ((24, 4, 6), "num_kv_heads: 4 KV heads cannot be repeated evenly over 6 ranks"),
        ((24, 2, 0), "ranks: expected at least 1, got 0"),
    ],
)
def test_share_errors_name_the_numbers(numbers, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        share_heads(*numbers)


@pytest.mark.parity("P26", "P32")
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_slices(ranks: int) -> None:
    config = QSAConfig()
    share = share_heads(24, 2, ranks)
    sizes = shard_sizes(config, ranks)
    assert sizes == (24 // ranks * 512, share.kv_heads * 256, share.kv_heads * 256, 640)
    for index, name in enumerate(SHARDS):
        assert shard_id(index) == shard_id(name) == index
        assert packed_slice(config, name, ranks) == packed_slice(config, index, ranks)
        covered = [checkpoint_slice(config, name, rank, ranks) for rank in range(ranks)]
        rows = [row for piece in covered for row in range(piece.start, piece.stop)]
        total = shard_sizes(config)[index]
        repeats = {"q": 1, "index": ranks}.get(name, share.kv_replicas)
        assert sorted(rows) == sorted(list(range(total)) * repeats)
    assert [shard_rank("q", r, 4) for r in range(8)] == list(range(8))
    assert [shard_rank("k", r, 4) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [shard_rank(3, r, 4) for r in range(8)] == [0] * 8
    packed = [packed_slice(config, shard, ranks) for shard in SHARDS]
    assert packed[0].start == 0 and packed[-1].stop == sum(sizes)
    assert all(a.stop == b.start for a, b in zip(packed, packed[1:]))
    columns = [output_slice(config, rank, ranks) for rank in range(ranks)]
    assert columns[0].start == 0 and columns[-1].stop == 24 * 256
    assert all(a.stop == b.start for a, b in zip(columns, columns[1:]))


def test_slice_errors() -> None:
    for bad in (4, -1, "gate"):
        with pytest.raises(ValueError, match="^shard: expected 0 to 3 or one of q, k, v, index"):
            shard_id(bad)
    for call in (
        lambda: checkpoint_slice(QSAConfig(), "q", 2, 2),
        lambda: output_slice(QSAConfig(), 2, 2),
        lambda: QSAAttention(small_config(), ranks=2, rank=2),
    ):
        with pytest.raises(ValueError, match="^rank: expected 0 to 1, got 2"):
            call()


def make_layer(config: QSAConfig, **options) -> QSAAttention:
    layer = QSAAttention(config, **options).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer


@pytest.mark.parity("P03", "P24", "P26", "P32")
@pytest.mark.parametrize("ranks, packed", [(2, False), (2, True), (4, True)])
def test_ranks_add_up(ranks: int, packed: bool) -> None:
    config = small_config()
    whole = make_layer(config)
    state = {f"self_attn.{name}": t for name, t in whole.state_dict().items()}
    hidden, plan_rows = torch.randn(50, config.hidden_size), {0: 50}
    positions = torch.arange(50)
    engine = Engine(config)
    expected = whole(hidden, positions, plan=engine.plan(plan_rows), caches=engine.caches)
    total, selections = torch.zeros_like(expected), []
    for rank in range(ranks):
        layer = QSAAttention(
            config,
            ranks=ranks,
            rank=rank,
            pack_projections=packed,
            max_batched_tokens=50,
            reduce=lambda partial: total.add_(partial),
        ).requires_grad_(False)
        local = shard_state_dict(state, config, rank, ranks, prefix="self_attn.")
        layer.load_state_dict({n.removeprefix("self_attn."): t for n, t in local.items()})
        engine = Engine(config, kv_heads=layer.kv_heads)
        layer(hidden, positions, plan=engine.plan(plan_rows), caches=engine.caches)
        selections.append(layer.indexer.selection.clone())
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(selections[0], other) for other in selections[1:])


def test_a_packed_layer_speaks_the_checkpoint() -> None:
    config = small_config()
    plain, packed = make_layer(config), make_layer(config, pack_projections=True)
    assert set(plain.state_dict()) == set(packed.state_dict())
    packed.load_state_dict(plain.state_dict())
    assert all(torch.equal(t, plain.state_dict()[n]) for n, t in packed.state_dict().items())
    inside = torch.nn.ModuleDict({"self_attn": packed})
    copied = copy.deepcopy(inside)
    copied.load_state_dict({f"self_attn.{n}": t + 1 for n, t in plain.state_dict().items()})
    assert torch.equal(copied.state_dict()["self_attn.v_proj.weight"], plain.v_proj.weight + 1)
    assert torch.equal(packed.state_dict()["v_proj.weight"], plain.v_proj.weight)
    x = torch.randn(3, config.hidden_size)
    for mine, theirs in zip(packed.project(x), plain.project(x)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for name in SHARD_WEIGHTS:
        partial = {n: t for n, t in plain.state_dict().items() if n != name}
        with pytest.raises(RuntimeError, match=f"needs all of its four weights.*{name}"):
            packed.load_state_dict(partial)
    wrong = {**plain.state_dict(), "k_proj.weight": torch.zeros(7, config.hidden_size)}
    with pytest.raises(RuntimeError, match="k_proj.weight: expected 32 rows, got 7"):
        packed.load_state_dict(wrong)
