"""Draws docs/architecture.svg from the tree: `python docs/architecture.py --write`, or to stdout.

Boxes are the package's parts in the order of their dependencies, top to bottom; each lists what
its folder really holds, so a picture that is out of date fails a test.
"""

from __future__ import annotations

import argparse
import ast
import html
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flash_qsa"
PICTURE = ROOT / "docs" / "architecture.svg"

WIDTH, MARGIN, GAP, LINE, PAD = 960, 20, 34, 17, 10
FILL = {"entry": "#e8f0fe", "state": "#e6f4ea", "op": "#fef7e0", "side": "#f3e8fd"}


@dataclass(frozen=True)
class Box:
    """Title, lines of contents, column from 0 to 1 and its width, and a colour of FILL."""

    title: str
    lines: tuple[str, ...]
    left: float
    width: float
    kind: str


def modules(folder: str) -> list[str]:
    """Names of the modules and packages in a folder of the package."""
    found = [p.stem for p in (PACKAGE / folder).glob("*.py") if p.stem != "__init__"]
    found += [p.parent.name for p in (PACKAGE / folder).glob("*/__init__.py")]
    return sorted(found)


def public(folder: str) -> list[str]:
    """Names that a package of ours exports."""
    tree = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def ops() -> list[str]:
    """Folders under ops/: one an op."""
    return sorted(p.parent.name for p in (PACKAGE / "ops").glob("*/api.py"))


def with_kernel() -> list[str]:
    return [op for op in ops() if (PACKAGE / "ops" / op / "kernel.py").is_file()]


def wrapped(names: list[str], width: int) -> tuple[str, ...]:
    """Names joined by middle dots, in lines of at most `width` characters."""
    lines = [""]
    for name in names:
        joined = f"{lines[-1]} · {name}" if lines[-1] else name
        if len(joined) > width:
            lines.append(name)
        else:
            lines[-1] = joined
    return tuple(lines)


def rows() -> list[list[Box]]:
    """The picture, top to bottom; a part uses those below it, never those above."""
    commands = [name for name in modules("cli") if name not in ("main", "decoding")]
    count = f"{len(with_kernel())} of {len(ops())} ops"
    return [
        [
            Box("cli", wrapped(commands, 40), 0.0, 0.33, "entry"),
            Box("integrations", wrapped(modules("integrations"), 40), 0.345, 0.3, "entry"),
            Box(
                "testing",
                wrapped(modules("testing"), 40),
                0.66,
                0.34,
                "side",
            ),
        ],
        [
            Box("layers", wrapped(public("layers"), 84), 0.0, 0.645, "state"),
        ],
        [Box("cache: the paged state", wrapped(public("cache"), 110), 0.0, 1.0, "state")],
        [Box("ops: api.py checks and allocates", wrapped(ops(), 110), 0.0, 1.0, "op")],
        [Box("dispatch", ("(op, backend, device) → implementation; never falls back",), 0.2, 0.6,
             "op")],
        [
            Box("reference.py: the specification", ("PyTorch, any device",
                                                    f"{len(ops())} of {len(ops())} ops"), 0.0,
                0.49, "op"),
            Box("kernel.py: Triton", ("on GPUs; interpreted on a CPU in tests", count), 0.51,
                0.49, "op"),
        ],
        [
            Box("plan", ("BatchPlan: one step's metadata, built once, read by every op",), 0.0,
                0.49, "state"),
            Box("config · checks · targets", ("geometry, one error form, known devices",), 0.51,
                0.49, "state"),
        ],
    ]  # fmt: skip


def draw() -> str:
    """The SVG text."""
    parts: list[str] = []
    top = MARGIN + 26
    centre_above: float | None = None
    for boxes in rows():
        height = max(len(box.lines) for box in boxes) * LINE + 2 * PAD + 22
        if centre_above is not None:
            parts.append(_arrow(WIDTH / 2, top - GAP + 3, top - 4))
        parts += [_box(box, top, height) for box in boxes]
        centre_above = top + height
        top += height + GAP
    height = top - GAP + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="13">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#5f6368"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="{MARGIN}" y="{MARGIN + 10}" fill="#5f6368">'
        "A part uses what lies below it, never what lies above.</text>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _box(box: Box, top: float, height: float) -> str:
    span = WIDTH - 2 * MARGIN
    x, width = MARGIN + box.left * span, box.width * span
    out = [
        f'<rect x="{x:.0f}" y="{top}" width="{width:.0f}" height="{height}" rx="6" '
        f'fill="{FILL[box.kind]}" stroke="#9aa0a6"/>',
        f'<text x="{x + PAD:.0f}" y="{top + PAD + 13}" font-weight="bold" fill="#202124">'
        f"{html.escape(box.title)}</text>",
    ]
    for number, line in enumerate(box.lines, 1):
        y = top + PAD + 15 + number * LINE
        out.append(f'<text x="{x + PAD:.0f}" y="{y}" fill="#3c4043">{html.escape(line)}</text>')
    return "\n".join(out)


def _arrow(x: float, start: float, end: float) -> str:
    return (
        f'<line x1="{x:.0f}" y1="{start}" x2="{x:.0f}" y2="{end}" stroke="#5f6368" '
        'stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the picture, else print it")
    if parser.parse_args().write:
        PICTURE.write_text(draw(), encoding="utf-8")
    else:
        print(draw(), end="")


if __name__ == "__main__":
    main()
