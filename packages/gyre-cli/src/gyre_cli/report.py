"""`gyre report`: one self-contained page of a run (no script, no network): rewards, roles of cells, figures, events.

Reads only the run directory (config.toml, metrics.jsonl, run.jsonl, summary.json), so it works while a run is in
progress and after a killed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import orjson
from gyre_trajtree.records import Event
from gyre_trajtree.runlog import read_run_log

from gyre_cli.charts import Span, line_chart, role_timeline
from gyre_cli.errors import MisuseError

STYLE = """
:root{--ink:#1c2733;--soft:#667;--paper:#fff;--grid:#e3e7ee;--a:#2463c9;--b:#c2571a;--c:#2c8a57;--d:#7a4fb5}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf2;--soft:#9aa5b5;--paper:#12171e;--grid:#2a323d;--a:#6ea4ff;--b:#f0995f;--c:#63c890;--d:#b794ee}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:900px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}svg{width:100%;height:auto}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--grid)}.line{fill:none;stroke-width:2}.s0{stroke:var(--a)}.s1{stroke:var(--b)}.s2{stroke:var(--c)}.s3{stroke:var(--d)}
.dot{fill:var(--paper);stroke-width:1.5}.rollout{fill:var(--a)}.training{fill:var(--b)}.transition{fill:var(--soft)}.lost{fill:none;stroke:var(--soft)}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--grid);vertical-align:top}
th{font-weight:500;color:var(--soft)}.key span{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 1rem;vertical-align:-1px}
pre{overflow:auto;background:var(--grid);padding:.8rem;border-radius:4px;font-size:13px}
"""


@dataclass
class RunData:
    """What a report needs of a run directory. Times are seconds since the run log's first event."""

    metrics: list[dict[str, Any]]
    spans: list[Span] = field(default_factory=list)
    waterlevel: list[tuple[float, float]] = field(default_factory=list)
    cells: int = 0
    end: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, one a training step; a torn last line (killed run) is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            raise MisuseError(f"{path} holds a line that is not JSON: {line[:60]!r}") from None
    return rows


def read_run(run_dir: Path) -> RunData:
    """Collect roles, waterlevel and metrics of a run directory. Raises MisuseError where there is no run log."""
    log = run_dir / "run.jsonl"
    if not log.exists():
        raise MisuseError(f"{run_dir} is not a run directory: it has no run.jsonl")
    data = RunData(metrics=read_metrics(run_dir))
    collect_events(data, (record for record in read_run_log(log) if isinstance(record, Event)))
    return data


def collect_events(data: RunData, events: Iterable[Event]) -> None:
    """Fold `role`, `schedule` and other events of the run log into `data`."""
    zero: float | None = None
    current: dict[int, tuple[str, float]] = {}
    for event in events:
        zero = event.time if zero is None else zero
        now = event.time - zero
        data.end = max(data.end, now)
        data.counts[event.name] = data.counts.get(event.name, 0) + 1
        if event.name == "schedule":
            data.waterlevel.append((now, float(event.fields["waterlevel"])))
        if event.name != "role":
            continue
        cell, role = int(event.fields["cell"]), str(event.fields["role"])
        if cell in current:
            data.spans.append(Span(cell, current[cell][0], current[cell][1], now))
        current[cell] = (role, now)
        data.cells = max(data.cells, cell + 1)
    data.spans += [Span(cell, role, start, data.end) for cell, (role, start) in current.items()]


def training_share(data: RunData) -> dict[int, float]:
    """Share of the observed time that each cell spent in training."""
    share = dict.fromkeys(range(data.cells), 0.0)
    for span in data.spans:
        if span.role == "training" and data.end > 0:
            share[span.cell] += (span.end - span.start) / data.end
    return share


def render_report(run_dir: Path, data: RunData, summary: dict[str, Any] | None) -> str:
    """The page as HTML text."""
    steps = [(row["step"], row) for row in data.metrics]
    share = ", ".join(f"cell {cell} {value:.0%}" for cell, value in training_share(data).items())
    config = run_dir / "config.toml"
    sections = [
        ("Reward", line_chart({"mean reward": [(s, r["reward_mean"]) for s, r in steps]}, "training step", "mean reward")),
        (
            "Roles of the cells",
            '<p class="key"><span class="rollout" style="background:var(--a)"></span>rollout'
            '<span style="background:var(--b)"></span>training<span style="background:var(--soft)"></span>transition. '
            f"Time in training: {escape(share) or 'none yet'}.</p>" + role_timeline(data.spans, data.cells, data.end),
        ),
        ("Waterlevel", line_chart({"waterlevel": _thin(data.waterlevel)}, "seconds", "executions queued or running")),
        (
            "Staleness",
            line_chart({"staleness": [(s, r["staleness_mean"]) for s, r in steps]}, "training step", "mean staleness of the step"),
        ),
        ("Summary", _table(summary or {"state": "the run has not finished; this page shows what is durable so far"})),
        ("Configuration", f"<pre>{escape(config.read_text())}</pre>" if config.exists() else "<p>No config.toml.</p>"),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Gyre run {escape(run_dir.name)}</title><style>{STYLE}</style></head>"
        f"<body><h1>Gyre run {escape(run_dir.name)}</h1>{body}</body></html>"
    )


def _thin(points: list[tuple[float, float]], limit: int = 800) -> list[tuple[float, float]]:
    stride = max(1, len(points) // limit)
    return points[::stride]


def _table(values: dict[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(_cell(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell(item)}" for key, item in value.items())
    return str(value)


def write_report(run_dir: Path, target: Path | None = None) -> Path:
    """Write the page of a run directory and return its path (`report.html` inside it unless `target` is given)."""
    data = read_run(run_dir)
    summary_path = run_dir / "summary.json"
    summary = orjson.loads(summary_path.read_bytes()) if summary_path.exists() else None
    target = target or run_dir / "report.html"
    try:
        target.write_text(render_report(run_dir, data, summary))
    except OSError as error:
        raise MisuseError(f"report cannot be written to {target}: {error.strerror}") from None
    return target
