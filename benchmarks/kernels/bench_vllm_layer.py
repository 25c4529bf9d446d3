"""One QSA layer behind its projections, on vLLM's memory layout: ours beside vLLM's kernels.

    python benchmarks/kernels/bench_vllm_layer.py --peers DIR [--only NAME,...] [--seconds 95]

Both sides get the same projections, block tables, slots and caches (block stride larger than a
page, block 0 reserved, padded rows at the end of captured batches, draft windows). For every case:
the caches after preparation are compared, both selectors run on the same index queries and keys,
both attentions on the same selection, against float64 on sampled rows; then prepare, select
(with vLLM's expansion to token lists), attend and their sum are timed. One JSON line each.

DIR is a bundle of vLLM's op files with its compiled top-k (see benchmarks/README.md). Times are
medians in microseconds, both sides in turn; decode is timed by graph replay over several layers'
caches, prefills as calls that the device finds queued (`flash_qsa/testing/measure/timing.py`).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable

import torch
from vllm_layer_sides import DEVICE, DTYPE, Case, Layer, Peer, clone_caches

from flash_qsa.ops.compress_keys.ring_rows import position_offset
from flash_qsa.ops.fp8 import as_bytes, from_storage
from flash_qsa.ops.paging import lookup_pages
from flash_qsa.testing.compare import (
    attention_truth,
    selection_faults,
    true_scores,
    within_bound,
)
from flash_qsa.testing.measure.timing import interleaved

L2_BYTES = 60 << 20
"""More than any GPU's second-level cache that this runs on."""

REPEATS = 15
QUEUED = 4
"""Calls of a timed turn where steps are not captured."""


CASES = (
    Case("decode 32 at 32K, 8 padded", 784, 32_768, decodes=32, padded=8),
    Case("verify 8 x 4 at 32K, 2 padded", 160, 32_768, decodes=8, rows=4, padded=2),
    Case("decode 1 at 128K", 64, 131_072, decodes=1),
    Case("decode 128 at 8K", 160, 8_192, decodes=128),
    Case("decode 32 at 32K, FP8", 784, 32_768, decodes=32, fp8=True),
    Case("prefill 8192 at 32K", 784, 32_768, chunks=(8192,)),
    Case("prefill 8192 at 32K, rows alike", 784, 32_768, chunks=(8192,), alike=0.97),
    Case("mixed 16 decodes, 2 chunks of 1024 at 16K", 160, 16_384, decodes=16, chunks=(1024, 1024)),
)


def check(layer: Layer, peer: Peer) -> dict:
    """Every comparison of a case; `ok` only if all hold."""
    ours, theirs = layer.engine.caches, clone_caches(layer.engine)
    mine, stock = layer.prepare(ours), peer.prepare(theirs)
    real = layer.plan.request_ids >= 0
    report: dict = {"case": layer.case.name}
    report["query differs"] = differing(mine.query[real], stock.query[real])
    report["gate equal"] = bool(torch.equal(mine.gate[real], stock.gate[real]))
    report["main cache differs"] = differing(ours.main[1:], theirs.main[1:])
    report["keys differ"] = differing(ours.compressed[1:], theirs.compressed[1:])
    at = position_offset(layer.shape.index_dim, DTYPE)
    bits = [caches.ring[1:].view(torch.int16) for caches in (ours, theirs)]  # positions may be NaN
    report["ring equal"] = all(
        torch.equal(bits[0][..., part], bits[1][..., part])
        for part in (slice(0, layer.shape.index_dim), slice(at, None))
    )
    report["null blocks untouched"] = layer.engine.null_block_untouched()

    chosen = layer.select(mine.index_query, ours).clone()
    other = peer.select(mine.index_query, ours)
    other = sort_blocks(other)
    unlike = real & (chosen != other).any(1)
    report["rows selected alike"] = f"{int((real & ~unlike).sum())}/{int(real.sum())}"
    sample = sample_rows(real, unlike)
    faults = {}
    for name, blocks in (("ours", chosen), ("vllm", other)):
        faults[name] = selection_report(layer, mine.index_query, ours.compressed, blocks, sample)
    report["selection faults"] = faults

    peer.expand(chosen)
    for name, side in (("ours", layer), ("vllm", peer)):
        out = side.attend(mine, ours)
        report[f"{name} worst/bound"] = attention_report(
            layer, mine, ours.main, chosen, out, sample
        )
        report[f"{name} padded rows zero"] = bool((out[~real] == 0).all())
    report["ok"] = (
        report["gate equal"]
        and report["ring equal"]
        and report["null blocks untouched"]
        and not faults["ours"]
        and report["ours worst/bound"] <= 1
        and report["ours padded rows zero"]
    )
    return report


def differing(one: torch.Tensor, other: torch.Tensor) -> str:
    """How many elements differ, and by how much at most."""
    count, worst = 0, 0.0
    for a, b in zip(one.split(512), other.split(512)):
        unlike = as_bytes(a) != as_bytes(b)
        count += int(unlike.sum())
        if unlike.any():
            gap = (from_storage(a) - from_storage(b)).abs().nan_to_num(0.0)
            worst = max(worst, float(gap.max()))
    return f"{count}/{one.numel()}, at most {worst:.3g}"


