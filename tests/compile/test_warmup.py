"""Warm-up.

Claims:
* it compiles what a step launches, all ops of a layer, and launches nothing;
* the list names every binary once and covers steps that were not walked through;
* without a GPU and a target it says so.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa import warmup
from flash_qsa.config import QSAConfig, RopeConfig
from flash_qsa.ops import nvrtc
from flash_qsa.targets import TARGETS
from flash_qsa.warmup import Serving, reachable, warm_up

CONFIG = QSAConfig(
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    index_heads=2,
    index_head_dim=64,
    token_budget=256,
    rope=RopeConfig(rotary_dim=32, max_positions=4096, mrope_section=(6, 5, 5)),
)
SMALL = Serving(max_requests=2, max_rows=64, max_seq_len=2048, draft_tokens=1)


@pytest.mark.parity("P48")
def test_every_op_of_a_layer_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reachable(CONFIG, SMALL, TARGETS["sm_90"])
    names = {launch.name for launch in found.values()}
    for op in ("prepare", "compress_keys", "store_rows", "batch_plan", "expand_blocks"):
        assert f"_{op}_kernel" in names
    modules = {launch.kernel.module.split(".")[2] for launch in found.values()}
    assert {"select_blocks", "sparse_attention"} <= modules

    # steps in between are served by the same binaries
    for step in ((1, 37, 700), (2, 1, 1999), (2, 2, 2048)):
        with warmup.record("sm_90") as launches:
            warmup._walk(CONFIG, SMALL, *step)
        for launch in launches:
            assert launch.specialise(TARGETS["sm_90"]).key in found, launch.name

    compiled = []
    monkeypatch.setattr(
        warmup.Launch, "specialise", lambda self, target: _Counted(self.name, compiled)
    )
    warm_up(CONFIG, SMALL, target="sm_90")
    assert set(compiled) == names


@pytest.mark.parity("P48")
@pytest.mark.parametrize("obstacle", (None, "NVRTC is missing"))
def test_the_selector_that_will_run_is_reached(monkeypatch, obstacle) -> None:
    monkeypatch.setattr(nvrtc, "obstacle", lambda arch: obstacle)
    found = reachable(CONFIG, SMALL, TARGETS["sm_90"]).values()
    searches = {launch.name for launch in found if launch.kwargs.get("GROUP", 0) > 0}
    names = {launch.name for launch in found}
    assert ("select_blocks_cuda" in names) == (obstacle is None)
    assert "select_kernel" in names  # rows that see few blocks are written by it in any case
    assert ("select_kernel" in searches) == (obstacle is not None)


class _Counted:
    """Stands for a specialisation: what is tested is the walk, not the compiler."""

    def __init__(self, name: str, compiled: list[str]) -> None:
        self.key, self._compiled = name, compiled

    def compile(self) -> None:
        self._compiled.append(self.key)


@pytest.mark.parity("P48")
def test_without_a_device_a_target_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="warm_up: no CUDA device"):
        warm_up(CONFIG, SMALL)
