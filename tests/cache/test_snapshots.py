"""export and restore, snapshot files, page and cell moves.

Claims: a snapshot is all state of a request or is refused; restoring it to other pages, another
slot, another page size or a narrower ring continues bit for bit; whatever else the pool holds is
NaN by then. Moving pages moves keys and compressed keys together and updates every table; moving
cells touches the named cells alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_model import PagedModel

from flash_qsa.cache import (
    CacheExhaustedError,
    QSACache,
    RequestSnapshot,
    move_blocks,
    move_tokens,
    read_pages,
    write_pages,
)
from flash_qsa.ops import select_blocks

FP8 = torch.float8_e4m3fn


def prefilled(length: int, **options) -> PagedModel:
    model = PagedModel(**options)
    model.fill("a", model.draw_tokens(length))
    return model


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().view(torch.uint8) for t in (one, other)]
    return torch.equal(*as_bytes)


@pytest.mark.bug("O-25")
@pytest.mark.parametrize("mrope", [False, True])
def test_a_restored_request_continues_bit_for_bit(mrope: bool) -> None:
    """n = 3001, everything else wiped with NaN; the next 8 rows equal the unsaved run's."""
    options = {"page_size": 64, "num_pages": 130, "draft_tokens": 3, "mrope": mrope}
    model = prefilled(3001, budget=64, num_layers=2, max_positions=4096, **options)
    saved, text = model.cache.export("a"), model.texts["a"]
    assert sorted(saved.tensors) == [
        "layers.0.compressed",
        "layers.0.main",
        "layers.0.ring",
        "layers.1.compressed",
        "layers.1.main",
        "layers.1.ring",
        "positions",
    ]
    assert saved.length == 3001
    assert saved.tensors["positions"].tolist() == list(range(2993, 3001))
    assert saved.tensors["layers.1.compressed"].shape == (750, 8)
    assert saved.tensors["layers.0.main"].shape == (3001, 2, 16)

    next_tokens = [model.draw_tokens(1, 3001 + i) for i in range(8)]
    expected = [model.forward({"a": tokens}, check=False) for tokens in next_tokens]
    model.free("a")
    model.poison()
    model.admit("in the way")
    model.forward({"in the way": model.draw_tokens(70)}, check=False)
    model.restore("b", saved, text)
    for tokens, outputs in zip(next_tokens, expected):
        for restored, original in zip(model.forward({"b": tokens}), outputs):
            assert torch.equal(restored, original)


@pytest.mark.bug("O-25", "O-27")
@pytest.mark.parametrize(
    "lost", ["positions", "layers.0.main", "layers.1.compressed", "layers.0.ring"]
)
def test_a_partial_snapshot_is_refused(lost: str) -> None:
    model = prefilled(21, num_layers=2)
    saved = model.cache.export("a")
    kept = {name: tensor for name, tensor in saved.tensors.items() if name != lost}
    before = model.cache.ledger.pages.num_free, model.cache.ledger.rings.num_free
    with pytest.raises(ValueError, match=rf"partial, \['{lost}'\] are missing"):
        model.cache.restore("b", replace(saved, tensors=kept))
    assert before == (model.cache.ledger.pages.num_free, model.cache.ledger.rings.num_free)
    assert model.cache.requests == ("a",)


@pytest.mark.bug("O-27")
def test_keys_without_index_state_are_refused() -> None:
    model = prefilled(21)
    saved = model.cache.export("a")
    main = {"layers.0.main": saved.tensors["layers.0.main"]}
    with pytest.raises(ValueError, match="without the indexer's state"):
        model.cache.restore("b", replace(saved, tensors=main))


@pytest.mark.bug("O-27")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 22, "raw_from": 18}, r"main should be .*\[22, 2, 16\], is .*\[21, 2, 16\]"),
        ({"raw_from": 22}, "raw_from 22 is outside 0 … 21"),
        ({"raw_from": 21}, "the open group begins at 20, raw keys are held from 21 on"),
        ({"raw_from": 18}, r"should be .* \[3"),
    ],
)
def test_snapshots_that_contradict_themselves_are_refused(change: dict, message: str) -> None:
    model = prefilled(21)
    with pytest.raises(ValueError, match=message):
        model.cache.restore("b", replace(model.cache.export("a"), **change))


