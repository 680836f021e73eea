"""SVG pictures of a run: line charts and the role timeline of the cells (the paper's Figures 1, 6 and 7). Pure functions.

Colours come from CSS classes of the page that holds the picture, so that light and dark pages both read well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 56, 16, 26, 38

STYLE = """
:root{--ink:#1c2733;--soft:#667;--paper:#fff;--grid:#e3e7ee;--a:#2463c9;--b:#c2571a;--c:#2c8a57;--d:#7a4fb5}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf2;--soft:#9aa5b5;--paper:#12171e;--grid:#2a323d;--a:#6ea4ff;--b:#f0995f;--c:#63c890;--d:#b794ee}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
  max-width:900px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}svg{width:100%;height:auto}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--grid)}.line{fill:none;stroke-width:2}.s0{stroke:var(--a)}.s1{stroke:var(--b)}.s2{stroke:var(--c)}.s3{stroke:var(--d)}
.dot{fill:var(--paper);stroke-width:1.5}.rollout{fill:var(--a);background:var(--a)}.training{fill:var(--b);background:var(--b)}
.transition{fill:var(--soft);background:var(--soft)}.lost{fill:none;stroke:var(--soft)}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--grid);vertical-align:top}
th{font-weight:500;color:var(--soft)}
.key span{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 1rem;vertical-align:-1px}
pre{overflow:auto;background:var(--grid);padding:.8rem;border-radius:4px;font-size:13px}
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """One self-contained HTML page: no script, no network. `sections` are (heading, HTML content)."""
    body = "".join(f"<section><h2>{escape(heading)}</h2>{content}</section>" for heading, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>"
    )


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
        parts.append(
            f'<polyline class="line s{index % 4}" points="{path}"><title>{escape(name)}</title></polyline>'
        )
        parts += [
            f'<circle class="dot s{index % 4}" cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="2.5">'
            f"<title>{escape(name)}: {y:.4g} at {x:.4g}</title></circle>"
            for x, y in line
            if len(line) <= 200
        ]
    return _svg(parts, height)


def role_timeline(spans: Sequence[Span], cells: int, end: float, unit: str = "seconds") -> str:
    """A key, one row for each cell, one bar for each span; the x axis is time since the start in `unit`."""
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
            f'height="{row - 8}"><title>cell {span.cell}: {escape(span.role)}, {span.start:.1f} to {span.end:.1f} {unit}'
            "</title></rect>"
        )
    for value in _ticks(0.0, max(end, 1e-9)):
        parts.append(
            f'<text x="{place_x(value):.1f}" y="{height - 20}" text-anchor="middle">{value:g}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 3}" text-anchor="end">{unit}</text>')
    key = "".join(f'<span class="{role}"></span>{role}' for role in ("rollout", "training", "transition"))
    return f'<p class="key">{key}</p>' + _svg(parts, height)


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
        parts.append(
            f'<text x="{place_x(value):.1f}" y="{height - 20}" text-anchor="middle">{value:g}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 3}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 12}">{escape(y_label)}</text>')
    return "".join(parts)
