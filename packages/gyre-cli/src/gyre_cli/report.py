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
from gyre_trajtree import Event, TrajtreeError, read_run_log

from gyre_cli.charts import Span, line_chart, page, role_timeline
from gyre_cli.errors import MisuseError

MOST_CELLS = 1024


@dataclass
class RunData:
    """What a report needs of a run directory. Times are seconds since the run log's first event."""

    metrics: list[dict[str, Any]]
    spans: list[Span] = field(default_factory=list)
    waterlevel: list[tuple[float, float]] = field(default_factory=list)
    cells: int = 0
    end: float = 0.0


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, one a training step; a torn last line (killed run) is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            row = orjson.loads(line)
            rows.append(row | {name: float(row[name]) for name in ("step", "reward_mean", "staleness_mean")})
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            raise MisuseError(f"{path} holds a line that is no step's figures: {line[:60]!r}") from None
    return rows


def read_run(run_dir: Path) -> RunData:
    """Collect roles, waterlevel and metrics of a run directory. Raises MisuseError where there is no run log."""
    log = run_dir / "run.jsonl"
    if not log.is_file():
        raise MisuseError(f"{run_dir} is not a run directory: it has no run.jsonl")
    data = RunData(metrics=read_metrics(run_dir))
    try:
        collect_events(data, (record for record in read_run_log(log) if isinstance(record, Event)))
    except TrajtreeError as error:
        raise MisuseError(str(error)) from None
    except (KeyError, TypeError, ValueError) as error:
        raise MisuseError(f"{log} holds an event that no run writes: {error!r}") from None
    return data


def collect_events(data: RunData, events: Iterable[Event]) -> None:
    """Fold `role`, `schedule` and other events of the run log into `data`."""
    zero: float | None = None
    current: dict[int, tuple[str, float]] = {}
    for event in events:
        zero = event.time if zero is None else zero
        now = event.time - zero
        data.end = max(data.end, now)
        if event.name == "schedule":
            data.waterlevel.append((now, float(event.fields["waterlevel"])))
        if event.name != "role":
            continue
        cell, role = int(event.fields["cell"]), str(event.fields["role"])
        if not 0 <= cell < MOST_CELLS:
            raise ValueError(f"cell {cell}")
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
    share = ", ".join(f"cell {cell} {value:.0%}" for cell, value in training_share(data).items())
    config = run_dir / "config.toml"
    text = (
        f"<pre>{escape(config.read_text(errors='replace'))}</pre>"
        if config.exists()
        else "<p>No config.toml.</p>"
    )
    sections = [
        (
            "Reward",
            line_chart({"mean reward": _by_step(data, "reward_mean")}, "training step", "mean reward"),
        ),
        (
            "Roles of the cells",
            "<p>The core (cell 0) owns the optimizer and trains first; satellites join while rollouts drain. "
            f"Time in training: {escape(share) or 'none yet'}.</p>"
            + role_timeline(data.spans, data.cells, data.end),
        ),
        (
            "Waterlevel",
            "<p>Executions dispatched and not yet ended: as it falls, cells become free to train.</p>"
            + line_chart({"waterlevel": _thin(data.waterlevel)}, "seconds", "executions queued or running"),
        ),
        (
            "Staleness",
            "<p>Training steps between the version at which a group was dispatched and the one that consumed it.</p>"
            + line_chart(
                _staleness(data, summary), "training step", "mean staleness of the step, and its target"
            ),
        ),
        ("Summary", _table(_shown(summary))),
        ("Configuration", text),
    ]
    return page(f"Gyre run {run_dir.name}", sections)


def _by_step(data: RunData, name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in data.metrics]


def _staleness(data: RunData, summary: dict[str, Any] | None) -> dict[str, list[tuple[float, float]]]:
    measured = _by_step(data, "staleness_mean")
    target = (summary or {}).get("staleness_target")
    if not measured or not isinstance(target, int | float):
        return {"staleness": measured}
    return {
        "staleness": measured,
        "target": [(step, float(target)) for step in (measured[0][0], measured[-1][0])],
    }


def _shown(summary: dict[str, Any] | None) -> dict[str, Any]:
    """The summary for people: without the rewards, which the first chart shows."""
    if summary is None:
        return {"state": "the run has not finished; this page shows what is durable so far"}
    return {key.replace("_", " "): value for key, value in summary.items() if key != "rewards"}


def _thin(points: list[tuple[float, float]], limit: int = 800) -> list[tuple[float, float]]:
    stride = max(1, len(points) // limit)
    return points[::stride]


def _table(values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(_cell(v))}</td></tr>" for k, v in values.items()
    )
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
    summary = _read_summary(run_dir / "summary.json")
    target = target or run_dir / "report.html"
    try:
        target.write_text(render_report(run_dir, data, summary))
    except OSError as error:
        raise MisuseError(f"report cannot be written to {target}: {error.strerror}") from None
    return target


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        summary = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        summary = None
    if not isinstance(summary, dict):
        raise MisuseError(f"{path} is not a summary; remove it to see the page without one")
    return summary
