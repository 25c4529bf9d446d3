"""Checks, then times, prepare on one GPU against its byte floor.

    python benchmarks/kernels/bench_prepare.py [--peers DIR] [--sweep]

The check: query, index query, keys and compressed keys against float64 under a derived bound on
sampled rows; gates, values and ring rows bit for bit; the same bits twice; nothing else written.
A failed check is printed and the exit status says so. Times are medians in microseconds of graph
replays over several buffers, more bytes than the L2 cache holds. With --peers, vLLM's fused kernel
from that bundle runs between ours on the same inputs. --sweep adds other tile choices.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import statistics
import sys
import time

import torch

from flash_qsa.config import RopeConfig
from flash_qsa.launches import record
from flash_qsa.ops.compress_keys.ring_rows import position_offset, ring_width
from flash_qsa.ops.fp8 import from_storage, to_storage
from flash_qsa.ops.prepare import kernel
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.prepare.tiles import Tiles
from flash_qsa.ops.rotary import RopeTable, canonical_positions
from flash_qsa.targets import TARGETS, device_target
from flash_qsa.testing.compare import within_bound
from flash_qsa.testing.inputs import REAL, Shape, make_plan
from flash_qsa.testing.measure.timing import interleaved
from flash_qsa.testing.measure.vllm_peer import prepare_call
from flash_qsa.testing.prepared import assert_prepared, heads_truth, on_cpu
from flash_qsa.testing.steps import StepProblem, make_step, plan_to

FLOOR_BYTES_PER_US = 4.27e6
ROTATE_BYTES = 400 << 20
REPEATS = 15
ROPE = RopeConfig(theta=1e7, rotary_dim=64, max_positions=32_768, mrope_section=(11, 11, 10))
CASES = {8192: (1, 8192), 1024: (1, 1024), 128: (128, 1), 1: (1, 1), 16384: (1, 16384)}
"""rows: (requests, rows of each)."""
CHECKED = {1: (1, 1), 37: (37, 1), 300: (3, 100), 8192: (1, 8192)}
KINDS = ((True, False), (False, False), (True, True))
"""mRoPE or text, FP8 caches or not."""
SWEEP = {
    "q4 w1": Tiles(4, 2, 4, 1),
    "q2 w1": Tiles(2, 2, 4, 1),
    "q1 w1": Tiles(1, 1, 2, 1),
    "q8 w1": Tiles(8, 2, 4, 1),
    "q8 w2": Tiles(8, 2, 4, 2),
    "q4 w2": Tiles(4, 2, 4, 2),
    "q8 w4": Tiles(8, 2, 4, 4),
}


def make(requests: int, rows: int, device: str, mrope: bool, fp8: bool = False) -> StepProblem:
    """A step of real head shapes; 40 tokens precede a request's rows, so that groups straddle."""
    shape, before = REAL, 41
    length = before + rows
    pages = -(-length // shape.page_size)
    real = device != "meta"
    order = torch.randperm(requests * pages).int().view(requests, pages)
    plan = make_plan([rows] * requests, [length] * requests, order, shape)
    total = requests * rows

    def draw(*sizes: int) -> torch.Tensor:
        make = torch.randn if real else torch.empty
        return make(*sizes, device=device, dtype=torch.bfloat16)

    main_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    width = ring_width(shape.index_dim, torch.bfloat16, True)
    ring = draw(requests, shape.ring_capacity, 1, width)
    if real:
        at = position_offset(shape.index_dim, ring.dtype)
        ring[..., at:].view(torch.int64).fill_(before // 4 * 4)
    token = (before + torch.arange(rows)).repeat(requests)
    positions = torch.stack((token, token - 3, token - 5)) if mrope else token
    main = torch.full(
        (requests * pages, shape.kv_heads, shape.page_size, 2 * shape.head_dim), 0.5, device=device
    )
    keys = torch.full(
        (requests * pages, shape.page_size // shape.ratio, 1, shape.index_dim), 0.5, device=device
    )
    return StepProblem(
        shape,
        draw(total, 2 * (shape.heads + shape.kv_heads) * shape.head_dim),
        draw(total, (shape.index_heads + 1) * shape.index_dim),
        positions.to(device),
        rope_table(device),
        Norms(
            *(draw(dim) * 0.3 for dim in (shape.index_dim,) * 2 + (shape.head_dim,) * 2), eps=1e-6
        ),
        Caches(main.to(main_dtype), keys.to(main_dtype), ring),
        plan_to(plan, device),
        [],
    )


@functools.cache
def rope_table(device: str) -> RopeTable:
    return RopeTable.from_config(ROPE, torch.bfloat16, device)


def outputs(problem: StepProblem) -> Prepared:
    shape, rows = problem.shape, problem.plan.num_rows
    main = problem.qkv.new_empty(rows, shape.heads, shape.head_dim)
    index = torch.empty(
        rows,
        shape.index_heads,
        shape.index_dim,
        dtype=problem.caches.compressed.dtype,
        device=main.device,
    )
    return Prepared(main, torch.empty_like(main), index)


def launch(problem: StepProblem, out: Prepared, tiles: Tiles | None = None) -> None:
    fp8 = problem.caches.main.dtype == torch.float8_e4m3fn
    kernel.launch(
        problem.qkv,
        problem.index_qk,
        canonical_positions(problem.positions),
        problem.rope,
        problem.norms,
        problem.caches,
        problem.plan,
        0.5 if fp8 else None,
        0.25 if fp8 else None,
        out,
        tiles,
    )


def check(problem: StepProblem) -> list[str]:
    """Everything wrong with a launch; empty when nothing is."""
    faults, plan, shape = [], problem.plan, problem.shape
    out, first = outputs(problem), problem.clone_caches()
    launch(problem, out)
    torch.cuda.synchronize()
    main, compressed, ring = problem.caches
    rows = torch.unique(torch.linspace(0, plan.num_rows - 1, 64).long()).to(main.device)
    at = canonical_positions(problem.positions)[rows]
    qkv, index = problem.qkv[rows], problem.index_qk[rows]
    width = shape.heads * 2 * shape.head_dim
    query, gate = qkv[:, :width].unflatten(1, (shape.heads, -1)).chunk(2, -1)
    key, value = qkv[:, width:].unflatten(1, (2, shape.kv_heads, -1)).unbind(1)
    index_query = index[:, : -shape.index_dim].unflatten(1, (shape.index_heads, -1))
    cells = plan.main_slots[rows]
    stored = main[cells // shape.page_size, :, cells % shape.page_size]
    stored_key, stored_value = from_storage(stored).chunk(2, -1)
    for name, got, x, weight in (
        ("query", out.query[rows], query, problem.norms.query),
        (
            "index query",
            from_storage(out.index_query)[rows],
            index_query,
            problem.norms.index_query,
        ),
        ("key", stored_key, key, problem.norms.key),
    ):
        truth = heads_truth(x, weight, problem.norms.eps, problem.rope, at)
        bound = truth.bound
        if main.dtype == torch.float8_e4m3fn and name != "query":
            unit = 0.5 if name == "key" else 1.0
            got = got * unit
            bound = bound + truth.out.abs() / 15 + unit * 2.0**-9
        seen = within_bound(got, truth.out, bound)
        if not seen.ok:
            faults.append(f"{name}: {seen.worst_ratio:.2f} times its bound at {seen.where}")
    if not torch.equal(out.gate[rows], gate):
        faults.append("gate: bits differ")
    if main.dtype == torch.bfloat16 and not torch.equal(stored_value.bfloat16(), value):
        faults.append("value: bits differ")
    again = outputs(problem)
    again_problem = StepProblem(**{**problem.__dict__, "caches": first})
    launch(again_problem, again)
    for name, one, two in zip(["query", "gate", "index"], out, again):
        if not torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
            faults.append(f"{name}: two runs differ")
    for name, one, two in zip(["main", "compressed", "ring"], problem.caches, first):
        if not torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
            faults.append(f"{name} cache: two runs differ")
    return faults


SMALL = Shape(heads=6, kv_heads=2, head_dim=48, index_heads=3, index_dim=32, page_size=16)
SMALL_ROPE = RopeConfig(rotary_dim=16, max_positions=4096, mrope_section=(3, 3, 2))
SMALL_KINDS = (
    (torch.bfloat16, False),
    (torch.bfloat16, True),
    (torch.float16, True),
    (torch.float32, False),
)


def small_step(dtype: torch.dtype, fp8: bool, device: str) -> tuple[StepProblem, dict]:
    """A hostile step of mixed lengths with padding, and the options to run it with."""
    problem = make_step(
        [9, 7, 30, 4, 12, 80],
        [1, 2, 17, 4, 12, 75],
        SMALL,
        dtype=dtype,
        main_dtype=torch.uint8 if fp8 else None,
        index_dtype=torch.uint8 if fp8 else None,
        rope=SMALL_ROPE,
        position_form="3d",
        ring_positions=True,
        padding=3,
        device=device,
    )
    return problem, {"k_scale": 0.5, "v_scale": 0.25} if fp8 else {}


def check_small() -> list[str]:
    """Small hostile steps: float64 bounds and untouched memory; FP8 as the rounded float caches."""
    faults = []
    for dtype, fp8 in SMALL_KINDS:
        problem, scales = small_step(dtype, fp8, "cuda")
        caches, before = problem.clone_caches(), problem.clone_caches()
        out = problem.run(caches, backend="triton", **scales)
        try:
            if not fp8:
                assert_prepared(*on_cpu(problem, out, caches, before))
                continue
            wide, _ = small_step(dtype, False, "cuda")
            wide_caches = wide.clone_caches()
            wide_out = wide.run(wide_caches, backend="triton")
            dim, real = SMALL.head_dim, problem.plan.num_tokens
            for name, stored, float_values, scale in (
                ("keys", caches.main[..., :dim], wide_caches.main[..., :dim], 0.5),
                ("values", caches.main[..., dim:], wide_caches.main[..., dim:], 0.25),
                ("compressed", caches.compressed, wide_caches.compressed, 1.0),
                ("index query", out.index_query[:real], wide_out.index_query[:real], 1.0),
            ):
                want = to_storage(float_values.cpu(), torch.uint8, scale)
                # each binary sums squares in its own order: now and then a code is the next one
                apart = (stored.cpu().int() - want.int()).abs()[float_values.cpu().isfinite()]
                limit, share = (0, 0.0) if name == "values" else (1, 0.01)
                assert apart.max() <= limit, f"{name}: bytes differ by {apart.max()}"
                assert (apart > 0).double().mean() <= share, f"{name}: many bytes differ"
        except AssertionError as fault:
            faults.append(f"{str(dtype)[6:]}{' fp8' if fp8 else ''}: {fault}")
    return faults


def host_time(problem: StepProblem) -> float:
    """Median microseconds that a call of the op keeps the host busy."""
    out, times = outputs(problem), []
    for _ in range(60):
        start = time.perf_counter()
        problem.run(backend="triton", out=out)
        times.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def step_bytes(problem: StepProblem) -> int:
    """Bytes that a step must move: projections in, outputs and caches out, positions and plan."""
    rows, shape = problem.plan.num_rows, problem.shape
    cell = shape.kv_heads * 2 * shape.head_dim * problem.caches.main.element_size()
    key = shape.index_dim * problem.caches.compressed.element_size()
    read = 2 * (problem.qkv.shape[1] + problem.index_qk.shape[1]) + 24 + 32
    written = 2 * 2 * shape.heads * shape.head_dim + cell + shape.index_heads * key
    return rows * (read + written) + rows // shape.ratio * key


def compile_one(job: tuple) -> None:
    """Compiles one variant into Triton's disk cache, in a process of its own."""
    target, kind, *rest = job
    with record(TARGETS.get(target, TARGETS["sm_90"])) as launches:
        if kind == "small":
            problem, scales = small_step(*rest, "meta")
            problem.run(backend="triton", **scales)
        else:
            mrope, fp8, rows, tiles = rest
            problem = make(1, rows, "meta", mrope, fp8)
            launch(problem, outputs(problem), tiles)
    launches[0].specialise(TARGETS.get(target, TARGETS["sm_90"])).compile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", help="bundle of vLLM's ops to time beside ours")
    parser.add_argument("--sweep", action="store_true", help="time other tile choices too")
    options = parser.parse_args()
    began = time.time()
    variants: dict[str, Tiles | None] = {"ours": None, **(SWEEP if options.sweep else {})}
    target = device_target(torch.device("cuda")).name
    jobs = [(target, "small", *kind) for kind in SMALL_KINDS]
    jobs += [(target, "real", True, False, 256, tiles) for tiles in variants.values() if tiles]
    for mrope, fp8 in KINDS:
        jobs.append((target, "real", mrope, fp8, 256, None))
    with concurrent.futures.ProcessPoolExecutor(
        14, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        list(pool.map(compile_one, jobs))
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    faults = [f"small: {fault}" for fault in check_small()]
    for rows, (requests, each) in CHECKED.items():
        for mrope, fp8 in KINDS[: 3 if rows == 300 else 1]:
            name = f"{rows} rows, {'mrope' if mrope else 'text'}{', fp8' if fp8 else ''}"
            found = check(make(requests, each, "cuda", mrope, fp8))
            faults += [f"{name}: {fault}" for fault in found]
    print(f"checked after {time.time() - began:.0f} s", flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for fault in faults:
        print("FAULT", fault)
    print("correct" if not faults else f"{len(faults)} faults")
    print(f"host: {host_time(make(1, 256, 'cuda', True)):.0f} µs a call, checks included")
    print(f"{'rows':>6} {'which':<13} {'µs':>8} {'floor':>8} {'ratio':>6}")
    if options.peers:
        sys.path.insert(0, options.peers)
    for rows, (requests, each) in CASES.items():
        problem = make(requests, each, "cuda", True)
        copies = max(2, min(12, -(-ROTATE_BYTES // step_bytes(problem))))
        problems = [problem] + [make(requests, each, "cuda", True) for _ in range(copies - 1)]
        held = [outputs(one) for one in problems]
        calls = {
            name: [
                lambda p=p, o=o, tiles=tiles: launch(p, o, tiles) for p, o in zip(problems, held)
            ]
            for name, tiles in variants.items()
        }
        text = [
            StepProblem(**{**p.__dict__, "positions": p.positions[0].contiguous()})
            for p in problems
        ]
        level = [
            StepProblem(**{**p.__dict__, "positions": p.positions[:1].repeat(3, 1)})
            for p in problems
        ]
        calls["ours, 3 equal"] = [lambda p=p, o=o: launch(p, o) for p, o in zip(level, held)]
        calls["ours, text"] = [lambda p=p, o=o: launch(p, o) for p, o in zip(text, held)]
        if options.peers:
            calls["vLLM"] = [prepare_call(p) for p in problems]
        floor = step_bytes(problem) / FLOOR_BYTES_PER_US
        device = torch.device("cuda")
        for name, times in interleaved(calls, device, REPEATS, graph=True).items():
            micros, ratio = times.median_us, times.median_us / floor
            print(f"{rows:>6} {name:<13} {micros:>8.1f} {floor:>8.1f} {ratio:>6.2f}", flush=True)
        del problems, problem, held, calls, text, level
        torch.cuda.empty_cache()
    print(f"done after {time.time() - began:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
