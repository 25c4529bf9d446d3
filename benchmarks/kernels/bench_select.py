"""Checks every select_blocks schedule on this GPU, then times it beside vLLM's kernels.

    python benchmarks/kernels/bench_select.py [--peers DIR] [--skip-checks]
                                              [--only decode|prefill|checks|selectors]

Checks come first and print every failure: exact equality with the specification where scores are
small integers (exact in FP32, full of ties), and the float64 rounding bound on random values.
Times are microseconds: decode by graph replay over caches that do not fit L2 together, prefill as
medians. DIR holds vLLM's operators (`vllm` importable from it, with a `bench_vllm` module that
loads them). `--only selectors` takes the selection apart from the scorer, in Triton and in CUDA
C++, after comparing their ids with each other and with the specification. The last lines are the
table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from functools import partial
from types import SimpleNamespace

import torch
from triton.testing import do_bench

from flash_qsa.launches import record
from flash_qsa.ops.select_blocks import kernel, reference, tiles
from flash_qsa.ops.select_blocks.tiles import Phase
from flash_qsa.targets import TARGETS
from flash_qsa.testing.compare import selection_faults, true_scores

HEADS, DIM, RATIO, PAGE_BLOCKS, TOP_K = 4, 128, 4, 16, 512
DEVICE = "cuda"
dry: list | None = None
"""Launches are recorded here instead of performed while kernels are compiled beforehand."""


SCORE_ONLY = {"parts": ("score",)}


def decode_variants(blocks: int) -> dict[str, dict]:
    """Tunings to compare in decode; "score" is the scorer alone."""
    found = {"default": {}, "score": SCORE_ONLY, "nopdl": {"pdl": False}}
    found["triton"] = {"selector": "triton"}
    found["score-s2"] = SCORE_ONLY | {"score": {"num_stages": 2}}
    found["score-s4"] = SCORE_ONLY | {"score": {"num_stages": 4}}
    found["score-p3"] = SCORE_ONLY | {"decode": {"programs": 3}}
    for group, warps, chunk in (
        (1, 4, 0), (1, 8, 0), (4, 8, 1024), (16, 4, 512), (16, 8, 256), (16, 8, 1024),
        (16, 16, 512), (16, 16, 1024),
    ):  # fmt: skip
        units = 1 << (-(-blocks // group) - 1).bit_length()
        if units >= 1024 and 2 <= units // (32 * warps) <= (64 if warps == 4 else 32):
            select = {"group": group, "units": units, "num_warps": warps, "chunk": chunk}
            if group > 1:
                select |= {"slack": 64, "survivors": 1024}
            found[f"g{group}-w{warps}-c{chunk}"] = {"selector": "triton", "select": select}
    return found


def prefill_variants(blocks: int) -> dict[str, tuple[dict, int]]:
    """Tunings and workspaces to compare in prefill; "score" is the scorer alone."""
    big = 512 << 20
    found = {"default": ({}, big), "score": (SCORE_ONLY, big), "1024M": ({}, 1 << 30)}
    for pairs in (4, 16):
        found[f"score-p{pairs}"] = (SCORE_ONLY | {"dense": {"pairs": pairs}}, big)
    for warps, registers in ((1, 128), (2, 96), (2, 128), (4, 64), (4, 80), (8, 64)):
        select = {"num_warps": warps}
        if blocks > 2048:
            select["chunk"] = (
                512 * warps // (4 if blocks <= 16384 else 16 if blocks <= 65536 else 32)
            )
        tuning = {"selector": "triton", "select": select}
        tuning |= {"select_options": {"maxnreg": registers}}
        found[f"w{warps}-r{registers}"] = (tuning, big)
    return found


class Case:
    """Selection inputs of `batch` requests, `rows` rows each at the end of `blocks` blocks."""

    def __init__(
        self,
        batch: int,
        rows: int,
        blocks: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        kind: str = "normal",
        heads: int = HEADS,
        dim: int = DIM,
        layers: int = 1,
        page_blocks: int = PAGE_BLOCKS,
        spread: int = 0,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.lengths = None
        pages = -(-blocks // page_blocks)
        self.table = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
        total = batch * rows
        self.query = _values((total, heads, dim), kind, dtype)
        shape = (batch * pages, page_blocks, 1, dim)
        self.caches = [_values(shape, kind, dtype) for _ in range(layers)]
        if spread:
            wide = torch.full((shape[0], spread), float("nan"), dtype=dtype, device=DEVICE)
            view = wide[:, : page_blocks * dim].view(shape)
            view.copy_(self.caches[0])
            self.caches = [view]
        self.request_ids = torch.arange(batch, device=DEVICE).int().repeat_interleave(rows)
        position = blocks * RATIO - rows + torch.arange(rows, device=DEVICE)
        self.visible = ((position + 1) // RATIO).clamp(min=0).int().repeat(batch)
        self.batch, self.rows, self.blocks = batch, rows, blocks

    def launch(self, out, cache=None, tuning=None, workspace=512 << 20, first=None):
        cache = self.caches[0] if cache is None else cache
        plan = None
        if self.lengths is not None:
            plan = SimpleNamespace(
                num_decodes=0,
                num_decode_tokens=0,
                decode_query_len=0,
                max_seq_len=self.blocks * RATIO,
                compress_ratio=RATIO,
                seq_lens=self.lengths,
            )
        args = (self.query, cache, self.table, self.request_ids, self.visible, first, plan)
        if dry is None:
            kernel.launch(*args, workspace, out, tuning=tuning)
            return out
        with record("sm_90") as launches:
            kernel.launch(*args, workspace, out, tuning=tuning)
        dry.extend(launches)
        return out

    def out(self, top_k: int = TOP_K) -> torch.Tensor:
        return torch.full((self.query.shape[0], top_k), 2**31 - 1, device=DEVICE).int()


def _values(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "integers":
        return torch.randint(-1, 2, shape, device=DEVICE).to(dtype)
    if kind == "smooth":
        # neighbours score alike, as in text: many keys of a good group reach the bound
        rows = shape[0] * shape[1] if len(shape) == 4 else shape[0]
        base = torch.randn(-(-rows // 16), shape[-1], device=DEVICE).repeat_interleave(16, 0)
        if len(shape) == 4:
            noise = torch.randn(rows, shape[-1], device=DEVICE)
            return (0.95 * base[:rows] + 0.31 * noise).view(shape).to(dtype)
    if kind == "sparse":
        return (torch.rand(shape, device=DEVICE) < 0.02).to(dtype)
    values = torch.randn(shape, device=DEVICE)
    if kind == "alike":
        values = values * 1e-3 + 1
    return values.to(dtype)


failures: list[str] = []


def fail(name: str, text: str) -> None:
    failures.append(name)
    print(f"FAIL {name}: {text}"[:600], flush=True)


def check(name: str, case: Case, top_k: int = TOP_K, exact: bool = False, **options) -> None:
    if dry is not None:
        case.launch(case.out(top_k), **options)
        return
    try:
        got = case.launch(case.out(top_k), **options)
        again = case.launch(case.out(top_k), **options)
        torch.cuda.synchronize()
    except Exception as error:
        fail(name, f"{type(error).__name__}: {error}")
        return
    if not torch.equal(got, again):
        fail(name, f"two runs differ in rows {(got != again).any(1).nonzero().flatten()[:8]}")
    want = torch.empty_like(got)
    first = options.get("first")
    args = (case.query, case.caches[0], case.table, case.request_ids, case.visible, first, None)
    reference.select_blocks(*args, 1 << 30, want)
    bad = (got != want).any(1).nonzero().flatten()
    faults = []
    for row in bad[:: max(1, len(bad) // 8)].tolist():
        if exact:
            extra = sorted(set(got[row].tolist()) - set(want[row].tolist()))[:6]
            lost = sorted(set(want[row].tolist()) - set(got[row].tolist()))[:6]
            faults.append(f"row {row} visible {int(case.visible[row])} extra {extra} lost {lost}")
            continue
        request = int(case.request_ids[row])
        one = slice(row, row + 1)
        scores, slack = true_scores(
            case.query[one], case.caches[0], case.table[request], int(case.visible[row])
        )
        start = None if first is None else first[one]
        faults += selection_faults(got[one], scores, slack, case.visible[one], start)
    if faults:
        fail(name, f"{len(bad)} rows differ; " + "; ".join(faults[:2]))


def checks() -> None:
    begun = time.time()
    shapes = [
        ("1row-2k", 1, 1, 2047, 0),
        ("1row-8k", 1, 1, 8191, 0),
        ("3req-33k", 3, 1, 32768, 0),
        ("1row-262k", 1, 1, 262144, 0),
        ("2x4-16k", 2, 4, 16384, 0),
        ("prefill-300-at-2k", 1, 300, 2048, 0),
        ("prefill-200-at-9k", 1, 200, 9001, 0),
        ("prefill-2x70-at-33k", 2, 70, 33333, 0),
        ("prefill-100-at-262k", 1, 100, 262144, 0),
    ]
    for name, batch, rows, blocks, _ in shapes:
        for kind in ("integers", "normal"):
            case = Case(batch, rows, blocks, kind=kind)
            check(f"{name}-{kind}", case, exact=kind == "integers")
            if blocks > 8000 and blocks < 40000 and kind == "integers":
                check(f"{name}-k64", case, 64, True)
                check(f"{name}-k2048", case, 2048, True)
    for kind in ("sparse", "alike"):
        check(f"5req-20k-{kind}", Case(5, 1, 20000, kind=kind), exact=kind == "sparse")
        check(f"prefill-70-20k-{kind}", Case(1, 70, 20000, kind=kind), exact=kind == "sparse")
    for dtype in (torch.float16, torch.float32, torch.float8_e4m3fn):
        for batch, rows in ((3, 1), (1, 130)):
            case = Case(batch, rows, 9000, dtype=dtype, kind="integers")
            check(f"{dtype}-{batch}x{rows}", case, exact=True)
            check(f"{dtype}-{batch}x{rows}-normal", Case(batch, rows, 9000, dtype=dtype))
    case = Case(2, 40, 9000, kind="integers")
    first = torch.randint(0, 9000, (80,), device=DEVICE).int()
    check("first-block", case, exact=True, first=first)
    case.table[0, 3] = -1
    case.table[1, 100:] = 1 << 30
    check("missing-pages", case, exact=True)
    case.caches[0][::3] = float("nan")
    check("nan-pages", case, exact=True)
    case.visible.copy_(torch.randint(-2, 9500, (80,), device=DEVICE))
    case.request_ids[::5] = -1
    case.request_ids[3] = 2
    case.request_ids[60:] = 0
    check("ragged", case, exact=True)
    check("ragged-8MiB", case, exact=True, workspace=8 << 20)
    check("k4096", Case(2, 3, 30000, kind="integers"), 4096, True)
    check("k1", Case(2, 3, 30000, kind="integers"), 1, True)
    check("page-49", Case(2, 20, 5000, kind="integers", page_blocks=49), exact=True)
    check("heads-3-dim-96", Case(2, 20, 5000, kind="integers", heads=3, dim=96), exact=True)
    check("heads-16-dim-64", Case(2, 20, 5000, kind="integers", heads=16, dim=64), exact=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32):
        consistency(dtype)
    for width in (16, 511, 512, 513, 600):
        check(f"short-{width}", Case(3, 1, width, kind="integers"), exact=True)
        check(f"short-prefill-{width}", Case(1, 300, width, kind="integers"), exact=True)
    full_sizes()
    if dry is None:
        print(f"checks: {len(failures)} failures, {time.time() - begun:.0f} s", flush=True)


def full_size(name: str, case: Case, **options) -> None:
    """A whole step on a workspace full of garbage, 24 of its rows against float64."""
    if dry is not None:
        case.launch(case.out(), **options)
        return
    worst = []
    for garbage in (0x41, 0xFF, 0x7F):
        buffer = torch.full((520 << 20,), garbage, dtype=torch.uint8, device=DEVICE)
        got = case.launch(case.out(), **(options | {"workspace": buffer}))
        total = got.shape[0]
        for row in sorted({*range(0, total, max(1, total // 23)), total - 1}):
            one, request = slice(row, row + 1), int(case.request_ids[row])
            scores, slack = true_scores(
                case.query[one], case.caches[0], case.table[request], int(case.visible[row])
            )
            faults = selection_faults(got[one], scores, slack, case.visible[one])
            worst += [f"garbage {garbage:#x} at {row}: {fault}" for fault in faults]
    if worst:
        fail(f"full size {name}", f"{len(worst)} of 72 rows: " + "; ".join(worst[:2]))


def full_sizes() -> None:
    for context in (8192, 32768, 131072):
        case = Case(1, 8192, context // RATIO)
        full_size(f"prefill {context}", case)
        one_warp = {"selector": "triton", "select": {"num_warps": 1}}
        full_size(f"prefill {context} one warp", case, tuning=one_warp)
        case.lengths = torch.tensor([context], device=DEVICE).int()
        full_size(f"prefill {context} with lengths", case)
    case = Case(1, 8192, 8192, page_blocks=196, spread=827904)
    case.lengths = torch.tensor([32768], device=DEVICE).int()
    full_size("prefill 32768 in wide pages", case)
    for batch, rows, context in ((1, 1, 8192), (32, 1, 32768), (128, 1, 8192), (4, 4, 262144)):
        full_size(f"decode {batch}x{rows} {context}", Case(batch, rows, context // RATIO))


def consistency(dtype: torch.dtype) -> None:
    """The same rows through the prefill and decode schedules, alone and moved to other pages."""
    case = Case(1, 192, 20000, dtype=dtype)
    together = case.launch(case.out())
    for query_len in (1, 4):
        split = case.launch(case.out(), tuning={"phases": [Phase(0, 192, True, query_len)]})
        rows = 0 if dry is not None else (split != together).any(1).sum().item()
        if rows:
            fail(f"schedules-{dtype}-{query_len}", f"{rows} of 192 rows differ")
    if dry is not None:
        return
    order = torch.randperm(case.caches[0].shape[0], device=DEVICE)
    moved = torch.empty_like(case.caches[0])
    moved.view(torch.uint8)[order] = case.caches[0].view(torch.uint8)
    table = case.table
    case.table = order[table.long()].int()
    if not torch.equal(case.launch(case.out(), cache=moved), together):
        fail(f"pages-{dtype}", "another page order changes the selection")


def compile_all(options: argparse.Namespace) -> None:
    """Compiles what the run will launch, in forked processes, before CUDA is initialised."""
    global dry, DEVICE, compiling
    begun = time.time()
    dry, DEVICE = [], "meta"
    if not options.skip_checks and options.only != "selectors":
        checks()
    for kind, bench in BENCHES.items():
        if options.only in (None, kind):
            bench(None, [])
    distinct = {launch.specialise(TARGETS["sm_90"]).key: launch for launch in dry}
    compiling = list(distinct.values())
    dry, DEVICE = None, "cuda"
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for error in pool.imap_unordered(_compile, range(len(compiling))):
            if error:
                print("does not compile:", error, flush=True)
    print(f"compiled {len(compiling)} kernels in {time.time() - begun:.0f} s", flush=True)


compiling: list = []


def _compile(index: int) -> str:
    try:
        compiling[index].specialise(TARGETS["sm_90"]).compile()
    except Exception as error:
        return f"{compiling[index].name} {type(error).__name__} {str(error)[-300:]}"
    return ""


def graph_time(calls: list, repeats: int = 15) -> float:
    if dry is not None:
        calls[0]()
        return 1.0
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def _timed(measure) -> float:
    try:
        return measure()
    except Exception as error:
        print("ERR", type(error).__name__, str(error)[:300], flush=True)
        return float("nan")


def bench_decode(peer, table: list[str]) -> None:
    for batch, rows, context, dtype in [
        (batch, 1, context << 10, torch.bfloat16)
        for batch, contexts in {
            1: (8, 32, 128, 256, 1024),
            8: (8, 32, 128),
            32: (8, 32, 128),
            128: (8, 32),
        }.items()
        for context in contexts
    ] + [
        (8, 4, 32768, torch.bfloat16),
        (4, 4, 262144, torch.bfloat16),
        (32, 1, 131072, torch.float8_e4m3fn),
    ]:
        size = batch * context // RATIO * DIM * dtype.itemsize
        layers = max(2, min(8, (200 << 20) // size + 1))
        case = Case(batch, rows, context // RATIO, layers=layers, dtype=dtype)
        out = case.out()
        found = {}
        for name, tuning in decode_variants(case.blocks).items():
            calls = [partial(case.launch, out, cache=c, tuning=tuning) for c in case.caches]
            found[name] = _timed(partial(graph_time, calls))
        theirs = float("nan")
        if peer is not None:
            args = (case.table, case.visible, TOP_K * RATIO, RATIO, rows, out)
            calls = [
                partial(peer.qsa_select_paged_decode, case.query, cache, *args)
                for cache in case.caches
            ]
            theirs = _timed(partial(graph_time, calls))
        table.append(
            _row(
                f"decode {batch}x{rows} {context >> 10}K {dtype.itemsize * 8}b",
                found,
                theirs,
                size / 4.27e6,
            )
        )
        if dry is None:
            print(table[-1], flush=True)


def bench_prefill(peer, table: list[str]) -> None:
    for rows, context, dtype in (
        (8192, 8192, torch.bfloat16),
        (8192, 32768, torch.bfloat16),
        (8192, 131072, torch.bfloat16),
        (8192, 262144, torch.bfloat16),
        (2048, 1048576, torch.bfloat16),
        (8192, 131072, torch.float8_e4m3fn),
    ):
        case = Case(1, rows, context // RATIO, dtype=dtype)
        out = case.out()
        found = {}
        for name, (tuning, workspace) in prefill_variants(case.blocks).items():
            # captured, so that the host's launches are not what is measured
            call = partial(case.launch, out, tuning=tuning, workspace=workspace)
            found[name] = _timed(partial(graph_time, [call], 7))
            if name == "default":
                found["score eager"] = _timed(partial(median, call))
        theirs = float("nan")
        if peer is not None:
            start = torch.tensor([0, rows], device=DEVICE).int()
            args = (case.table, start, case.visible, TOP_K * RATIO, RATIO, rows, out, context)
            stock = partial(peer.qsa_select_paged_prefill, case.query, case.caches[0], *args)
            theirs = _timed(partial(median, stock))
        visible = 0.0 if dry is not None else float(case.visible.float().sum())
        floor = visible * HEADS * DIM * 2 / 790e6
        table.append(
            _row(f"prefill {rows} at {context >> 10}K {dtype.itemsize * 8}b", found, theirs, floor)
        )
        if dry is None:
            print(table[-1], flush=True)


def cuda_variants(few: bool, blocks: int) -> dict[str, dict]:
    """Tunings of the selector in CUDA C++ beside its default."""
    limit = tiles.MAX_GROUP if few else tiles.DENSE_MAX_GROUP
    base = tiles.choose_cuda_select(1 if few else 8192, blocks, TOP_K, TARGETS["sm_90"], limit)
    shapes = ((512, 1), (1024, 1)) if few else ((64, 12), (128, 8), (256, 4))
    found = {}
    for threads, count in shapes:
        select = {"threads": threads, "blocks": count}
        select["units"] = max(base.units, 4 * threads)
        if select["units"] <= 32 * threads and select != {
            name: getattr(base, name) for name in select
        }:
            found[f"t{threads}"] = select
    return found


def bench_selectors(peer, table: list[str]) -> None:
    """The scorer alone, the selection alone and both, with each selector."""
    del peer
    for batch, rows, blocks, kind in (
        (1, 1, 2048, "normal"), (1, 1, 8192, "normal"), (1, 1, 32768, "normal"),
        (1, 1, 32768, "smooth"), (1, 1, 65536, "normal"), (1, 1, 262144, "normal"),
        (32, 1, 32768, "normal"), (128, 1, 8192, "normal"), (4, 4, 65536, "normal"),
        (1, 8192, 2048, "normal"), (1, 8192, 8192, "normal"), (1, 8192, 8192, "smooth"),
        (1, 8192, 32768, "normal"), (1, 8192, 65536, "normal"),
    ):  # fmt: skip
        _compare_selectors(batch, rows, blocks, kind, table)
    for kind in ("integers", "sparse", "alike"):
        for batch, rows, blocks in (
            (3, 1, 2047), (3, 1, 8000), (3, 1, 32768), (1, 300, 2048), (1, 300, 33333),
        ):  # fmt: skip
            _gate(f"{kind} {batch}x{rows} {blocks}", Case(batch, rows, blocks, kind=kind), kind)
    if dry is None:
        print("selectors:", failures or "no failures", flush=True)


def _gate(name: str, case: Case, kind: str, tunings: tuple[dict, ...] = ({},), **options) -> None:
    """Every tuning gives the Triton selector's ids; exact scores give the specification's."""
    want = case.launch(case.out(), tuning={"selector": "triton"}, **options)
    for tuning in tunings:
        try:
            got = case.launch(case.out(), tuning={"selector": "cuda"} | tuning, **options)
        except Exception as error:
            fail(name, f"{tuning}: {type(error).__name__} {error}")
            continue
        if dry is None and not torch.equal(got, want):
            bad = (got != want).any(1).nonzero().flatten()
            fail(name, f"{tuning}: {len(bad)} rows differ, first {bad[:4].tolist()}")
    if dry is None and kind in ("integers", "sparse"):
        check(name, case, exact=True, tuning={"selector": "cuda"})


def _compare_selectors(batch: int, rows: int, blocks: int, kind: str, table: list[str]) -> None:
    few = batch * rows <= 256
    size = batch * blocks * DIM * 2
    case = Case(
        batch, rows, blocks, kind=kind, layers=max(2, (200 << 20) // size + 1) if few else 1
    )
    out = case.out()
    bytes_needed = 512 << 20 if few else 5 * 8192 * blocks + (256 << 20)
    space = torch.empty(bytes_needed, dtype=torch.uint8, device=DEVICE)
    variants = cuda_variants(few, blocks) if kind == "normal" else {}
    tunings = {"triton": {"selector": "triton"}, "cuda": {"selector": "cuda"}}
    tunings |= {name: {"selector": "cuda", "select": select} for name, select in variants.items()}
    _gate(f"{batch}x{rows} {blocks}", case, kind, tuple(tunings.values()), workspace=space)
    found = {}

    def timed(parts, tuning, caches):
        tuning = tuning | {"parts": parts}
        calls = [
            partial(case.launch, out, cache=cache, tuning=tuning, workspace=space)
            for cache in caches
        ]
        return _timed(partial(graph_time, calls, 11 if few else 5))

    for name, tuning in tunings.items():
        if name in ("triton", "cuda"):
            found[f"all {name}"] = timed(("score", "select"), tuning, case.caches)
            found[f"score {name}"] = timed(("score",), tuning, case.caches)
        else:
            case.launch(out, tuning=tuning, workspace=space)
        alone = tuning | {"pdl": False}
        found[name] = timed(("select",), alone, case.caches[:1] * (16 if few else 1))
    cells = " ".join(f"{name} {value:.1f}" for name, value in found.items())
    table.append(f"select {batch}x{rows} {blocks} {kind} | {cells}")
    if dry is None:
        print(table[-1], flush=True)


BENCHES = {"prefill": bench_prefill, "decode": bench_decode, "selectors": bench_selectors}


def median(call) -> float:
    if dry is not None:
        call()
        return 1.0
    return do_bench(call, warmup=5, rep=40, return_mode="median") * 1e3


def _row(name: str, found: dict[str, float], theirs: float, floor: float) -> str:
    whole = [t for label, t in found.items() if not label.startswith("score")]
    best = min((t for t in whole if t == t), default=float("nan"))
    cells = " ".join(f"{label} {value:.1f}" for label, value in found.items())
    return f"{name} | vllm {theirs:.1f} floor {floor:.1f} ratio {theirs / best:.2f} | {cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default=None)
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--only", choices=(*BENCHES, "checks"), default=None)
    options = parser.parse_args()
    compile_all(options)
    if not options.skip_checks and options.only != "selectors":
        checks()
    peer = None
    if options.peers:
        sys.path.insert(0, options.peers)
        try:
            import bench_vllm

            peer = bench_vllm.qi
        except Exception as error:
            print("no peer:", type(error).__name__, str(error)[:300])
    table: list[str] = []
    for kind, bench in BENCHES.items():
        if options.only in (None, kind):
            try:
                bench(peer, table)
            except Exception as error:
                print("ERR", kind, type(error).__name__, str(error)[:500])
    print("failures:", failures)
    print("\n".join(table))


if __name__ == "__main__":
    main()
