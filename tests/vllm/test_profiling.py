"""The scratch that profiling reserves.

Claims: it is that of the worst step, found on meta tensors without a launch and without memory;
scores of every visible block are in it, the workspace bounds it, and more rows never take less; FP8
caches and drafts are served.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_qsa import dispatch, ops
from flash_qsa.integrations.vllm import profiling
from flash_qsa.integrations.vllm.profiling import LayerSizes, largest_steps, scratch_bytes
from flash_qsa.integrations.vllm.step import StepOptions
from flash_qsa.integrations.vllm.warmup import StepShape
from flash_qsa.launches import record
from flash_qsa.targets import TARGETS

pytestmark = pytest.mark.skipif(
    not dispatch.triton_installed() or dispatch.interpreting(), reason="records Triton launches"
)
BF16 = torch.bfloat16
REAL = LayerSizes(24, 2, 256, 4, 128, 784, 8, BF16, BF16, BF16)
FP8 = dataclasses.replace(REAL, main_dtype=torch.uint8, index_dtype=torch.float8_e4m3fn)
OPTIONS = StepOptions(512, 4, 256**-0.5, workspace=512 << 20)
SM90 = TARGETS["sm_90"]


def scratch(rows: int, max_len: int, sizes: LayerSizes = REAL, **changes) -> int:
    shapes = largest_steps(rows, 256, 4, max_len)
    return scratch_bytes(sizes, dataclasses.replace(OPTIONS, **changes), shapes, SM90)


def test_the_largest_steps_are_a_prompt_and_full_batches():
    prompts = {StepShape(1, rows, 4096, False) for rows in (1, 2, 4, 8, 16, 32, 50)}
    decodes = {StepShape(40, 1, 4096, True), StepShape(12, 4, 4096, True)}
    assert set(largest_steps(50, 40, 4, 4096)) == prompts | decodes
    prompts = {StepShape(1, rows, 4096, False) for rows in (1, 2)}
    assert set(largest_steps(2, 40, 4, 4096)) == prompts | {StepShape(2, 1, 4096, True)}


@pytest.mark.parity("P36")
@pytest.mark.parametrize("sizes", [REAL, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("rows", "max_len"), [(256, 32_768), (2048, 16_384), (4, 262_144)])
def test_scores_of_every_block_fit_in(sizes, rows, max_len):
    assert scratch(rows, max_len, sizes) >= 4 * rows * (max_len // 4)


@pytest.mark.parity("P36")
def test_the_workspace_bounds_scoring():
    small, large = (scratch(8192, 262_144, workspace=mib << 20) for mib in (128, 512))
    assert 100 << 20 < small < 300 << 20 and 450 << 20 < large < 600 << 20


@pytest.mark.parity("P36")
def test_attention_counts_where_its_lists_exceed_the_scores():
    """Prompts of a model with short contexts: scores are few, token lists are not."""
    prompt = StepShape(1, 8192, 2100, False)
    with record(SM90):
        selecting, *attending = profiling._step(
            REAL, dataclasses.replace(OPTIONS, backend="triton"), prompt
        )
    assert scratch_bytes(REAL, OPTIONS, (prompt,), SM90) == max(attending) > selecting


@pytest.mark.parity("P36")
@pytest.mark.parametrize("max_len", [4096, 131_072])
def test_more_rows_never_take_less(max_len):
    taken = [scratch(rows, max_len) for rows in (64, 256, 1024, 4096, 16_384)]
    assert taken == sorted(taken) and taken[0] > 0


def test_nothing_of_the_ops_runs(monkeypatch):
    with dispatch.trace() as ran:
        scratch(48, 8192)
    assert {op for op, _ in ran} == {"select_blocks", "sparse_attention"}
    assert all(backend == "triton" for _, backend in ran)
    monkeypatch.setattr(ops, "select_blocks", None)
    assert scratch(48, 8192) > 0  # kept from the first time: layers ask once each