def test_ring_rows_of_other_positions_are_refused() -> None:
    model = prefilled(21)
    saved = model.cache.export("a")
    shifted = {**saved.tensors, "positions": saved.tensors["positions"] + 4}
    with pytest.raises(ValueError, match="ring rows of positions 17 … 20 expected"):
        model.cache.restore("b", replace(saved, tensors=shifted))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_layers": 2}, "num_layers is 1, the cache has 2"),
        ({"mrope": False}, "stores_positions is True, the cache has False"),
        ({"dtype": torch.bfloat16}, "dtype is 'torch.float32'"),
        ({"ratio": 2}, "compress_ratio is 4, the cache has 2"),
    ],
)
def test_another_geometry_is_refused(options: dict, field: str) -> None:
    saved = prefilled(9).cache.export("a")
    with pytest.raises(ValueError, match=field):
        PagedModel(**options).cache.restore("a", saved)


def test_restoring_over_a_live_request_or_without_room_is_refused() -> None:
    model = prefilled(21, num_pages=6)
    saved = model.cache.export("a")
    with pytest.raises(ValueError, match="'a' is already in the cache"):
        model.cache.restore("a", saved)
    with pytest.raises(CacheExhaustedError, match="3 pages are needed, 2 of 5 are free"):
        model.cache.restore("b", saved)
    assert model.cache.requests == ("a",) and model.cache.ledger.rings.num_used == 1


@pytest.mark.parametrize("length", [1, 4, 13, 30])
def test_page_size_and_ring_capacity_may_differ(length: int) -> None:
    wide = prefilled(length, draft_tokens=9, page_size=8, num_pages=16)
    saved = wide.cache.export("a")
    narrow = PagedModel(draft_tokens=0, page_size=20, num_pages=4)
    narrow.restore("a", saved, wide.texts["a"])
    narrow.poison()
    narrow.check_state("a")
    assert narrow.cache.raw_from("a") == max(0, length - 4)
    more = wide.draw_tokens(5, length)
    assert torch.equal(narrow.forward({"a": more})[0], wide.forward({"a": more})[0])


@pytest.mark.parametrize("compressed", [torch.bfloat16, FP8, torch.uint8])
@pytest.mark.parametrize("main", [torch.bfloat16, FP8, torch.uint8])
def test_every_storage_dtype_survives_export_forks_and_moves(main, compressed) -> None:
    """Random bytes, NaN codes included: what comes back is what was there."""
    config = PagedModel().config
    sizes = {"num_layers": 1, "num_pages": 8, "page_size": 8, "num_ring_slots": 3}
    cache = QSACache.from_config(config, main_dtype=main, compressed_dtype=compressed, **sizes)
    for tensor in cache.layers[0]:
        tensor.view(torch.uint8).random_(0, 256)
    cache.allocate("a")
    cache.append({"a": 19})
    saved = cache.export("a")
    assert saved.tensors["layers.0.main"].dtype == main
    cache.restore("b", saved)
    cache.move_pages({cache.pages("b")[0]: 7})
    again = cache.export("b", device="cpu")
    for name, tensor in saved.tensors.items():
        assert same_bits(tensor, again.tensors[name]), name
    cache.free("b")
    cache.fork("a", "c")
    cache.append({"c": 1})
    assert cache.pages("c")[2] != cache.pages("a")[2]
    forked = cache.export("c").tensors
    for name in ("layers.0.main", "layers.0.compressed"):
        rows = saved.tensors[name]
        assert same_bits(forked[name][: rows.shape[0]], rows), name


@pytest.mark.bug("O-25")
def test_a_snapshot_file_holds_everything(tmp_path) -> None:
    pytest.importorskip("safetensors")
    model = prefilled(21, num_layers=2)
    saved = model.cache.export("a")
    saved.save(tmp_path / "a.safetensors")
    loaded = RequestSnapshot.load(tmp_path / "a.safetensors")
    assert (loaded.length, loaded.raw_from) == (saved.length, saved.raw_from)
    assert loaded.geometry == saved.geometry and loaded.tensors.keys() == saved.tensors.keys()
    model.restore("b", loaded, model.texts["a"])
    model.check_state("b")


@pytest.mark.parametrize("main", [torch.bfloat16, FP8, torch.uint8])
def test_files_keep_every_storage_dtype(tmp_path, main: torch.dtype) -> None:
    pytest.importorskip("safetensors")
    sizes = {"num_layers": 1, "num_pages": 4, "page_size": 8, "num_ring_slots": 2}
    cache = QSACache.from_config(
        PagedModel().config, main_dtype=main, compressed_dtype=main, **sizes
    )
    for tensor in cache.layers[0]:
        tensor.view(torch.uint8).random_(0, 256)
    cache.allocate("a")
    cache.append({"a": 19})
    cache.export("a").save(tmp_path / "a.safetensors")
    before = cache.export("a").tensors
    cache.free("a")
    for tensor in cache.layers[0]:
        tensor.view(torch.uint8).zero_()
    cache.restore("a", RequestSnapshot.load(tmp_path / "a.safetensors"))
    for name, tensor in cache.export("a").tensors.items():
        assert tensor.dtype == before[name].dtype and same_bits(tensor, before[name]), name


