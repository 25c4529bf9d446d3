"""Checks, then times, every schedule of sparse_attention on one GPU.

    python benchmarks/kernels/bench_attention.py [--peers DIR] [--only check,decode,verify,prefill]

A schedule that fails its check (float64 on sampled rows, NaN in memory that nobody selected, the
same bits twice) is listed as failed and its times are marked. With --peers, vLLM's kernel from that
bundle is timed between ours, on the same selections. Times are medians in microseconds; decode is
timed by graph replay over more selected bytes than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import statistics
import sys
import time
from unittest import mock

import torch

from flash_qsa.ops.sparse_attention import kernel, launch_union
from flash_qsa.ops.sparse_attention.kernel import Tuning
from flash_qsa.testing.compare import attention_truth, within_bound

HEADS, KV_HEADS, DIM, RATIO, TOP_K, PAGE = 24, 2, 256, 4, 512, 64
FLOOR_BYTES_PER_US = 4.27e6

PREFILL = {
    "default": Tuning(),
    "3 splits": Tuning(hopper={"splits": 3}),
    "portable": Tuning(hopper=False),
    "rows": Tuning(share=False),
}
DECODE = {
    "default": Tuning(),
    "n16 s5": Tuning(rows={"num_stages": 5, "block_n": 16}),
    "n32 s5": Tuning(rows={"num_stages": 5}),
    "n32 w2": Tuning(rows={"num_warps": 2}),
    "x2 n32 w2": Tuning(split_factor=2.0, rows={"num_warps": 2}),
    "x2 n32 w1": Tuning(split_factor=2.0, rows={"num_warps": 1}),
    "x2 n16 w1": Tuning(split_factor=2.0, rows={"num_warps": 1, "block_n": 16, "num_stages": 5}),
    "x.5 n32 s5": Tuning(split_factor=0.5, rows={"num_stages": 5}),
}
VERIFY = {
    "default": Tuning(),
    "portable": Tuning(hopper=False),
    "rows": Tuning(share=False),
}


def blocks_of(scores: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """The best visible blocks of each row, ascending, then -1; int32 [T, K]."""
    count = scores.shape[1]
    ids = torch.arange(count, device=scores.device)
    scores = scores.masked_fill(ids >= visible[:, None], -torch.inf)
    best = scores.topk(min(top_k, count), dim=1)
    chosen = torch.where(best.values > -torch.inf, best.indices, count).sort(1).values.int()
    out = torch.full((scores.shape[0], top_k), -1, dtype=torch.int32, device=scores.device)
    out[:, : chosen.shape[1]] = torch.where(chosen < count, chosen, -1)
    return out


def correlated_selection(
    positions: torch.Tensor, correlation: float, top_k: int = TOP_K, seed: int = 0
) -> torch.Tensor:
    """Top-k of random index keys under index queries that follow an AR(1) process by row."""
    device = positions.device
    generator = torch.Generator(device).manual_seed(seed)
    rows, blocks = positions.numel(), int(positions.max() + 1) // RATIO
    query = torch.randn(rows, 4 * 128, generator=generator, device=device)
    if correlation > 0:
        lag = torch.arange(rows, device=device)
        lag = lag[:, None] - lag[None, :]
        weights = torch.where(lag >= 0, correlation ** lag.clamp(0, 4000).float(), 0.0)
        weights[:, 1:] *= (1 - correlation**2) ** 0.5
        query = weights @ query
    keys = torch.randn(max(blocks, 1), 128, generator=generator, device=device).bfloat16()
    query = query.bfloat16().view(rows, 4, 128)
    visible = (positions + 1) // RATIO
    parts = []
    for start in range(0, rows, 1024):
        scores = (query[start : start + 1024] @ keys.t()).float().relu_().sum(1)
        parts.append(blocks_of(scores, visible[start : start + 1024], top_k))
    return torch.cat(parts)


class Batch:
    """Equal requests of `context` tokens, each with `rows` new rows, and a cache for them."""

    def __init__(self, batch, rows, context, correlation, *, seed=0, device="cuda", heads=HEADS):
        self.batch, self.rows, self.context = batch, rows, context
        pages = -(-context // PAGE)
        total = batch * rows
        make = {"device": device, "dtype": torch.bfloat16}
        self.query = torch.empty(total, heads, DIM, **make)
        self.gate, self.out = torch.empty_like(self.query), torch.empty_like(self.query)
        self.cache = torch.empty(batch * pages + 1, KV_HEADS, PAGE, 2 * DIM, **make)
        positions = context - rows + torch.arange(rows, device=device)
        self.positions = positions.repeat(batch)
        self.requests = torch.arange(batch, device=device, dtype=torch.int32)
        self.requests = self.requests.repeat_interleave(rows)
        if device == "meta":
            self.table = torch.empty(batch, pages, dtype=torch.int32, device=device)
            self.ids = torch.empty(total, TOP_K, dtype=torch.int32, device=device)
            self.lse = torch.empty(total, heads, device=device)
            return
        self.lse = torch.empty(total, heads, device=device)
        torch.manual_seed(seed)
        for tensor in (self.query, self.gate, self.cache):
            tensor.normal_()
        order = torch.randperm(batch * pages, device=device).int()
        self.table = order.view(batch, pages)
        if rows == 1 and correlation == 0:
            scores = torch.rand(batch, context // RATIO, device=device)
            self.ids = blocks_of(scores, (self.positions + 1) // RATIO, TOP_K)
        else:
            self.ids = torch.cat(
                [correlated_selection(positions, correlation, seed=seed + r) for r in range(batch)]
            )

    def arguments(self, out=None, lse=None, gate=True):
        keys, values = self.cache.chunk(2, -1)
        return (
            self.query, keys, values, self.ids, self.positions, self.table, self.requests, RATIO,
            DIM**-0.5, self.gate if gate else None, None, None, None, None, None, False,
            self.out if out is None else out, self.lse if lse is None else lse,
        )  # fmt: skip

    def union(self, rows: int) -> float:
        """Mean union of `rows` neighbours over one row's selection."""
        some = self.ids[: self.ids.shape[0] // rows * rows].view(-1, rows * TOP_K)[::37]
        sizes = [torch.unique(row[row >= 0]).numel() for row in some]
        return sum(sizes) / max((some >= 0).sum().item() / rows, 1)


def compile_variant(batch: int, rows: int, context: int, heads: int, tuning: Tuning) -> str:
    """Fills Triton's disk cache for one variant, in a process of its own; an error's text."""
    from flash_qsa.launches import record
    from flash_qsa.targets import Target

    problem = Batch(batch, rows, context, 0.0, device="meta", heads=heads)
    props = torch.cuda.get_device_properties(0)
    target = Target(
        f"sm_{props.major}{props.minor}", "cuda", (props.major, props.minor),
        props.shared_memory_per_block_optin, props.multi_processor_count,
    )  # fmt: skip
    try:
        with record(target) as launches:
            kernel.launch(*problem.arguments(), tuning=tuning)
        for launch in launches:
            launch.specialise(target).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-200:]}"
    return ""


