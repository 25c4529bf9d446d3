"""flash-qsa bench: named workloads, correctness gate first, one JSON object a line."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from flash_qsa.testing.workloads import Workload

FIELDS = (
    "op",
    "workload",
    "impl",
    "median_us",
    "p20_us",
    "p80_us",
    "host_us",
    "floor_us",
    "rows",
    "context",
    "batch",
    "overlap",
    "device",
    "driver",
    "torch",
    "triton",
    "commit",
    "date",
)


def bench(
    workloads: Annotated[
        str | None, typer.Option(help="Names or prefixes, e.g. decode-b1,prefill. See --list.")
    ] = None,
    ops: Annotated[str, typer.Option(help="Of select, attend, select+attend, prepare.")] = (
        "select,attend,select+attend,prepare"
    ),
    show: Annotated[bool, typer.Option("--list", help="List the workloads and stop.")] = False,
    device: Annotated[str, typer.Option(help="A torch device; auto takes a GPU if any.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, reference or triton.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; peers take turns.")] = 20,
    peers: Annotated[
        Path | None, typer.Option(help="Folder of vLLM's op files, see benchmarks/README.md.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Append JSON lines here instead of printing them.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Append to benchmarks/results/<device>/<date>.jsonl.")
    ] = False,
) -> None:
    """Measure ops on named workloads, ours and peers' in turn.

    A result that fails its float64 gate is not timed, and the command exits with 1. Without
    --workloads it runs what the device can do in minutes. floor_us is the shortest time for the
    op's least bytes and operations at the copy and product rates measured in the same run.
    """
    from flash_qsa.cli.verify import pick_device, pick_dtype
    from flash_qsa.testing.measure.cases import OURS
    from flash_qsa.testing.workloads import WORKLOADS

    if show:
        for name in WORKLOADS:
            typer.echo(name)
        return
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    wanted = ops.split(",")
    if unknown := [name for name in wanted if name not in OURS]:
        raise typer.BadParameter(f"ops: unknown {unknown}; there are {', '.join(OURS)}")
    if save:
        from flash_qsa.cli.env import device_facts

        today = datetime.datetime.now(datetime.timezone.utc).date()
        folder = device_folder(device_facts(where)["name"])
        out = Path("benchmarks/results") / folder / f"{today}.jsonl"
    if peers is not None:
        from flash_qsa.testing.measure.vllm_peer import register

        register(peers)
    failed = False
    for row in results(_choose(workloads, where), wanted, where, kind, backend, repeats):
        failed |= "fault" in row
        line = json.dumps(row)
        if out is None or "fault" in row:
            typer.echo(line)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            typer.echo(
                f"{row['workload']} {row['op']} {row['impl']}: {row['median_us']:.1f} us, "
                f"floor {row['floor_us']:.1f}"
            )
    if failed:
        raise typer.Exit(1)


def _choose(names: str | None, device: torch.device) -> list[Workload]:
    from flash_qsa.testing.workloads import CPU, WORKLOADS

    if names is None:
        return list(WORKLOADS.values()) if device.type == "cuda" else list(CPU)
    prefixes = tuple(names.split(","))
    chosen = [workload for name, workload in WORKLOADS.items() if name.startswith(prefixes)]
    if not chosen:
        raise typer.BadParameter(f"workloads: nothing starts with {names!r}; see --list")
    return chosen


def results(
    workloads: list[Workload],
    ops: list[str],
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """One row of FIELDS for each workload, op and implementation, or one with a "fault"."""
    from flash_qsa import dispatch
    from flash_qsa.testing.measure.cases import OURS, cost, gate, peer_runs, rotating
    from flash_qsa.testing.measure.timing import GRAPH_ROWS, device_rates, interleaved

    rates = device_rates(device, dtype)
    ours = f"flash-qsa {dispatch.choose(backend, device).backend}"
    machine = machine_facts(device)
    for workload in workloads:
        pairs = rotating(workload, ops, dtype, device, backend)
        for op in ops:
            about = {"op": op, "workload": workload.name}
            if faults := gate(op, *pairs[0], backend):
                yield {**about, "impl": ours, "fault": faults[0]}
                continue
            runs = {ours: [OURS[op](problem, ids, backend) for problem, ids in pairs]}
            runs |= peer_runs(op, pairs)
            small = workload.total_rows <= GRAPH_ROWS
            times = interleaved(runs, device, repeats, graph=small)
            least = cost(op, *pairs[0])
            floor = rates.floor_us(least.moved, least.flops)
            for name, seen in times.items():
                yield {
                    **about,
                    "impl": name,
                    **vars(seen),
                    "floor_us": floor,
                    "rows": workload.total_rows,
                    "context": workload.context,
                    "batch": workload.batch,
                    "overlap": workload.overlap,
                    **machine,
                }
        del pairs


def machine_facts(device: torch.device) -> dict[str, Any]:
    """device, driver, torch, triton, commit and date of a result."""
    import torch

    from flash_qsa.cli.env import device_facts, package_version

    return {
        "device": device_facts(device)["name"],
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device.type == "cuda"
        else None,
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str | None:
    """First line that a command prints, None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout else None


def device_folder(name: str) -> str:
    """Folder under benchmarks/results for a device: its name in lower case, dashes between."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