def test_other_files_are_refused(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"x": torch.zeros(1)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(ValueError, match="not a flash-qsa snapshot"):
        RequestSnapshot.load(tmp_path / "x.safetensors")


@pytest.mark.bug("O-26")
def test_pages_that_leave_and_come_back_elsewhere_select_the_same_blocks() -> None:
    """Pages go to the host, are overwritten with other keys and come back to other pages."""
    model = prefilled(61, page_size=16, num_pages=12, num_layers=2)
    index_query = torch.randn(5, 2, 8)
    old = model.cache.pages("a")
    new = [page for page in range(1, 12) if page not in old][:4]
    visible = torch.full((5,), 15, dtype=torch.int32)

    def select(pages, layer: int) -> torch.Tensor:
        table = torch.tensor([list(pages)], dtype=torch.int32)
        keys = model.cache.layers[layer].compressed
        return select_blocks(index_query, keys, table, torch.zeros(5).int(), visible, 4)

    before = [select(old, layer) for layer in range(2)]
    contents = read_pages(model.cache.layers, old, device="cpu")
    for layer in model.cache.layers:
        layer.main[list(old)] = torch.randn(4, 2, 16, 16)
        layer.compressed[list(old)] = torch.randn(4, 4, 1, 8)
    write_pages(model.cache.layers, new, contents)
    for layer in range(2):
        assert torch.equal(select(new, layer), before[layer])
    for layer, main in zip(model.cache.layers, contents.main):
        assert same_bits(layer.main[new], main)


@pytest.mark.bug("O-26")
def test_moved_pages_take_every_holder_along() -> None:
    model = prefilled(29, num_layers=2)
    model.fork("a", "b", 20)
    first, second, third = model.cache.pages("a")[:3]
    model.cache.move_pages({first: second, second: first, third: 30})
    assert model.cache.pages("b") == (second, first, 30)
    assert model.cache.pages("a")[:3] == (second, first, 30)
    model.poison()
    for request in ("a", "b"):
        model.forward({request: model.draw_tokens(6, model.length(request))})
        model.check_state(request)


def test_page_contents_must_fit_the_layers() -> None:
    model = prefilled(9, num_layers=2)
    contents = read_pages(model.cache.layers[:1], [1])
    with pytest.raises(ValueError, match="1 main and 1 compressed layers for 2 layers"):
        write_pages(model.cache.layers, [2], contents)
    for page in (-1, 32):
        with pytest.raises(ValueError, match=f"pages: {page} is outside 0 … 31"):
            read_pages(model.cache.layers, [page])


@pytest.mark.bug("O-34")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_moving_cells_touches_the_named_cells_alone(dtype: torch.dtype) -> None:
    """Pages of 64: tokens 62, 63, 64, 65, 191 go to cells 7, 200, 128, 0, 63; block 16 to 3."""
    main = torch.randn(5, 2, 64, 6).to(dtype)
    before = main.clone()
    source, target = [62, 63, 64, 65, 191], [7, 200, 128, 0, 63]
    move_tokens(main, source, target)
    for cell in range(5 * 64):
        origin = source[target.index(cell)] if cell in target else cell
        assert same_bits(main[cell // 64, :, cell % 64], before[origin // 64, :, origin % 64])

    compressed = torch.randn(5, 16, 1, 6).to(dtype)
    before = compressed.clone()
    move_blocks(compressed, [16], [3])
    assert same_bits(compressed[0, 3], before[1, 0])
    compressed[0, 3] = before[0, 3]
    assert same_bits(compressed, before)


@pytest.mark.bug("O-34")
@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([1], [1, 2], "target: expected 1 cells, got 2"),
        ([1, 2], [3, 3], "a cell appears twice"),
        ([-1], [3], "source: cell -1 is outside 0 … 63"),
        ([1], [64], "target: cell 64 is outside 0 … 63"),
    ],
)
def test_cells_outside_the_cache_are_refused(source, target, message: str) -> None:
    main = torch.zeros(4, 2, 16, 6)
    with pytest.raises(ValueError, match=message):
        move_tokens(main, source, target)
