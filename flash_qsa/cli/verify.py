"""flash-qsa verify: does QSA compute correctly on this device, stage by stage, at long contexts?"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from flash_qsa.testing.inputs import Shape

HEADS = ("tp1", "tp2", "tp4", "tp8", "small")
DTYPES = ("auto", "bfloat16", "float16", "float32")


def verify(
    backend: Annotated[str, typer.Option(help="auto, reference or triton.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help=f"Activation dtype: {', '.join(DTYPES)}. auto is the device's own.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="A torch device; auto takes a GPU if any.")] = "auto",
    heads: Annotated[
        str, typer.Option(help=f"Head counts: {', '.join(HEADS)}. tp4 is a quarter of tp1.")
    ] = "tp1",
    lengths: Annotated[
        str | None, typer.Option(help="Context lengths, e.g. 100,8193, instead of the defaults.")
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Also 131,072 and 262,144 tokens.")] = False,
    stages: Annotated[
        str | None, typer.Option(help="Stages, e.g. select,attend. All if not given.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, no table.")
    ] = False,
) -> None:
    """Check every stage of QSA against float64 and say which backend really ran.

    Exits with 1 when any stage fails. Bounds are derived from the arithmetic; docs/verify.md has
    them.
    """
    from flash_qsa.testing.selfcheck import LENGTHS, LONG_LENGTHS, STAGES, Setting, run_stages

    where = pick_device(device)
    setting = Setting(
        where,
        backend,
        pick_dtype(dtype, where),
        _shape(heads),
        rows=300 if where.type == "cuda" else 3,
    )
    sizes = _lengths(lengths) if lengths else LENGTHS + (LONG_LENGTHS if long else ())
    wanted = tuple(stages.split(",")) if stages else tuple(STAGES)
    unknown = [name for name in wanted if name not in STAGES]
    if unknown:
        raise typer.BadParameter(f"stages: unknown {unknown}; there are {', '.join(STAGES)}")

    report = _JsonReport() if as_json else _TableReport()
    report.start(_header(setting, heads))
    failed, ran, began = 0, set(), time.perf_counter()
    for length in sizes:
        for result in run_stages(setting, length, wanted):
            report.add(result)
            failed += not result.ok
            ran.update(result.ran)
    report.finish(failed, sorted(ran), time.perf_counter() - began)
    if failed or not ran:
        raise typer.Exit(1)


def pick_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"device: {name!r} is not a torch device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("device: no CUDA device is available")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise typer.BadParameter(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    # Tensor cores have no BF16 before capability 8.0, and such models run in FP16 there.
    native = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if native else torch.float16


def _shape(heads: str) -> Shape:
    from dataclasses import replace

    from flash_qsa.testing.inputs import REAL, Shape

    if heads not in HEADS:
        raise typer.BadParameter(f"heads: expected one of {', '.join(HEADS)}, got {heads!r}")
    if heads == "small":
        return Shape()
    ranks = int(heads[2:])
    return replace(REAL, heads=REAL.heads // ranks, kv_heads=max(1, REAL.kv_heads // ranks))


def _lengths(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"lengths: expected numbers like 100,8193, got {text!r}"
        ) from error
    if min(sizes) < 1:
        raise typer.BadParameter(f"lengths: must be at least 1, got {min(sizes)}")
    return sizes


def _header(setting: Any, heads: str) -> dict[str, Any]:
    import torch

    from flash_qsa.cli.env import device_facts, package_version

    facts = device_facts(setting.device)
    return {
        "device": facts["name"],
        "capability": facts["capability"],
        "dtype": str(setting.dtype).removeprefix("torch."),
        "heads": heads,
        "backend asked for": setting.backend,
        "torch": torch.__version__,
        "triton": package_version("triton"),
    }


class _JsonReport:
    """One JSON object a line: a header, the results, a summary."""

    def start(self, header: dict[str, Any]) -> None:
        typer.echo(json.dumps(header))

    def add(self, result: Any) -> None:
        row = {name: getattr(result, name) for name in ("stage", "case", "length")}
        error = result.error if result.error == result.error else None
        row |= {"error": error, "bound": result.bound, "ok": result.ok}
        row |= {"ran": result.ran, "detail": result.detail}
        typer.echo(json.dumps(row))

    def finish(self, failed: int, ran: list[str], seconds: float) -> None:
        summary = {"failed": failed, "backends that ran": ran, "seconds": round(seconds, 1)}
        typer.echo(json.dumps(summary))


class _TableReport:
    """One table a length, printed when the length is done."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = 100
        self.rows: list[Any] = []
        self.faults: list[str] = []
        self.checks = 0

    def start(self, header: dict[str, Any]) -> None:
        shown = ", ".join(f"{name} {value}" for name, value in header.items() if value)
        self.console.print(f"flash-qsa verify: {shown}", highlight=False)

    def add(self, result: Any) -> None:
        if self.rows and self.rows[0].length != result.length:
            self._print()
        self.rows.append(result)
        self.checks += 1
        if not result.ok:
            where = f"{result.stage} ({result.case}) at {result.length:,}"
            self.faults.append(f"FAIL {where}: {result.detail}")

    def _print(self) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(
            title=f"{self.rows[0].length:,} tokens", box=SIMPLE_HEAD, title_justify="left"
        )
        table.add_column("stage")
        table.add_column("case", no_wrap=True)
        table.add_column("max error", justify="right")
        table.add_column("bound", justify="right")
        table.add_column("backend")
        table.add_column("result")
        before = None
        for row in self.rows:
            exact = row.bound == 0
            table.add_row(
                "" if row.stage == before else row.stage,
                row.case,
                f"{row.error:g}" if exact else f"{row.error:.2e}",
                "exact" if exact else f"{row.bound:.2e}",
                ", ".join(row.ran) or "none",
                "[green]pass[/green]" if row.ok else "[bold red]FAIL[/bold red]",
            )
            before = row.stage
        self.console.print(table)
        self.rows.clear()

    def finish(self, failed: int, ran: list[str], seconds: float) -> None:
        if self.rows:
            self._print()
        for fault in self.faults:
            self.console.print(fault, style="red", markup=False, highlight=False)
        passed = f"{self.checks - failed} of {self.checks} checks passed"
        self.console.print(f"{passed} on backend {', '.join(ran) or 'none'} in {seconds:.0f} s")
