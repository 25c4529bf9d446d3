"""Times schedules and tiles of selection and attention that are not the chosen ones.

    python benchmarks/kernels/sweep.py OP WORKLOAD [NAME=VALUE,VALUE ...] [--peers DIR] [--jobs N]

    sweep.py attend decode-b8-32k rows.block_n=16,32 rows.num_stages=3,5 rows.splits=8,16
    sweep.py select+attend decode-b32-128k score.num_stages=2,3 select.threads=512,1024
    sweep.py attend prefill-8k-at-32k-corr0 share=true,false

OP is select, attend or select+attend, WORKLOAD one of `flash-qsa bench --list`. A NAME is a field
of sparse_attention's Tuning (rows.*, union.*, hopper.*, share, split_factor) or a key of
select_blocks' tuning (score.*, select.*, decode.*, dense.*, selector, pdl, admit_next); every
combination of values is run beside the choice that is made without it. A combination whose answer
is wrong (other ids than chosen by default; attention beyond its float64 bound) or that does not run
is listed, not timed. Protocol as in `flash-qsa bench`. --jobs compiles in so many processes first.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flash_qsa.ops.select_blocks import kernel as selection
from flash_qsa.ops.select_blocks.api import DEFAULT_WORKSPACE_BYTES
from flash_qsa.ops.sparse_attention import kernel as attention
from flash_qsa.ops.sparse_attention.kernel import Tuning
from flash_qsa.testing.inputs import Problem
from flash_qsa.testing.measure.cases import attention_faults, cost, peer_runs, rotating, select
from flash_qsa.testing.measure.problem import workload_problem
from flash_qsa.testing.measure.timing import GRAPH_ROWS, Run, device_rates, interleaved
from flash_qsa.testing.workloads import WORKLOADS

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
OF_ATTENTION = frozenset(Tuning.__dataclass_fields__)
OF_SELECTION = frozenset(("score", "select", "decode", "dense", "selector", "pdl", "admit_next"))

Settings = dict[str, Any]
"""Setting names, e.g. "rows.block_n", and a value of each."""


def combinations(words: list[str]) -> Iterator[Settings]:
    """Every combination of NAME=VALUE,VALUE words; values are JSON, or else text.

    Raises:
        ValueError: a word that is none, or a name that neither op has.
    """
    names, choices = [], []
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or name.partition(".")[0] not in OF_ATTENTION | OF_SELECTION:
            known = ", ".join(sorted(OF_ATTENTION | OF_SELECTION))
            raise ValueError(f"{word!r}: expected NAME=VALUE,... with a name of {known}")
        names.append(name)
        choices.append([_value(text) for text in values.split(",")])
    for values in itertools.product(*choices):
        yield dict(zip(names, values))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def tunings(settings: Settings) -> tuple[Tuning, dict[str, Any]]:
    """What sparse_attention and select_blocks take for these settings."""
    parts: dict[str, Any] = {}
    for name, value in settings.items():
        part, _, field = name.partition(".")
        if field:
            parts.setdefault(part, {})[field] = value
        else:
            parts[part] = value
    of_attention = {part: value for part, value in parts.items() if part in OF_ATTENTION}
    return Tuning(**of_attention), {k: v for k, v in parts.items() if k in OF_SELECTION}


def calls(op: str, problem: Problem, ids: torch.Tensor, settings: Settings) -> Run:
    """One call of `op` under these settings; ids are the selection that attention alone takes."""
    plan, shape = problem.plan, problem.shape
    of_attention, of_selection = tunings(settings)

    def choose() -> torch.Tensor:
        out = torch.empty_like(ids)
        selection.launch(
            problem.index_query, problem.key_cache, plan.page_table, plan.request_ids,
            plan.visible_blocks, None, plan, DEFAULT_WORKSPACE_BYTES, out, tuning=of_selection,
        )  # fmt: skip
        return out

    def attend(chosen: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(problem.query)
        keys, values = problem.kv_cache.chunk(2, -1)
        attention.launch(
            problem.query, keys, values, chosen, plan.positions, plan.page_table, plan.request_ids,
            shape.ratio, shape.head_dim**-0.5, problem.gate, None, None, None, None, plan, False,
            out, None, tuning=of_attention,
        )  # fmt: skip
        return out

    runs: dict[str, Callable[[], torch.Tensor]] = {
        "select": choose,
        "attend": lambda: attend(ids),
        "select+attend": lambda: attend(choose()),
    }
    return runs[op]


def faults(op: str, problem: Problem, ids: torch.Tensor, settings: Settings) -> list[str]:
    """What is wrong with the answer under these settings; raises what the op raises."""
    found = []
    if "select" in op and not torch.equal(calls("select", problem, ids, settings)(), ids):
        found.append("other ids")
    if "attend" in op:
        found += attention_faults(problem, ids, calls("attend", problem, ids, settings)())
    return found


def compile_one(op: str, workload: str, settings: Settings) -> None:
    problem = workload_problem(WORKLOADS[workload], DTYPE, DEVICE)
    with contextlib.suppress(Exception):  # reported when it is run
        calls(op, problem, select(problem, "triton"), settings)()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=("select", "attend", "select+attend"))
    parser.add_argument("workload", choices=tuple(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE,...")
    parser.add_argument("--peers", type=Path, help="folder of vLLM's op files")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    op, workload = options.op, WORKLOADS[options.workload]
    variants = [{}, *combinations(options.settings)] if options.settings else [{}]
    if options.jobs:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
            for settings in variants:
                pool.submit(compile_one, op, workload.name, settings)
    pairs = rotating(workload, [op], DTYPE, DEVICE, "triton")
    runs: dict[str, list[Run]] = {}
    for settings in variants:
        name = " ".join(f"{key}={value}" for key, value in settings.items()) or "as chosen"
        try:
            wrong = faults(op, *pairs[0], settings)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"[:120]]
        if wrong:
            print(f"{name}: {wrong[0]}", file=sys.stderr)
            continue
        runs[name] = [calls(op, problem, ids, settings) for problem, ids in pairs]
    if options.peers:
        from flash_qsa.testing.measure.vllm_peer import register

        register(options.peers)
        runs |= peer_runs(op, pairs)
    times = interleaved(runs, DEVICE, options.repeats, graph=workload.total_rows <= GRAPH_ROWS)
    least = cost(op, *pairs[0])
    floor = device_rates(DEVICE, DTYPE).floor_us(least.moved, least.flops)
    print(f"{op} {workload.name}, floor {floor:.1f} us, {len(pairs)} copies")
    for name, seen in sorted(times.items(), key=lambda pair: pair[1].median_us):
        print(f"{seen.median_us:10.1f} us  {floor / seen.median_us:4.0%}  {name}")


if __name__ == "__main__":
    main()
