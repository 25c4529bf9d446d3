"""`flash-qsa verify` on the kernels: every stage runs Triton and keeps its bound."""

from __future__ import annotations

import pytest
import torch

from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.selfcheck import STAGES, Setting, run_stages

SHAPE = Shape(heads=2, kv_heads=1, head_dim=32, index_heads=1, index_dim=16, top_k=2)


@pytest.mark.bug("O-38")
def test_every_stage_passes_on_the_kernels():
    setting = Setting(torch.device("cpu"), "triton", torch.float32, SHAPE, rows=2)
    results = list(run_stages(setting, 23))
    assert [r for r in results if not r.ok] == []
    assert {r.stage for r in results} == set(STAGES)
    assert {r.ran for r in results if r.case != "table"} == {("triton",)}