class Check:
    """A problem with its float64 answer for some rows, and NaN wherever no row attends."""

    def __init__(self, problem: Batch, sample: int = 12):
        self.problem = problem
        device = problem.ids.device
        clean = problem.cache.clone()
        step = torch.arange(RATIO, device=device)
        tail = (problem.positions + 1) // RATIO * RATIO
        tokens = torch.cat((problem.ids * RATIO, tail.int()[:, None]), 1).long()
        live = torch.cat((problem.ids >= 0, torch.ones_like(tail[:, None], dtype=torch.bool)), 1)
        tokens = (tokens[:, :, None] + step).flatten(1)
        live = live.repeat_interleave(RATIO, 1) & (tokens <= problem.positions[:, None])
        tokens = tokens.where(live, 0)
        pages = problem.table.long()[problem.requests.long()[:, None], tokens // PAGE]
        used = torch.zeros(problem.cache.shape[0], PAGE, dtype=torch.bool, device=device)
        used[pages[live], tokens[live] % PAGE] = True
        problem.cache.masked_fill_(~used[:, None, :, None], float("nan"))
        rows = problem.ids.shape[0]
        self.pick = torch.linspace(0, rows - 1, min(sample, rows)).long().unique().tolist()
        cells = [torch.stack((pages[r][live[r]], tokens[r][live[r]] % PAGE), -1) for r in self.pick]
        keys, values = clean.chunk(2, -1)
        self.truth = attention_truth(
            problem.query[self.pick], keys, values, cells, cells, DIM**-0.5,
            problem.gate[self.pick],
        )  # fmt: skip

    def fault(self, tuning: Tuning) -> str:
        """What is wrong with a schedule's answer, or nothing."""
        outs = []
        for _ in range(2):
            out = torch.full_like(self.problem.query, 12345.0)
            lse = torch.full(self.problem.query.shape[:2], 12345.0, device=out.device)
            kernel.launch(*self.problem.arguments(out, lse), tuning=tuning)
            outs.append((out, lse))
        (out, lse), (again, lse_again) = outs
        if not torch.isfinite(out).all():
            bad = (~torch.isfinite(out)).any(-1).any(-1).nonzero().flatten().tolist()
            return f"not finite in rows {bad[:8]} ({len(bad)})"
        if not (torch.equal(out, again) and torch.equal(lse, lse_again)):
            return "two runs differ"
        seen = within_bound(out[self.pick], self.truth.out, self.truth.bound)
        if not seen.ok:
            return f"{seen.worst_ratio:.2f} of its bound at {seen.where} (max {seen.max_error:.2e})"
        seen = within_bound(lse[self.pick], self.truth.lse, self.truth.lse_bound)
        return "" if seen.ok else f"lse {seen.worst_ratio:.2f} of its bound at {seen.where}"


def graph_time(calls, repeats: int = 12) -> float:
    """Microseconds a call when all calls replay in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for index in range(repeats + 3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def interleaved(calls: dict, repeats: int = 9) -> dict:
    """Median microseconds of each call, run in turns."""
    times = {name: [] for name in calls}
    for index in range(repeats + 2):
        for name, call in calls.items():
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            torch.cuda._sleep(2_000_000)  # the host gets ahead: launches are not in the time
            start.record()
            call()
            end.record()
            end.synchronize()
            if index >= 2:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def vllm_call(problem: Batch, peers, cache=None, ids=None):
    """vLLM's attention on the same selection, already expanded to its packed form."""
    qsa, indexer = peers
    ids = problem.ids if ids is None else ids
    visible = ((problem.positions + 1) // RATIO).int()
    packed = torch.empty(ids.shape[0], TOP_K * RATIO + RATIO, dtype=torch.int32, device="cuda")
    indexer.expand_qsa_block_indices(ids, problem.positions, visible, RATIO, TOP_K * RATIO, packed)
    keys, values = (problem.cache if cache is None else cache).transpose(1, 2).split(DIM, -1)
    out = torch.empty_like(problem.query)
    return lambda: qsa.qsa_sparse_paged_attention(
        problem.query, keys, values, packed, problem.table, problem.requests, problem.rows > 8,
        out, output_gate=problem.gate,
    )  # fmt: skip


class Skipped:
    """Stands for a kernel that is not launched."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def time_prefill(context, correlation, variants, peers, heads=HEADS) -> tuple[str, dict]:
    problem = Batch(1, 8192, context, correlation, heads=heads)
    calls = {}
    for name, tuning in variants.items():
        calls[name] = lambda t=tuning: kernel.launch(*problem.arguments(), tuning=t)
    if peers:
        calls["vllm"] = vllm_call(problem, peers)

    def lists_only(tuning):
        nothing = Skipped()
        with (
            mock.patch.object(launch_union, "union_kernel", nothing),
            mock.patch.object(launch_union, "_launch_hopper", lambda *a: None),
        ):
            kernel.launch(*problem.arguments(), tuning=tuning)

    calls["lists default"] = lambda: lists_only(Tuning())
    times = interleaved(calls, 7)
    label = f"{context // 1024}K .{round(correlation * 100):02d}"
    label += f" U5 {problem.union(5):.2f} U10 {problem.union(10):.2f}"
    return label, times


def time_decode(batch, rows, context, correlation, variants, peers) -> tuple[str, dict]:
    first = Batch(batch, rows, context, correlation)
    bytes_a_call = batch * rows * TOP_K * RATIO * KV_HEADS * 2 * DIM * 2
    layers = max(2, min(28, -(-int(120e6) // bytes_a_call)))
    caches = [first.cache]
    while len(caches) < min(layers, 4) and len(caches) * first.cache.nbytes < 16e9:
        caches.append(torch.randn_like(first.cache))
    selections = [first.ids]
    for seed in range(1, layers):
        if rows == 1:
            scores = torch.rand(batch, context // RATIO, device="cuda")
            selections.append(blocks_of(scores, (first.positions + 1) // RATIO, TOP_K))
        else:
            shift = torch.where(
                first.ids >= 0, (first.ids + 4099 * seed) % (context // RATIO - 8), -1
            )
            selections.append(shift.sort(1).values.contiguous())
    times = {}

    def call(index, tuning):
        keys, values = caches[index % len(caches)].chunk(2, -1)
        args = list(first.arguments())
        args[1:4] = keys, values, selections[index]
        kernel.launch(*args, tuning=tuning)

    runs = {
        name: [lambda i=i, t=tuning: call(i, t) for i in range(layers)]
        for name, tuning in variants.items()
    }
    if peers:
        runs["vllm"] = [
            vllm_call(first, peers, caches[i % len(caches)], selections[i]) for i in range(layers)
        ]
    for name, calls in runs.items():
        times[name] = graph_time(calls)
    times["floor"] = bytes_a_call / FLOOR_BYTES_PER_US
    return f"{batch}x{rows} {context // 1024}K", times


def load_peers(folder):
    if not folder:
        return None
    sys.path.insert(0, folder)
    from vllm.models.qwen4_exp.nvidia.ops import qsa, qsa_indexer

    return qsa, qsa_indexer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="folder of the vLLM bundle")
    parser.add_argument("--only", default="check,decode,prefill,verify")
    parser.add_argument("--check-too", default="", help="families to check without timing them")
    parser.add_argument("--deep", action="store_true", help="prefill at 256K too")
    options = parser.parse_args()
    only = options.only.split(",")
    began = time.time()
    props = torch.cuda.get_device_properties(0)
    print(props.name, "torch", torch.__version__, flush=True)

    # Sizes in one class of the JIT's specialisation, so that checks and times share binaries.
    families = {"decode": DECODE, "prefill": PREFILL, "verify": VERIFY}
    shapes = {
        "decode": [(1, 1, 20477), (8, 1, 20477), (32, 1, 4093), (128, 1, 20477)],
        "prefill": [(1, 8192, 20477)],
        "verify": [(8, 4, 20477), (32, 4, 20477)],
    }
    checks = {
        "decode": [(1, 1, 20477, 0.0), (8, 1, 20477, 0.0), (32, 1, 4093, 0.0)],
        "prefill": [(1, 304, 20477, 0.97), (1, 1403, 1403, 0.9), (1, 96, 9213, 0.0)],
        "verify": [(8, 4, 20477, 0.97), (32, 4, 20477, 0.5)],
    }
    wanted = only + options.check_too.split(",")
    families = {name: variants for name, variants in families.items() if name in wanted}
    jobs, failed = {}, {}
    with concurrent.futures.ProcessPoolExecutor(
        14, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for family, variants in families.items():
            for name, tuning in variants.items():
                for shape in shapes[family]:
                    job = pool.submit(compile_variant, *shape, HEADS, tuning)
                    jobs[family, name, shape] = job
        for (family, name, _), job in jobs.items():
            if error := job.result():
                failed[family, name] = f"does not compile: {error}"
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    for family, name in failed:
        families[family].pop(name)

    if "check" in only:
        for family, variants in families.items():
            problems = [Check(Batch(*shape)) for shape in checks[family]]
            for name, tuning in variants.items():
                for problem, shape in zip(problems, checks[family]):
                    if fault := problem.fault(tuning):
                        failed[family, name] = f"{shape}: {fault}"
                        break
            print(f"checked {family} at {time.time() - began:.0f} s", flush=True)
    for (family, name), fault in failed.items():
        print("FAILED", family, name, fault)

    peers = load_peers(options.peers)

    def report(family: str, label: str, times: dict) -> None:
        base = times.get("vllm")
        cells = []
        for name, value in times.items():
            ratio = f" ({base / value:.2f}x)" if base and name != "vllm" else ""
            mark = " FAILED" if (family, name) in failed else ""
            cells.append(f"{name} {value:.1f}{ratio}{mark}")
        print(f"{family} {label}: " + "; ".join(cells), flush=True)
        torch.cuda.empty_cache()

    if "decode" in only:
        for batch in (1, 8, 32, 128):
            report("decode", *time_decode(batch, 1, 32768, 0.0, DECODE, peers))
    if "prefill" in only:
        cases = [(32768, 0.97), (8192, 0.99), (32768, 0.0), (32768, 0.99), (131072, 0.97)]
        cases += [(131072, 0.0)] + ([(262144, 0.97), (262144, 0.0)] if options.deep else [])
        for context, correlation in cases:
            report("prefill", *time_prefill(context, correlation, PREFILL, peers))
    if "verify" in only:
        for batch in (8, 32):
            report("verify", *time_decode(batch, 4, 32768, 0.97, VERIFY, peers))
    print(f"{len(failed)} failed; {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