def sort_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """vLLM's selection in ascending order with -1 last."""
    big = torch.iinfo(torch.int32).max
    ordered = blocks.where(blocks >= 0, big).sort(1).values
    return ordered.where(ordered < big, -1)


def sample_rows(real: torch.Tensor, unlike: torch.Tensor) -> list[int]:
    live, strange = real.nonzero().flatten(), unlike.nonzero().flatten()
    spread = live[torch.linspace(0, len(live) - 1, 8).long().to(live.device)]
    return sorted({*spread.tolist(), *strange[:8].tolist()})


def selection_report(layer, index_query, keys, blocks, sample) -> list[str]:
    faults = []
    for row in sample:
        visible = layer.plan.visible_blocks[row : row + 1]
        table = layer.plan.page_table[int(layer.plan.request_ids[row])]
        scores, rounding = true_scores(
            index_query[row : row + 1], keys, table, max(int(visible), 1)
        )
        faults += selection_faults(blocks[row : row + 1], scores, rounding, visible)
    return faults[:2]


def attention_report(layer, prepared, main, blocks, out, sample) -> float:
    """Worst error of the sampled rows as a fraction of the derived bound."""
    shape, plan = layer.shape, layer.plan
    tokens, cells = [], []
    for row in sample:
        ids = blocks[row][blocks[row] >= 0].long()
        token = (ids[:, None] * shape.ratio + torch.arange(shape.ratio, device=DEVICE)).flatten()
        start = int(plan.visible_blocks[row]) * shape.ratio
        tail = torch.arange(start, int(plan.positions[row]) + 1, device=DEVICE)
        token = torch.cat((token, tail))
        page = lookup_pages(
            plan.page_table[int(plan.request_ids[row])], token // shape.page_size, main.shape[0]
        )
        tokens.append(token)
        cells.append(torch.stack((page, token % shape.page_size), -1))
    keys, values = main.chunk(2, -1)
    truth = attention_truth(
        prepared.query[sample], keys, values, tokens, cells, shape.head_dim**-0.5,
        prepared.gate[sample],
    )  # fmt: skip
    return round(within_bound(out[sample], truth.out, truth.bound).worst_ratio, 4)


def measure(layer: Layer, peer: Peer) -> dict[str, dict[str, float]]:
    """Microseconds of each stage and of the whole path, both sides taking turns."""
    captured = layer.case.captured
    touched = layer.plan.num_rows * 2048 * 2048
    copies = max(3, min(16, 3 * L2_BYTES // max(touched, 1))) if captured else 1
    caches = [layer.engine.caches] + [clone_caches(layer.engine) for _ in range(copies - 1)]
    runs: dict[str, dict[str, list[Callable[[], object]]]] = {}
    for name, side in (("ours", layer), ("vllm", peer)):
        prepared = side.prepare(caches[0])
        side.select(prepared.index_query, caches[0])

        def whole(cache, side=side):
            made = side.prepare(cache)
            side.select(made.index_query, cache)
            side.attend(made, cache)

        stages = {
            "prepare": lambda cache, side=side: side.prepare(cache),
            "select": lambda cache, side=side, p=prepared: side.select(p.index_query, cache),
            "attend": lambda cache, side=side, p=prepared: side.attend(p, cache),
            "layer": whole,
        }
        for stage, call in stages.items():
            calls = [functools.partial(call, cache) for cache in caches]
            runs.setdefault(stage, {})[name] = calls if captured else calls * QUEUED
    medians: dict[str, dict[str, float]] = {}
    for stage, sides in runs.items():
        times = interleaved(sides, torch.device(DEVICE), REPEATS, graph=captured)
        medians[stage] = {name: round(seen.median_us, 1) for name, seen in times.items()}
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", required=True, help="folder of vLLM's op files")
    parser.add_argument("--only", default="", help="parts of case names, comma-separated")
    parser.add_argument("--seconds", type=float, default=95, help="start no case after this")
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.peers)
    import bench_vllm  # noqa: F401  loads vLLM's compiled operators

    began = time.monotonic()
    wanted = [part for part in arguments.only.split(",") if part]
    for case in CASES:
        if wanted and not any(part in case.name for part in wanted):
            continue
        if time.monotonic() - began > arguments.seconds:
            print(json.dumps({"case": case.name, "skipped": "out of time"}), flush=True)
            continue
        run_case(case)


def run_case(case: Case) -> None:
    try:
        layer = Layer(case)
        peer = Peer(layer)
        print(json.dumps(check(layer, peer)), flush=True)
        for stage, times in measure(layer, peer).items():
            faster = round(times["vllm"] / times["ours"], 2)
            line = {"case": case.name, "stage": stage, "us": times, "vllm/ours": faster}
            print(json.dumps(line), flush=True)
    except Exception as error:  # one case must not cost the others their time on the GPU
        print(json.dumps({"case": case.name, "error": f"{type(error).__name__}: {error}"}))
        import traceback

        traceback.print_exc()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
