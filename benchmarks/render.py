"""Renders the README's results from benchmarks/results/<device>/*.jsonl: `--write`, or to stdout.

For each device, op, workload and implementation the newest row counts. Losses are printed as any
other row. Charts lie beside the files they come from.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from plots import Series, chart

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
START, END = "<!-- results: start -->", "<!-- results: end -->"


def newest_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of one device's files, the newest of each (op, workload, implementation)."""
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "median_us" not in row:
                continue
            key = (row["op"], row["workload"], row["impl"])
            if key not in kept or row["date"] >= kept[key]["date"]:
                kept[key] = row
    return list(kept.values())


def device_table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown lines: a row for each op and workload, ours against every peer."""
    peers = sorted({row["impl"] for row in rows if not _ours(row)})
    head = ["op", "workload", "flash-qsa µs", "share of floor", *peers]
    out = ["| " + " | ".join(head) + " |", "|" + " --- |" * 2 + " ---: |" * (len(head) - 2)]
    pairs = sorted(
        {(row["op"], row["batch"], row["rows"], row["context"], row["workload"]) for row in rows}
    )
    for op, _, _, _, workload in pairs:
        here = [row for row in rows if (row["op"], row["workload"]) == (op, workload)]
        mine = min((row for row in here if _ours(row)), key=lambda r: r["median_us"], default=None)
        if mine is None:
            continue
        cells = [op, workload, f"{mine['median_us']:,.1f}", _share(mine)]
        for peer in peers:
            theirs = next((row for row in here if row["impl"] == peer), None)
            cells.append(
                f"{theirs['median_us']:,.1f} ({theirs['median_us'] / mine['median_us']:.2f}x)"
                if theirs
                else ""
            )
        out.append("| " + " | ".join(cells) + " |")
    return out


def _ours(row: dict[str, Any]) -> bool:
    return row["impl"].startswith("flash-qsa")


def _share(row: dict[str, Any]) -> str:
    floor = row.get("floor_us")
    return f"{floor / row['median_us']:.0%}" if floor else ""


def families(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Our rows that differ in context alone, two at least, by op and workload without length."""
    kinds = defaultdict(list)
    for row in rows:
        if _ours(row):
            # decode-b8-32k, or prefill-8k-at-32k-corr0.97: rows, then the context behind "at".
            name = re.sub(r"-at-\d+[km]|(-b\d+)-\d+[km]", r"\1", row["workload"])
            kinds[f"{row['op']}, {name}"].append(row)
    ordered = {name: sorted(kind, key=lambda r: r["context"]) for name, kind in kinds.items()}
    return {name: kind for name, kind in sorted(ordered.items()) if len(kind) > 1}


def charts(rows: list[dict[str, Any]]) -> dict[str, str]:
    """File name → SVG of the whole step's cost, share of the floor, and speed-up over each peer."""
    grouped = families(rows)
    out = {}
    cost: Series = {
        name: [(row["context"], row["median_us"]) for row in kind]
        for name, kind in grouped.items()
        if name.startswith("select+attend,")
    }
    if cost:
        out["cost.svg"] = chart("Selection and attention as the context grows", "µs", cost)
    share: Series = {
        name: [(row["context"], row["floor_us"] / row["median_us"]) for row in kind]
        for name, kind in grouped.items()
        if name.startswith("select+attend,") and all(row.get("floor_us") for row in kind)
    }
    if share:
        out["floor.svg"] = chart("Share of the floor", "floor / time", share, share=True)
    for peer in sorted({row["impl"] for row in rows if not _ours(row)}):
        times = {
            (row["op"], row["workload"]): row["median_us"] for row in rows if row["impl"] == peer
        }
        gain: dict[str, list[tuple[int, float]]] = {}
        for name, kind in grouped.items():
            line = [
                (row["context"], times[row["op"], row["workload"]] / row["median_us"])
                for row in kind
                if (row["op"], row["workload"]) in times
            ]
            if len(line) > 1 and name.startswith("select+attend,"):
                gain[name] = line
        if gain:
            slug = re.sub(r"[^a-z0-9]+", "-", peer.lower()).strip("-")
            out[f"speedup-{slug}.svg"] = chart(f"Speed-up over {peer}", "times", gain)
    return out


def verified(folder: Path) -> list[str]:
    """A sentence for each `flash-qsa verify --json` report in a device's folder."""
    out = []
    for path in sorted(folder.glob("verify*.jsonl")):
        about, *checks, summary = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        passed, longest = sum(c["ok"] for c in checks), max(c["length"] for c in checks)
        ran = ", ".join(summary["backends that ran"])
        out.append(
            f"`flash-qsa verify` on {about['device']}, {about['dtype']}, heads {about['heads']}, "
            f"torch {about['torch']}, Triton {about['triton']}: {passed} of {len(checks)} checks "
            f"passed on backend {ran}, up to {longest:,} tokens "
            f"([report](benchmarks/results/{folder.name}/{path.name}))."
        )
    return out


def render(results: Path = RESULTS) -> str:
    """The results section: one table a device, or a sentence that there are none."""
    folders = [path for path in sorted(results.glob("*")) if path.is_dir()]
    out: list[str] = []
    for folder in folders:
        for sentence in verified(folder):
            out += ["", sentence]
        rows = newest_rows(folder)
        if not rows:
            continue
        last = max(rows, key=lambda row: row["date"])
        about = f"torch {last['torch']}, Triton {last['triton']}"
        out += ["", f"**{last['device']}** ({about}, {last['date'][:10]}, commit {last['commit']})"]
        out += ["", "In brackets: how many times longer the peer takes.", ""]
        for name in charts(rows):
            out.append(f"![{name.removesuffix('.svg')}](benchmarks/results/{folder.name}/{name})")
        out += ["", *device_table(rows)]
    return "\n".join(out).strip() or "No result file is committed yet."


def insert(readme: str, section: str) -> str:
    """README text with the part between the markers replaced."""
    before, rest = readme.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n\n{section}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write README.md, else print")
    section = render()
    if parser.parse_args().write:
        README.write_text(insert(README.read_text(encoding="utf-8"), section), encoding="utf-8")
        for folder in RESULTS.glob("*/"):
            for name, text in charts(newest_rows(folder)).items():
                (folder / name).write_text(text, encoding="utf-8")
    else:
        print(section)


if __name__ == "__main__":
    main()
