"""Warm-up.

Claims:
* it compiles what a step launches, all ops of a layer, and launches nothing;
* the list names every binary once and covers steps that were not walked through, decodes, draft
  windows, prompts and mixtures of them drawn at random;
* without a GPU and a target it says so.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from flash_qsa import warmup
from flash_qsa.config import QSAConfig, RopeConfig
from flash_qsa.integrations.vllm.selection import row_width
from flash_qsa.integrations.vllm.step import StepOptions
from flash_qsa.integrations.vllm.warmup import run_padding
from flash_qsa.launches import record
from flash_qsa.ops import nvrtc
from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.targets import TARGETS
from flash_qsa.warmup import Serving, StepShape, reachable, step_shapes, warm_up

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
    for step in ((1, 37, 700, False), (2, 1, 1999, True), (2, 2, 2048, True)):
        with warmup.record("sm_90") as launches:
            warmup._walk(CONFIG, SMALL, StepShape(*step))
        for launch in launches:
            assert launch.specialise(TARGETS["sm_90"]).key in found, launch.name

    compiled = []
    monkeypatch.setattr(
        warmup.Launch, "specialise", lambda self, target: _Counted(self.name, compiled)
    )
    warm_up(CONFIG, SMALL, target="sm_90")
    assert set(compiled) == names


@pytest.mark.parity("P48")
@pytest.mark.parametrize(("kv_heads", "obstacle"), ((1, "NVRTC is missing"), (2, None)))
def test_steps_drawn_at_random_were_warmed_up(monkeypatch, kv_heads, obstacle) -> None:
    monkeypatch.setattr(nvrtc, "obstacle", lambda arch: obstacle)
    layer, target, draw = _meta_layer(kv_heads), TARGETS["sm_90"], random.Random(kv_heads)
    requests, rows, window, longest = limits = (32, 600, 4, 100_000)

    def binaries(shapes: list[StepShape]) -> dict[str, str]:
        found = {}
        for shape in shapes:
            with record(target) as launches:
                run_padding(layer, shape, longest)
            found |= {
                launch.specialise(target).key: f"{launch.name}: {shape}" for launch in launches
            }
        return found

    warmed = binaries(step_shapes(*limits))
    shapes = []
    for _ in range(90):
        decodes, each = draw.randint(1, requests - 1), draw.choice((1, window))
        chunk = draw.randint(1, rows - decodes * each)
        length = draw.choice((draw.randint(rows, 9000), draw.randint(rows, longest)))
        shapes += [
            StepShape(decodes, each, length, True),
            StepShape(decodes, each, length, True, chunk),
            StepShape(1, chunk, length, False),
            StepShape(decodes, draw.randint(1, rows // decodes), length, False),
        ]
    served = binaries(shapes)
    missed = served.keys() - warmed.keys()
    assert not missed, sorted(served[key] for key in missed)
    # each takes a second or more: none may depend on a number that only bounds loops and masks
    assert len(served) > 30
    assert len(warmed) < 70


def _meta_layer(kv_heads: int) -> SimpleNamespace:
    """What warm-up reads of vLLM's attention layer, on meta tensors."""
    heads, dim, page = 12 * kv_heads, 256, 64

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    norms = Norms(empty(128), empty(128), empty(dim), empty(dim), 1e-6)
    rope = RopeTable(empty(100_000, 64), (11, 11, 10), True, True)
    indexer = SimpleNamespace(
        raw_key_cache=SimpleNamespace(kv_cache=empty(64, 8, 1, 128 + 12)),
        compressed_key_cache=SimpleNamespace(kv_cache=empty(4096, page // 4, 1, 128)),
        row_width=row_width(512),
        reusable=False,
    )
    return SimpleNamespace(
        kv_cache=empty(4096, kv_heads, page, 2 * dim),
        options=StepOptions(512, 4, dim**-0.5, backend="triton", workspace=256 << 20),
        indexer=indexer,
        impl=SimpleNamespace(typed_cache=lambda cache: cache, scales=lambda layer: (None, None)),
        q_norm=SimpleNamespace(weight=norms.query),
        q_size=heads * dim,
        kv_size=kv_heads * dim,
        index_qk_size=5 * 128,
        norms=lambda: norms,
        rope_table=lambda dtype: rope,
    )


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
