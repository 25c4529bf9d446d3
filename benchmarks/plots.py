"""Line charts over the context length as SVG text, without a plotting library.

Both axes are logarithmic except a share, which is linear from 0 to 1. Colours repeat after eight
lines; the legend is beside the chart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 270, 40, 50
COLOURS = ("#1a73e8", "#d93025", "#188038", "#f29900", "#9334e6", "#12a4af", "#8d6e63", "#5f6368")

Series = Mapping[str, Sequence[tuple[int, float]]]


def chart(title: str, unit: str, series: Series, *, share: bool = False) -> str:
    """An SVG chart of `series`: name → (context, value) points in order of context.

    Args:
        unit: label of the value axis.
        share: values are shares; the axis is linear from 0 to 1, or to the largest value.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(f"chart {title!r}: no point")
    contexts = sorted({context for context, _ in points})
    low_x, high_x = math.log2(contexts[0]), math.log2(contexts[-1])
    values = [value for _, value in points]
    ticks = _share_ticks(max(values)) if share else _log_ticks(min(values), max(values))
    low_y, high_y = (ticks[0], ticks[-1]) if share else (math.log(ticks[0]), math.log(ticks[-1]))

    def x_of(context: int) -> float:
        across = (math.log2(context) - low_x) / (high_x - low_x or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        up = ((value if share else math.log(value)) - low_y) / (high_y - low_y or 1)
        return HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="#3c4043">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">{html.escape(title)}</text>',
    ]
    for tick in ticks:
        y = y_of(tick)
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e0e0e0"/>'
        )
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for context in contexts:
        x = x_of(context)
        out.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{_tokens(context)}</text>"
        )
    out.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">'
        "context in tokens</text>"
    )
    out.append(
        f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{html.escape(unit)}</text>'
    )
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_of(context):.1f},{y_of(value):.1f}" for context, value in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [
            f'<circle cx="{x_of(context):.1f}" cy="{y_of(value):.1f}" r="3" fill="{colour}"/>'
            for context, value in line
        ]
        y = TOP + 10 + number * 18
        out.append(
            f'<line x1="{WIDTH - RIGHT + 14}" x2="{WIDTH - RIGHT + 34}" y1="{y}" y2="{y}" '
            f'stroke="{colour}" stroke-width="3"/>'
        )
        out.append(f'<text x="{WIDTH - RIGHT + 40}" y="{y + 4}">{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _tokens(context: int) -> str:
    return f"{context // 1024}K" if context < 1 << 20 else f"{context >> 20}M"


def _share_ticks(largest: float) -> list[float]:
    top = max(1.0, math.ceil(largest * 5) / 5)
    return [round(step / 5, 1) for step in range(round(top * 5) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1-2-5 steps that enclose the values."""
    steps = [
        digit * 10.0**power
        for power in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        for digit in (1, 2, 5)
    ]
    first = max(step for step in steps if step <= low)
    last = min((step for step in steps if step >= high), default=steps[-1])
    kept = [step for step in steps if first <= step <= last]
    return kept if len(kept) > 1 else [first, first * 2]
