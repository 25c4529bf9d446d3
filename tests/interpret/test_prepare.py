"""prepare's kernel in the interpreter.

Claims:
* every claim of tests/ops/test_prepare.py about one step, for the kernel: float64 bounds, exact
  copies, nothing else written;
* FP8 bytes, rings and pooled keys are the reference's bits where both round alike, and a byte of
  FP8 differs only where a float did;
* scales are read on the device, at the time of the launch;
* slots out of range are skipped; tiles never change a bit.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_qsa import dispatch
from flash_qsa.config import RopeConfig
from flash_qsa.ops.fp8 import as_bytes
from flash_qsa.ops.prepare import operands
from flash_qsa.ops.prepare.tiles import Tiles, choose_tiles
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.prepared import assert_prepared, bits
from flash_qsa.testing.steps import make_step

MROPE = RopeConfig(rotary_dim=8, max_positions=64, mrope_section=(2, 1, 1))
SMALL = Shape(heads=2, kv_heads=1, head_dim=16, index_heads=1, index_dim=16)
CASES = {
    "text-padded": ([9, 7, 12], [1, 2, 7], {"padding": 2}),
    "mrope-interleaved": (
        [6, 11],
        [3, 5],
        {"position_form": "3d", "ring_positions": True, "rope": MROPE},
    ),
    "mrope-runs-fp16": (
        [8, 5],
        [1, 5],
        {
            "position_form": "canonical",
            "ring_positions": True,
            "dtype": torch.float16,
            "rope": dataclasses.replace(MROPE, mrope_interleaved=False),
        },
    ),
    "text-after-an-image": ([8], [2], {"ring_positions": True, "rope": MROPE}),
    "neighbour-pairs": (
        [8, 3],
        [4, 1],
        {"rope": RopeConfig(rotary_dim=16, max_positions=64, neox_style=False)},
    ),
    "ratio-3-odd-heads": (
        [7],
        [5],
        {
            "shape": Shape(3, 1, 48, 3, 24, ratio=3, page_size=12, ring_capacity=6),
            "rope": RopeConfig(rotary_dim=12, max_positions=64),
        },
    ),
    "ratio-1": ([3], [2], {"shape": dataclasses.replace(SMALL, ratio=1, ring_capacity=2)}),
    "ratio-12": (
        [13],
        [3],
        {"shape": dataclasses.replace(SMALL, ratio=12, page_size=24, ring_capacity=24)},
    ),
    "wide-ring": ([23], [13], {"shape": dataclasses.replace(SMALL, ring_capacity=12)}),
}


@pytest.mark.parity("P10", "P12", "P13", "P15", "P16", "P29", "P30", "P49")
@pytest.mark.bug("O-11", "O-16", "O-17", "O-36")
@pytest.mark.parametrize("case", CASES)
def test_equals_float64_and_writes_only_the_named_cells(case: str) -> None:
    seq_lens, query_lens, options = CASES[case]
    options = {"shape": SMALL, **options}
    problem = make_step(seq_lens, query_lens, **options)
    caches, before = problem.clone_caches(), problem.clone_caches()
    with dispatch.trace() as ran:
        out = problem.run(caches, backend="triton")
    assert ran == [("prepare", "triton")]
    assert_prepared(problem, out, caches, before)


@pytest.mark.parity("P05", "P13", "P31", "P42")
@pytest.mark.bug("O-42", "O-43")
def test_fp8_bytes_are_the_references() -> None:
    problem = make_step(
        [9, 6],
        [1, 6],
        SMALL,
        dtype=torch.float16,
        main_dtype=torch.float8_e4m3fn,
        index_dtype=torch.uint8,
        scale=200.0,
        padding=1,
    )
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": 3.0}
    ours, theirs = problem.clone_caches(), problem.clone_caches()
    out = problem.run(ours, backend="triton", **scales)
    want = problem.run(theirs, backend="reference", **scales)
    real = problem.plan.num_tokens
    assert torch.equal(bits(ours.ring), bits(theirs.ring))
    dim = problem.shape.head_dim
    values, wanted = as_bytes(ours.main)[..., dim:], as_bytes(theirs.main)[..., dim:]
    assert torch.equal(values, wanted)
    for one, two in (
        (ours.main[..., :dim], theirs.main[..., :dim]),
        (ours.compressed, theirs.compressed),
        (out.index_query[:real], want.index_query[:real]),
    ):
        # FP32 sums of another order may round a float, and so its byte, the other way
        apart = (as_bytes(one).int() - as_bytes(two).int()).abs()
        assert apart.max() <= 1 and (apart > 0).double().mean() < 0.01


@pytest.mark.bug("O-42")
def test_scales_are_read_at_launch() -> None:
    problem = make_step([5], [2], SMALL, main_dtype=torch.uint8)
    scale = torch.tensor([1.0])
    stored = []
    for value in (1.0, 4.0):
        scale.fill_(value)
        caches = problem.clone_caches()
        problem.run(caches, backend="triton", k_scale=scale, v_scale=2.0)
        want = problem.clone_caches()
        problem.run(want, backend="reference", k_scale=value, v_scale=2.0)
        assert torch.equal(caches.main, want.main)
        stored.append(caches.main)
    assert not torch.equal(*stored)


@pytest.mark.bug("O-36")
@pytest.mark.parametrize("far", [3, 70_000, 1 << 40])
def test_slots_past_the_last_page_are_skipped(far: int) -> None:
    problem = make_step([4], [4], SMALL)
    shift = {"main_slots": 16, "compressed_slots": 4, "ring_slots": 8}
    plan = dataclasses.replace(
        problem.plan,
        **{
            name: slots.where(slots < 0, slots % size + far * size)
            for name, size in shift.items()
            for slots in (getattr(problem.plan, name),)
        },
    )
    caches = problem.clone_caches()
    dataclasses.replace(problem, plan=plan).run(caches, backend="triton")
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(caches, problem.caches))


@pytest.mark.bug("O-33")
@pytest.mark.parametrize("page", [65_535, 65_536, 70_000])
def test_pages_past_two_to_the_thirty_first(page: int) -> None:
    # bytes, so that 2^31 elements are 2 GiB; memory that is never touched costs nothing
    shape = Shape(heads=2, kv_heads=2, head_dim=16, index_heads=1, index_dim=16, page_size=64)
    problem = make_step([4], [4], shape, main_dtype=torch.uint8, index_dtype=torch.uint8)
    want = problem.clone_caches()
    problem.run(want, backend="reference")
    stride = 64 * 2 * 256
    main = torch.empty((page + 1) * stride, dtype=torch.uint8)
    main = main.as_strided((page + 1, 2, 64, 32), (stride, 256, 512, 1))
    keys = torch.empty((page + 1) * stride, dtype=torch.uint8)
    keys = keys.as_strided((page + 1, 16, 1, 16), (stride, 128, 128, 1))
    offset = torch.arange(4)
    slots = {
        "main_slots": page * 64 + offset,
        "compressed_slots": torch.tensor([-1, -1, -1, page * 16]),
    }
    plan = dataclasses.replace(problem.plan, **slots)
    caches = problem.clone_caches()._replace(main=main, compressed=keys)
    dataclasses.replace(problem, plan=plan).run(caches, backend="triton")
    home = int(problem.plan.main_slots[0]) // 64
    assert torch.equal(main[page, :, :4], want.main[home, :, :4])
    assert torch.equal(keys[page, 0], want.compressed[home, 0])


@pytest.mark.parity("P44")
def test_tiles_never_change_the_bits() -> None:
    problem = make_step([5], [2], Shape(heads=4, kv_heads=2, head_dim=16, index_heads=3))
    results = []
    for tiles in (None, Tiles(1, 1, 1, 1), Tiles(2, 2, 4, 8)):
        caches = problem.clone_caches()
        with pytest.MonkeyPatch.context() as patch:
            operands.constants.cache_clear()
            if tiles:
                patch.setattr(operands, "choose_tiles", lambda *sizes, tiles=tiles: tiles)
            out = problem.run(caches, backend="triton")
        operands.constants.cache_clear()
        results.append([bits(part) for part in (*out, *caches)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other))


@pytest.mark.parity("P44")
def test_tile_choice_answers_always() -> None:
    for heads in (1, 3, 6, 24, 64):
        for block in (16, 64, 128, 256, 512, 4096):
            tiles = choose_tiles(heads, 2, 4, block, 128)
            for count in tiles[:3]:
                assert count >= 1 and count & (count - 1) == 0
            assert tiles.query_heads * block <= max(512, block)
            assert tiles.query_heads < 2 * heads
