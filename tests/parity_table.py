"""Writes tests/parity.md: which test files cover which promised line.

Run by `make test`: `python tests/parity_table.py --write`. Markers are read from the sources, so
the table does not depend on what is installed; a marker in tests/gpu says that the line is tested
on a GPU, which ordinary CI does not run.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TABLE = ROOT / "parity.md"
GPU = "gpu/"


def marked_ids(source: str) -> Iterator[tuple[str, str]]:
    """(marker, id) of every pytest.mark.parity(...) and pytest.mark.bug(...) in a test file."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        of_pytest = isinstance(owner, ast.Attribute) and owner.attr == "mark"
        if node.func.attr in ("parity", "bug") and of_pytest:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.func.attr, argument.value


def coverage(root: Path = ROOT) -> dict[str, dict[str, list[str]]]:
    """marker → id → sorted test files, relative to tests/."""
    seen: dict[str, dict[str, set[str]]] = {"parity": defaultdict(set), "bug": defaultdict(set)}
    for path in sorted(root.rglob("test_*.py")):
        for marker, name in marked_ids(path.read_text(encoding="utf-8")):
            seen[marker][name].add(path.relative_to(root).as_posix())
    return {
        marker: {name: sorted(files) for name, files in ids.items()} for marker, ids in seen.items()
    }


def render(root: Path = ROOT) -> str:
    """The text of parity.md."""
    from promises import BUGS, PARITY

    seen = coverage(root)
    out = [
        "# What is promised, and which tests hold it",
        "",
        "Written by `make generated`. Files under `gpu/` need a CUDA device (`make gpu`).",
        "",
        "## Behaviour",
        "",
    ]
    out += _rows(("id", "where", "line", "tests"), PARITY, seen["parity"], scope=True)
    out += ["", "## Published faults that must not come back", ""]
    out += _rows(("id", "fault", "tests"), BUGS, seen["bug"], scope=False)
    return "\n".join(out) + "\n"


def _rows(columns: tuple[str, ...], promises: dict, seen: dict, scope: bool) -> list[str]:
    covered = sum(1 for name in promises if seen.get(name))
    out = [f"{covered} of {len(promises)} lines have a test.", ""]
    out += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for name, promise in promises.items():
        files = ", ".join(f"`{file}`" for file in seen.get(name, ())) or "**none**"
        cells = [name, *([promise.scope] if scope else []), promise.text, files]
        out.append("| " + " | ".join(cells) + " |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write tests/parity.md, else print")
    text = render()
    if parser.parse_args().write:
        TABLE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
