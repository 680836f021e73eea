"""SVG pictures of a run: line charts and the role timeline of the cells (the paper's Figures 1, 6 and 7). Pure functions.

Colours come from CSS classes of the page that holds the picture, so that light and dark pages both read well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 56, 16, 14, 34


@dataclass(frozen=True)
class Span:
    """A cell in one role from `start` to `end` (seconds since the start of the run)."""

    cell: int
    role: str
    start: float
    end: float


def line_chart(
    series: dict[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, height: int = 240
) -> str:
    """One polyline for each named series of (x, y) points; axes start at the data's bounds, y at 0 or below."""
    points = [point for line in series.values() for point in line]
    if not points:
        return "<p>No data yet.</p>"
    x0, x1 = _bounds([x for x, _ in points])
    y0, y1 = _bounds([y for _, y in points] + [0.0])
    place_x = _scale(x0, x1, LEFT, WIDTH - RIGHT)
    place_y = _scale(y0, y1, height - BOTTOM, TOP)
    parts = [_axes(x0, x1, y0, y1, place_x, place_y, height, x_label, y_label)]
    for index, (name, line) in enumerate(series.items()):
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="line s{index % 4}" points="{path}"><title>{escape(name)}</title></polyline>')
        parts += [
            f'<circle class="dot s{index % 4}" cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="2.5">'
            f"<title>{escape(name)}: {y:.4g} at {x:.4g}</title></circle>"
            for x, y in line
            if len(line) <= 200
        ]
    return _svg(parts, height)


def role_timeline(spans: Sequence[Span], cells: int, end: float) -> str:
    """One row for each cell, one bar for each span; the x axis is seconds since the start of the run."""
    row = 30
    height = TOP + row * cells + BOTTOM
    place_x = _scale(0.0, max(end, 1e-9), LEFT, WIDTH - RIGHT)
    parts = []
    for cell in range(cells):
        label = "core" if cell == 0 else f"cell {cell}"
        parts.append(f'<text x="{LEFT - 6}" y="{TOP + row * cell + 19}" text-anchor="end">{label}</text>')
    for span in spans:
        x, width = place_x(span.start), max(place_x(span.end) - place_x(span.start), 0.5)
        parts.append(
            f'<rect class="role {escape(span.role)}" x="{x:.1f}" y="{TOP + row * span.cell + 4}" width="{width:.1f}" '
            f'height="{row - 8}"><title>cell {span.cell}: {escape(span.role)}, {span.start:.1f} to {span.end:.1f} s'
            "</title></rect>"
        )
    for value in _ticks(0.0, max(end, 1e-9)):
        parts.append(f'<text x="{place_x(value):.1f}" y="{height - 14}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 1}" text-anchor="end">seconds</text>')
    return _svg(parts, height)


def _svg(parts: list[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + 1.0)


def _scale(low: float, high: float, start: float, end: float):
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    step = 10.0 ** int(f"{(high - low) / count:e}".split("e")[1])
    while (high - low) / step > count:
        step *= 2.0 if (high - low) / step <= 2 * count else 5.0
    first = -(-low // step) * step
    return [round(first + i * step, 10) for i in range(int((high - first) / step + 1e-9) + 1)]


def _axes(x0, x1, y0, y1, place_x, place_y, height, x_label, y_label) -> str:
    parts = []
    for value in _ticks(y0, y1, 5):
        y = place_y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in _ticks(x0, x1):
        parts.append(f'<text x="{place_x(value):.1f}" y="{height - 16}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 2}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 2}">{escape(y_label)}</text>')
    return "".join(parts)
