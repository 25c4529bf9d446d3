"""select_blocks' kernels compile for every target, fit it, and use its matrix units.

What is compiled is what an op call would launch there, with the JIT's own specialisation: decode
and prefill scorers in every dtype, and every selection schedule (which sees no dtype).
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa import ops
from flash_qsa.launches import record
from flash_qsa.targets import TARGETS
from flash_qsa.testing.compiling import compile_launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def call(rows, requests, context, dtype, top_k=512):
    """Selection for the real model's shape; meta tensors, so nothing is computed."""

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    pages = context // 64

    def run():
        ops.select_blocks(
            empty(rows, 4, 128, dtype=dtype),
            empty(requests * pages, 16, 1, 128, dtype=dtype),
            empty(requests, pages),
            empty(rows),
            empty(rows),
            top_k,
            backend="triton",
        )

    return run


def compiled(target, launches, wanted):
    """Compiles the distinct recorded launches whose kernel's name contains `wanted`."""
    chosen = {}
    for launch in launches:
        if wanted in launch.name:
            chosen[launch.specialise(TARGETS[target]).key] = launch
    assert chosen
    return [compile_launch(launch, target) for launch in chosen.values()]


def launches_of(target, *calls):
    with record(target) as launches:
        for run in calls:
            run()
    return launches


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("target", TARGETS)
def test_scorers_compile_and_fit(target, dtype):
    launches = launches_of(target, call(8, 8, 16384, dtype), call(4096, 1, 16384, dtype))
    scorers = compiled(target, launches, "score_kernel")
    assert len(scorers) == 2 and all(kernel.fits for kernel in scorers)
    used = set()
    for kernel in scorers:
        used |= kernel.matrix_instructions
        if kernel.name == "dense_score_kernel" and TARGETS[target].backend == "cuda":
            assert kernel.widest_store == 16
    if dtype != torch.float32 and target != "sm_75":
        # one instruction in both schedules: a score's bits do not depend on the schedule
        assert len(used) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_selections_compile_and_fit(target):
    launches = launches_of(
        target,
        call(4096, 1, 2048, torch.float32),
        call(4096, 1, 8192, torch.float32),
        call(8, 8, 131072, torch.float32),
    )
    selections = compiled(target, launches, "select_kernel")
    assert len(selections) == 3 and all(kernel.fits for kernel in selections)


@pytest.mark.parametrize("target", ("sm_75", "sm_90", "gfx942"))
def test_the_longest_rows_and_the_largest_k_compile_and_fit(target):
    for wanted in ("select_kernel", "gather_kernel"):
        dtype = torch.float32 if wanted == "select_kernel" else torch.float8_e4m3fn
        launches = launches_of(target, call(4096, 1, 1 << 20, dtype, 4096))
        if target != "sm_75" or wanted == "select_kernel":
            assert all(kernel.fits for kernel in compiled(target, launches, wanted))


def test_two_prefill_programs_share_a_hopper_multiprocessor():
    launches = launches_of("sm_90", call(4096, 1, 16384, torch.bfloat16))
    (scorer,) = compiled("sm_90", launches, "dense_score_kernel")
    assert 2 * (scorer.shared_bytes + 1024) <= 228 << 10
    assert scorer.spilled_bytes == 0
    assert scorer.matrix_instructions == {"wgmma.mma_async"}
