"""prepare, compress_keys, store_rows, expand_blocks and plan_rows compile for every target.

Claims:
* on real head shapes each launch compiles, fits the device's shared memory less 2 KiB and keeps
  everything in registers;
* projections, outputs and caches are accessed 16 bytes at a time;
* a launch of other rows, requests or pages is served by the same binary;
* Turing, which has no BF16 of its own, takes it all the same.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from flash_qsa.checks import FLOAT_DTYPES
from flash_qsa.config import RopeConfig
from flash_qsa.launches import record
from flash_qsa.ops import compress_keys, expand_blocks, plan_rows, store_rows
from flash_qsa.targets import TARGETS
from flash_qsa.testing.compiling import Compiled, compile_call
from flash_qsa.testing.inputs import REAL, Shape
from flash_qsa.testing.steps import make_step

ROPE = RopeConfig(rotary_dim=64, max_positions=64, mrope_section=(11, 11, 10))
HALF = {
    name: torch.bfloat16 if target.has_bf16 else torch.float16 for name, target in TARGETS.items()
}
MROPE = {"position_form": "3d", "ring_positions": True, "rope": ROPE}
FP8 = {"main_dtype": torch.uint8, "index_dtype": torch.uint8, **MROPE}
# everything at once where the dialects differ most, the plain text step elsewhere
KINDS = [
    pytest.param(target, HALF[target], FP8 if target in ("sm_75", "sm_90", "gfx942") else {})
    for target in TARGETS
]
KINDS.append(pytest.param("sm_90", torch.float32, MROPE))
KINDS += [pytest.param("sm_75", torch.bfloat16, options) for options in ({}, FP8)]


def fits(built: list[Compiled]) -> None:
    for one in built:
        assert one.fits, f"{one.name}: {one.shared_bytes} bytes of shared memory"
        assert one.spilled_bytes == 0, f"{one.name}: {one.spilled_bytes} bytes spilled"


@pytest.mark.parity("P13", "P31")
@pytest.mark.bug("O-43")
@pytest.mark.parametrize(("target", "dtype", "options"), KINDS)
def test_prepare(target: str, dtype: torch.dtype, options: dict) -> None:
    fp8 = "main_dtype" in options
    scales = {"k_scale": 0.5, "v_scale": torch.ones(1, device="meta")} if fp8 else {}
    problem = make_step([9], [5], REAL, dtype=dtype, device="meta", **options)
    (built,) = compile_call(target, lambda: problem.run(backend="triton", **scales))
    fits([built])
    if not target.startswith("gfx"):
        assert built.widest_load == 16 and built.widest_store == 16


@pytest.mark.parity("P45", "P47")
@pytest.mark.bug("O-43")
@pytest.mark.parametrize(("target", "dtype"), [*HALF.items(), ("sm_75", torch.bfloat16)])
def test_movers(target: str, dtype: torch.dtype) -> None:
    problem = make_step([9], [5], REAL, dtype=dtype, device="meta", ring_positions=True)
    plan, keys = problem.plan, problem.index_qk[:, -128:]
    rows = torch.empty(5, 1, 128, dtype=dtype, device="meta")
    cache = torch.empty(2, 16, 1, 128, dtype=torch.float8_e4m3fn, device="meta")
    ids = torch.empty(5, 512, dtype=torch.int32, device="meta")
    tables = (plan.query_start, plan.seq_lens, plan.page_table, plan.ring_table)
    sizes = {"compress_ratio": 4, "page_size": 64, "ring_capacity": 8}

    def call() -> None:
        ring, table = problem.caches.ring, plan.ring_table
        compress_keys(keys, problem.positions, ring, table, plan, backend="triton")
        store_rows(cache, plan.compressed_slots, rows, backend="triton")
        expand_blocks(ids, plan.positions, plan.visible_blocks, 4, backend="triton")
        plan_rows(*tables, 5, **sizes, backend="triton")

    built = compile_call(target, call)
    assert [one.name for one in built] == [
        "_compress_keys_kernel",
        "_store_rows_kernel",
        "_expand_blocks_kernel",
        "_batch_plan_kernel",
    ]
    fits(built)


@pytest.mark.parity("P47")
@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
def test_rows_of_every_dtype_are_stored_in_every_cache(target: str) -> None:
    dtypes = (*FLOAT_DTYPES, torch.uint8)
    slots = torch.empty(5, dtype=torch.int64, device="meta")

    def call() -> None:
        for stored, given in itertools.product(dtypes, dtypes):
            rows = torch.empty(5, 128, dtype=given, device="meta")
            cache = torch.empty(2, 16, 1, 128, dtype=stored, device="meta")
            store_rows(cache, slots, rows, backend="triton")

    fits(compile_call(target, call))


def test_one_binary_serves_every_step() -> None:
    shape = Shape(heads=4, head_dim=32, index_dim=32)
    keys = set()
    for seq_lens, query_lens in (([9, 4], [5, 4]), ([40] * 3, [1] * 3), ([64], [64])):
        problem = make_step(seq_lens, query_lens, shape, rope=RopeConfig(rotary_dim=16))
        with record("sm_90") as launches:
            problem.run(backend="triton")
        special = launches[0].specialise(TARGETS["sm_90"])
        counted = {"rows", "requests"}
        assert not counted & {special.kernel.arg_names[path[0]] for path in special.constexprs}
        keys.add(str([special.signature[name] for name in counted]))
    assert len(keys) == 1
