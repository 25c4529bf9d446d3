"""Renders the README's results from benchmarks/results/<device>/*.jsonl: `--write`, or to stdout.

For each device, op, workload and implementation the newest row counts. Losses are printed as any
other row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

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


def render(results: Path = RESULTS) -> str:
    """The results section: one table a device, or a sentence that there are none."""
    folders = [path for path in sorted(results.glob("*")) if path.is_dir()]
    out: list[str] = []
    for folder in folders:
        rows = newest_rows(folder)
        if not rows:
            continue
        last = max(rows, key=lambda row: row["date"])
        about = f"torch {last['torch']}, Triton {last['triton']}"
        out += ["", f"**{last['device']}** ({about}, {last['date'][:10]}, commit {last['commit']})"]
        out += ["", "In brackets: how many times longer the peer takes.", ""]
        out += device_table(rows)
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
    else:
        print(section)


if __name__ == "__main__":
    main()
