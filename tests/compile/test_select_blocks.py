"""select_blocks' kernels compile for every target, fit it, and use its matrix units.

What is compiled is what an op call would launch there, with the JIT's own specialisation: decode
and prefill scorers in every dtype, and every schedule of the Triton selection (which sees no
dtype).
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
def test_decode_scorers_compile_and_fit(target, dtype):
    (scorer,) = compiled(target, launches_of(target, call(8, 8, 16384, dtype)), "score_kernel")
    assert scorer.fits
    if dtype != torch.float32 and target != "sm_75":
        assert len(scorer.matrix_instructions) == 1


# FP16 and FP8 multiply as FP16, with the tiles of BF16: one target of each family suffices
# (64 KiB of shared memory are too few for its tiles, FP32 has no matrix unit: see the next test)
PREFILL = [(target, torch.bfloat16) for target in TARGETS if target not in ("sm_75", "gfx942")] + [
    (target, dtype)
    for target in ("sm_80", "sm_90")
    for dtype in (torch.float16, torch.float8_e4m3fn)
]


@pytest.mark.parametrize("target, dtype", PREFILL, ids=str)
def test_prefill_scorers_compile_and_fit(target, dtype):
    launches = launches_of(target, call(8, 8, 16384, dtype), call(4096, 1, 16384, dtype))
    (scorer,) = compiled(target, launches, "dense_score_kernel")
    assert scorer.fits
    if TARGETS[target].backend == "cuda":
        assert scorer.widest_store == 16
    decode = [launch for launch in launches if launch.name == "score_kernel"]
    (other,) = compiled(target, decode, "score_kernel")
    # one instruction in both schedules: a score's bits do not depend on the schedule
    assert scorer.matrix_instructions == other.matrix_instructions
    assert len(scorer.matrix_instructions) == 1


@pytest.mark.parametrize(
    "target, dtype",
    (
        ("sm_75", torch.float16),
        ("sm_90", torch.float32),
        ("gfx942", torch.bfloat16),
        ("gfx942", torch.float8_e4m3fn),
    ),
    ids=str,
)
def test_prefill_through_the_plain_scorer_compiles_and_fits(target, dtype):
    launches = launches_of(target, call(4096, 1, 16384, dtype))
    (scorer,) = compiled(target, launches, "score_kernel")
    assert scorer.name == "score_kernel" and scorer.fits


@pytest.fixture
def triton_selects(monkeypatch):
    monkeypatch.setenv("FLASH_QSA_SELECTOR", "triton")


@pytest.mark.parametrize("target", TARGETS)
def test_selections_compile_and_fit(target, triton_selects):
    launches = launches_of(
        target,
        call(4096, 1, 2048, torch.float32),
        call(4096, 1, 8192, torch.float32),
        call(8, 8, 131072, torch.float32),
        call(8, 8, 1024, torch.float32),
    )
    # the first and the last see too few blocks to search: one binary, whatever the batch
    selections = compiled(target, launches, "select_kernel")
    assert len(selections) == 3 and all(kernel.fits for kernel in selections)


@pytest.mark.parametrize("target", ("sm_75", "sm_90", "gfx942"))
def test_the_longest_rows_and_the_largest_k_compile_and_fit(target, triton_selects):
    launches = launches_of(target, call(4096, 1, 1 << 20, torch.float32, 4096))
    assert all(kernel.fits for kernel in compiled(target, launches, "select_kernel"))


@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
def test_gathering_compiles_and_fits(target):
    launches = launches_of(target, call(4096, 1, 16384, torch.float8_e4m3fn))
    assert all(kernel.fits for kernel in compiled(target, launches, "gather_kernel"))


def test_two_prefill_programs_share_a_hopper_multiprocessor():
    launches = launches_of("sm_90", call(4096, 1, 16384, torch.bfloat16))
    (scorer,) = compiled("sm_90", launches, "dense_score_kernel")
    assert 2 * (scorer.shared_bytes + 1024) <= 228 << 10
    assert scorer.spilled_bytes == 0
    assert scorer.matrix_instructions == {"wgmma.mma_async"}
