"""store_rows, compress_keys, expand_blocks and plan_rows in the interpreter.

Claims:
* each kernel gives the bits of its reference on hostile inputs: views with odd strides, NaN in
  unused cells, permuted pages, padding, holes, sizes that are no power of two;
* what the reference leaves untouched, the kernel leaves untouched;
* page offsets are 64-bit: a cache whose pages lie more than 2^31 elements apart is addressed
  rightly.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa import dispatch
from flash_qsa.ops import compress_keys, expand_blocks, plan_rows, store_rows
from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.ops.expand_blocks.tiles import choose_tiles as expand_tiles
from flash_qsa.ops.fp8 import to_storage
from flash_qsa.ops.store_rows.tiles import choose_tiles as store_tiles
from flash_qsa.testing.inputs import Shape, scattered_view
from flash_qsa.testing.prepared import between, bits
from flash_qsa.testing.steps import clone_view, make_step

FLOATS = (torch.float32, torch.float16)
FP8 = (torch.uint8, torch.float8_e4m3fn)


@pytest.mark.parity("P47")
@pytest.mark.bug("O-36", "O-40", "O-42", "O-43")
@pytest.mark.parametrize(
    ("cache_dtype", "row_dtype"),
    [(c, r) for c in (*FLOATS, *FP8) for r in (*FLOATS, *FP8)] + [(torch.bfloat16,) * 2],
    ids=lambda dtype: str(dtype)[6:],
)
def test_store_rows(cache_dtype: torch.dtype, row_dtype: torch.dtype) -> None:
    width = 20
    cache = scattered_view(to_storage(torch.full((5, 3, 1, width), torch.nan), cache_dtype))
    values = torch.randn(17, width) * 300
    values[0, 0], values[1, 1] = torch.nan, 1e9 if row_dtype == torch.float32 else 6e4
    rows = scattered_view(to_storage(values, row_dtype))
    slots = torch.randperm(15)
    slots = torch.cat((slots, torch.tensor([-1, 15])))
    slots[3] = 1 << 40
    ours, theirs = clone_view(cache), clone_view(cache)
    store_rows(ours, slots, rows, backend="triton")
    store_rows(theirs, slots, rows, backend="reference")
    assert torch.equal(canonical(ours), canonical(theirs))
    if cache_dtype == row_dtype:
        assert torch.equal(bits(ours), bits(theirs))  # moved, NaN payloads included
    assert torch.equal(between(ours), between(cache))
    three = clone_view(cache)
    store_rows(three, slots, rows[:, None], backend="triton")
    assert torch.equal(bits(three), bits(ours))


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """Bits, with one pattern for every NaN of a float: a conversion may choose."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return bits(tensor)


