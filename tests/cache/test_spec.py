"""CacheSpec and the tensors of QSACache.

Claims: the bytes that a spec states, per page, layer, request and in all, are the bytes that are
allocated; shapes follow the design; a page holds page_size / C compressed keys under the main
cache's page table; sizes and dtypes that cannot work are refused by name.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.cache import CacheSpec, QSACache
from flash_qsa.checks import UnsupportedError
from flash_qsa.config import QSAConfig, RopeConfig
from flash_qsa.ops import store_rows
from flash_qsa.ops.prepare.api import Caches

FP8 = torch.float8_e4m3fn
SMALL = QSAConfig(
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    index_heads=2,
    index_head_dim=8,
    token_budget=16,
    rope=RopeConfig(rotary_dim=4, max_positions=64),
)
SIZES = {"num_layers": 2, "num_pages": 5, "page_size": 16, "num_ring_slots": 3}


@pytest.mark.parity("P35")
@pytest.mark.bug("O-55")
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_qwen_bytes_are_counted_to_the_byte(draft_tokens: int) -> None:
    """12 layers, pages of 64: K and V 64·2·2·256·2 bytes, index 16·128·2, no index values."""
    pages, slots = 3, 2
    cache = QSACache.from_config(
        QSAConfig(),
        num_layers=12,
        num_pages=pages,
        page_size=64,
        num_ring_slots=slots,
        draft_tokens=draft_tokens,
        stores_positions=False,
    )
    spec = cache.spec
    assert spec.ring_capacity == (8 if draft_tokens else 4)
    for layer in range(12):
        assert spec.main_page_bytes(layer) == 64 * 2 * 2 * 256 * 2
    assert spec.compressed_page_bytes == 16 * 128 * 2 == 4096
    assert spec.ring_slot_bytes == spec.ring_capacity * 256
    by_hand = 12 * (pages * (131_072 + 4_096) + slots * spec.ring_capacity * 256)
    assert spec.total_bytes == by_hand == cache.allocated_bytes


@pytest.mark.parity("P06", "P28", "P35")
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("compressed", [torch.bfloat16, FP8, torch.uint8])
@pytest.mark.parametrize("main", [torch.bfloat16, FP8, torch.uint8, (torch.bfloat16, FP8)])
def test_spec_bytes_equal_allocated_bytes(main, compressed, positions: bool) -> None:
    cache = QSACache.from_config(
        SMALL,
        main_dtype=main,
        compressed_dtype=compressed,
        draft_tokens=2,
        stores_positions=positions,
        **SIZES,
    )
    spec = cache.spec
    assert spec.total_bytes == cache.allocated_bytes
    for index, layer in enumerate(cache.layers):
        real = [tensor.untyped_storage().nbytes() for tensor in layer]
        assert sum(real) == spec.layer_bytes(index)
        assert real[0] == spec.num_pages * spec.main_page_bytes(index)
        assert real[1] == spec.num_pages * spec.compressed_page_bytes
        assert real[2] == spec.num_ring_slots * spec.ring_slot_bytes
        assert layer.ring.dtype == torch.bfloat16
    # int64 positions lie on 8-byte borders behind a BF16 key: 3 · 8 bytes more
    assert spec.ring_width * 2 == 8 * 2 + (24 if positions else 0)


def test_request_bytes_are_whole_pages_and_a_ring_slot() -> None:
    spec = CacheSpec.from_config(SMALL, **SIZES)
    one = sum(spec.page_bytes(layer) for layer in range(2))
    for tokens, pages in ((0, 0), (1, 1), (16, 1), (17, 2)):
        assert spec.request_bytes(tokens) == pages * one + 2 * spec.ring_slot_bytes


@pytest.mark.parity("P06")
def test_the_ring_stores_positions_for_mrope_models_only() -> None:
    text = CacheSpec.from_config(SMALL, **SIZES)
    assert not text.stores_positions and text.ring_width == 8
    assert CacheSpec.from_config(QSAConfig(), **SIZES).stores_positions
    assert CacheSpec.from_config(QSAConfig(), **SIZES).ring_width == 128 + 12


@pytest.mark.parity("P07")
@pytest.mark.bug("O-35")
@pytest.mark.parametrize("page_size", [16, 64, 128, 784, 1600, 3200])
def test_a_page_holds_a_quarter_as_many_compressed_keys(page_size: int) -> None:
    """Blocks written through a shuffled page table come back from where a reader looks."""
    sizes = {**SIZES, "page_size": page_size, "num_layers": 1}
    cache = QSACache.from_config(SMALL, dtype=torch.float32, reserve_null=True, **sizes)
    compressed, per_page = cache.layers[0].compressed, page_size // 4
    assert compressed.shape == (5, per_page, 1, 8) and cache.spec.blocks_per_page == per_page
    compressed.fill_(torch.nan)
    cache.allocate("other")
    cache.append({"other": 1})
    cache.allocate("a")
    plan = cache.plan(cache.append({"a": 3 * page_size}))
    table = plan.page_table[0].tolist()
    assert len(set(table)) == 3 and not {0, cache.pages("other")[0]} & set(table)
    closing = plan.compressed_slots >= 0
    assert int(closing.sum()) == 3 * per_page
    keys = torch.arange(3.0 * page_size)[:, None].repeat(1, 8)
    store_rows(compressed, plan.compressed_slots, keys)
    for block in (0, per_page - 1, per_page, 3 * per_page - 1):
        stored = compressed[table[block // per_page], block % per_page, 0]
        assert stored.tolist() == [float(block * 4 + 3)] * 8
    untouched = [page for page in range(5) if page not in table]
    assert compressed[untouched].isnan().all()


@pytest.mark.parity("P07")
@pytest.mark.parametrize("page_size", [1, 2, 6, 63, 785])
def test_page_sizes_that_split_a_group_are_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size: {page_size} tokens are not a multiple"):
        CacheSpec.from_config(SMALL, **{**SIZES, "page_size": page_size})


@pytest.mark.parity("P01", "P05")
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("dtype", torch.float64, "dtype: float64 is not supported; expected bfloat16, float16"),
        ("dtype", FP8, "dtype: float8_e4m3fn"),
        ("main_dtype", torch.float8_e5m2, "main_dtype: float8_e5m2"),
        ("main_dtype", torch.float16, "expected bfloat16, float8_e4m3fn, uint8"),
        ("compressed_dtype", torch.int8, "compressed_dtype: int8"),
    ],
)
def test_other_dtypes_are_refused_by_name(argument: str, value, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        CacheSpec.from_config(SMALL, **SIZES, **{argument: value})


@pytest.mark.parametrize("name", sorted(SIZES))
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CacheSpec.from_config(SMALL, **{**SIZES, name: 0})


def test_a_dtype_for_each_layer_is_required() -> None:
    with pytest.raises(ValueError, match="each of 2 layers, got 1"):
        CacheSpec.from_config(SMALL, main_dtype=[FP8], **SIZES)


def test_a_rank_has_its_own_kv_heads() -> None:
    spec = CacheSpec.from_config(SMALL, num_kv_heads=1, **SIZES)
    assert spec.main_shape == (5, 1, 16, 16) and spec.compressed_shape == (5, 4, 1, 8)


def test_tensors_of_the_caller_are_used_or_refused() -> None:
    spec = CacheSpec.from_config(SMALL, dtype=torch.float32, **SIZES)
    whole = [
        Caches(torch.zeros(5, 16, 2, 16).transpose(1, 2), torch.zeros(5, 4, 1, 8), layer.ring)
        for layer in spec.allocate("cpu")
    ]
    cache = QSACache(spec, layers=whole)
    assert cache.layers[0].main is whole[0].main
    with pytest.raises(ValueError, match="expected 2, got 1"):
        QSACache(spec, layers=whole[:1])
    short = whole[1]._replace(compressed=torch.zeros(5, 3, 1, 8))
    with pytest.raises(ValueError, match=r"layers\[1\].compressed: expected .*5, 4, 1, 8"):
        QSACache(spec, layers=[whole[0], short])
    with pytest.raises(ValueError, match=r"layers\[0\].ring: .*got torch.float16"):
        QSACache(spec, layers=[whole[0]._replace(ring=whole[0].ring.half()), whole[1]])
    strided = torch.zeros(5, 2, 16, 32)[..., ::2]
    with pytest.raises(ValueError, match=r"layers\[0\].main: the last axis must be contiguous"):
        QSACache(spec, layers=[whole[0]._replace(main=strided), whole[1]])


def test_null_page_and_slot_are_never_handed_out() -> None:
    cache = QSACache.from_config(SMALL, reserve_null=True, **SIZES)
    for request in range(2):
        cache.allocate(request)
    cache.append({0: 32, 1: 32})
    assert sorted(cache.pages(0) + cache.pages(1)) == [1, 2, 3, 4]
    assert sorted((cache.ring_slot(0), cache.ring_slot(1))) == [1, 2]
