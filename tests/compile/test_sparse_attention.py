"""sparse_attention's kernels compile for every target, fit it, and use its matrix units.

What is compiled is what an op call would launch there, with the JIT's own specialisation. The real
model's shape is compiled for every target; dtypes, head dims and groups are spread over them.
"""

from __future__ import annotations

import re

import pytest
import torch

from flash_qsa import ops
from flash_qsa.targets import TARGETS
from flash_qsa.testing.compiling import compile_call

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, BYTES = torch.float8_e4m3fn, torch.uint8


def call(rows, requests, *, dtype=BF16, kv=None, group=12, dim=256, page=64, **options):
    """A call on meta tensors: nothing is computed."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    index = {"dtype": torch.int32}
    heads = 2 * group
    scales = {} if kv is None else {"k_scale": empty(1, dtype=FP32), "v_scale": 2.0}

    def run():
        ops.sparse_attention(
            empty(rows, heads, dim),
            empty(512, 2, page, 2 * dim, dtype=kv or dtype),
            empty(rows, 512, **index),
            empty(rows, dtype=torch.int64),
            empty(requests, 512, **index),
            empty(rows, **index),
            compress_ratio=4,
            gate=empty(rows, heads, dim),
            backend="triton",
            **scales,
            **options,
        )

    return run


def built(target, run):
    """Compiled kernels by name; all fit."""
    kernels = compile_call(target, run)
    for kernel in kernels:
        assert kernel.fits, f"{kernel.name} takes {kernel.shared_bytes} bytes on {target}"
    return {kernel.name: kernel for kernel in kernels}


def uses_matrix_units(target, dtype):
    """Triton has no matrix instructions for Turing, and FP32 products stay exact."""
    return dtype is not FP32 and TARGETS[target].has_bf16


@pytest.mark.bug("O-44", "O-45")
@pytest.mark.parametrize("target", TARGETS)
def test_decode_of_the_real_model_fits_every_target(target):
    kernels = built(target, call(4, 4))
    assert set(kernels) == {"rows_kernel", "merge_kernel"}
    assert bool(kernels["rows_kernel"].matrix_instructions) == uses_matrix_units(target, BF16)


@pytest.mark.parametrize("target", ["sm_86", "sm_90", "gfx942"])
def test_row_unions_of_the_real_model(target):
    kernels = built(target, call(8192, 1))
    union = {"union_kernel", "union_sm90_kernel"} & set(kernels)
    assert len(union) == 1 and {"build_kernel", "rows_kernel"} <= set(kernels)
    assert kernels[union.pop()].matrix_instructions
    if target == "sm_90":
        assert "wgmma.mma_async" in kernels["union_sm90_kernel"].matrix_instructions


@pytest.mark.parametrize("dim", [128, 256])
def test_row_unions_of_an_fp8_cache_on_hopper(dim):
    kernel = built("sm_90", call(8192, 1, kv=E4M3, dim=dim))["union_sm90_kernel"]
    assert "wgmma.mma_async" in kernel.matrix_instructions and kernel.spilled_bytes <= 128
    assert "cp.async.cg.shared.global" in kernel.asm


@pytest.mark.bug("O-43")
@pytest.mark.parity("P41")
@pytest.mark.parametrize(
    "target, dtype, kv",
    [
        ("sm_75", FP16, BYTES),
        ("sm_80", BF16, E4M3),
        ("sm_80", FP32, None),
        ("sm_86", FP16, None),
        ("sm_89", BF16, E4M3),
        ("sm_90", FP16, BYTES),
        ("sm_100", BF16, BYTES),
        ("sm_120", FP16, E4M3),
        ("gfx942", BF16, E4M3),
    ],
)
def test_dtypes(target, dtype, kv):
    kernels = built(target, call(4, 4, dtype=dtype, kv=kv, dim=64))
    assert bool(kernels["rows_kernel"].matrix_instructions) == uses_matrix_units(target, dtype)


@pytest.mark.parametrize("group", [1, 3, 6, 16])
def test_groups_in_draft_windows(group):
    kernels = built("sm_90", call(128, 32, group=group, dim=64))
    assert "merge_kernel" in kernels and kernels["rows_kernel"].matrix_instructions


def test_shifted_and_reused_selections_on_pages_of_784_tokens():
    rows = {"dtype": torch.int64, "device": "meta"}
    built(
        "sm_90",
        call(
            4, 4, dim=128, page=784, return_lse=True,
            tail_start=torch.empty(4, **rows), token_base=torch.empty(4, **rows),
        ),
    )  # fmt: skip


def test_keys_and_values_arrive_sixteen_bytes_at_a_time():
    kernel = built("sm_90", call(4, 4))["rows_kernel"]
    assert "cp.async.cg.shared.global" in kernel.asm and kernel.spilled_bytes == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_fp8_is_neither_loaded_byte_by_byte_nor_converted_to_bf16(target):
    kernel = built(target, call(32, 32, kv=E4M3))["rows_kernel"]
    assert "cp.async.cg.shared.global" in kernel.asm and kernel.spilled_bytes <= 128
    loads = re.findall(r"ld\.shared[.\w:]*?\.[bsu]8\b", kernel.asm)
    assert len(loads) <= 4  # of the list's scan; a step's values would be a hundred and more
    assert not re.search(r"cvt[.\w]*\.bf16(?:x2)?\.f16", kernel.asm)