@pytest.mark.bug("O-33")
def test_store_rows_past_two_to_the_thirty_first() -> None:
    # bytes, so that 2^31 elements are 2 GiB; memory that is never touched costs nothing
    pages, stride = 70_001, 64 * 2 * 256
    whole = torch.empty(pages * stride, dtype=torch.uint8)
    cache = whole.as_strided((pages, 64, 1, 16), (stride, 512, 512, 1))
    slots = torch.tensor([65_535 * 64 + 3, 65_536 * 64, 70_000 * 64 + 63])
    rows = torch.randint(0, 256, (3, 16), dtype=torch.uint8)
    store_rows(cache, slots, rows, backend="triton")
    for slot, row in zip(slots.tolist(), rows):
        assert torch.equal(cache[slot // 64, slot % 64, 0], row)


@pytest.mark.parity("P16", "P45")
@pytest.mark.bug("O-16", "O-17", "O-47")
@pytest.mark.parametrize(
    "options",
    [
        {"padding": 2},
        {"position_form": "3d", "ring_positions": True, "dtype": torch.float16},
        {"shape": Shape(ratio=3, page_size=12, ring_capacity=6, index_dim=24)},
        {"shape": Shape(ratio=12, page_size=24, ring_capacity=24), "ring_positions": True},
    ],
    ids=["text", "mrope-fp16", "ratio-3", "ratio-12"],
)
def test_compress_keys(options: dict) -> None:
    problem = make_step([9, 7, 25, 4, 12], [1, 2, 14, 4, 5], **options)
    keys = problem.index_qk[:, -problem.shape.index_dim :]
    table = problem.plan.ring_table.clone()
    table[1] = -1  # a request without a ring: its straddling group is nowhere
    results = []
    for backend in ("triton", "reference"):
        out = torch.full((problem.plan.num_rows, problem.shape.index_dim), 7.0).to(keys.dtype)
        first = torch.full((problem.plan.num_rows, 1, 3), 9)
        with dispatch.trace() as ran:
            compress_keys(
                keys,
                problem.positions,
                problem.caches.ring,
                table,
                problem.plan,
                out=out,
                first_positions_out=first,
                backend=backend,
            )
        assert ran == [("compress_keys", backend)]
        results.append((out, first))
    (out, first), (want, want_first) = results
    assert torch.equal(bits(out), bits(want)) and torch.equal(first, want_first)
    assert (first[:, 0, 0] != 9).any() and (first[:, 0, 0] == 9).any()


@pytest.mark.parity("P21")
@pytest.mark.bug("O-09")
@pytest.mark.parametrize(("top_k", "ratio"), [(4, 4), (5, 3), (1, 1), (37, 4), (9, 8)])
def test_expand_blocks(top_k: int, ratio: int) -> None:
    rows = 6
    generator = torch.Generator().manual_seed(top_k)
    positions = torch.randint(-2, ratio * 40, (rows,), generator=generator)
    positions[0], positions[1] = -1, 0
    visible = torch.div(positions + 1, ratio, rounding_mode="floor").int()
    wide = torch.randint(-3, 44, (rows, 2 * top_k), generator=generator).int()
    ids = wide[:, ::2]  # not contiguous along blocks
    ids[2] = torch.arange(top_k).int()
    outs = []
    for backend in ("triton", "reference"):
        buffer = torch.full((rows, top_k * ratio + ratio + 3), 0x7FFFFFFF, dtype=torch.int32)
        out = buffer[:, : top_k * ratio + ratio]
        expand_blocks(ids, positions, visible, ratio, out=out, backend=backend)
        assert (buffer[:, top_k * ratio + ratio :] == 0x7FFFFFFF).all()
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parity("P19", "P20")
@pytest.mark.bug("O-35", "O-37")
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "ratio", "page"),
    [
        ([1, 1, 2, 40], [9, 30, 7, 200], 4, 16),
        ([0, 3, 0, 0, 5, 0], [4, 3, 0, 9, 2, 1], 3, 6),
        ([1], [1_048_576], 4, 784),
        ([2] * 33, list(range(2, 35)), 1, 5),
        ([], [], 4, 16),
    ],
)
def test_plan_rows(query_lens: list, seq_lens: list, ratio: int, page: int) -> None:
    requests = len(seq_lens)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int()
    generator = torch.Generator().manual_seed(page)
    table = torch.randint(-1, 90, (requests, 9), generator=generator).int()[:, 1:]
    ring = torch.randint(-1, 7, (requests, 2), generator=generator).int()
    results = []
    for backend in ("triton", "reference"):
        out = PlanRows(*(b.fill_(77) for b in PlanRows.empty(sum(query_lens) + 5, "cpu")))
        plan_rows(
            starts,
            torch.tensor(seq_lens, dtype=torch.int32),
            table,
            ring,
            sum(query_lens) + 5,
            compress_ratio=ratio,
            page_size=page,
            ring_capacity=4 * ratio,
            out=out,
            backend=backend,
        )
        results.append(out)
    for name, one, two in zip(PlanRows._fields, *results):
        assert torch.equal(one, two), name


@pytest.mark.parity("P44")
def test_tile_choices_answer_always() -> None:
    for rows in (1, 300, 1 << 20):
        for width in (1, 16, 20, 140, 576, 5000):
            tiles = store_tiles(rows, width)
            assert tiles.rows * tiles.columns <= 4096 and tiles.num_warps in (1, 4)
            for size in tiles[:2]:
                assert size & (size - 1) == 0
    for top_k in (1, 4, 512, 1024, 4096):
        for ratio in (1, 4, 16, 64):
            tiles = expand_tiles(top_k, ratio)
            assert tiles.blocks & (tiles.blocks - 1) == 0 and 1 <= tiles.num_warps <= 8
            assert tiles.blocks * ratio <= max(4096, 16 * ratio)
