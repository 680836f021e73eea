"""`gyre schedule simulate`: one configuration of the live scheduler on a virtual clock, as figures and as a page."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gyre_scheduler.errors import SchedulerError
from gyre_scheduler.presets import Preset, preset
from gyre_scheduler.simulator import SimulationResult, simulate
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from gyre_cli.charts import Span, line_chart, page, role_timeline
from gyre_cli.config import assign
from gyre_cli.errors import MisuseError

PARTS = ("settings", "workload", "costs")
MOST_EXECUTIONS = 5_000_000
"""Some minutes of simulation."""


def run_simulation(name: str, assignments: list[str], seed: int) -> tuple[Preset, SimulationResult]:
    """Simulate a preset with overrides: a setting of the scheduler, or `workload.x=`, `costs.x=`."""
    try:
        chosen = _overridden(preset(name), assignments)
        settings = chosen.settings
        if (executions := settings.steps * settings.groups_per_step * settings.group_size) > MOST_EXECUTIONS:
            raise MisuseError(
                f"{executions:,} executions are more than the {MOST_EXECUTIONS:,} one simulation may have"
            )
        return chosen, simulate(chosen.settings, chosen.workload, chosen.costs, seed)
    except SchedulerError as error:
        raise MisuseError(str(error)) from None


def figures(result: SimulationResult) -> dict[str, Any]:
    """The result without its time series."""
    return {
        field.name: getattr(result, field.name)
        for field in fields(result)
        if not isinstance(getattr(result, field.name), list)
    }


def show_simulation(name: str, chosen: Preset, result: SimulationResult) -> None:
    """Print the figures of a simulation."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(style="dim")
    table.add_row("preset", f"{name} ({chosen.settings.policy})")
    for key, value in _readable(result).items():
        table.add_row(key, value)
    if chosen.paper_hours:
        table.add_row("hours in the paper", f"{chosen.paper_hours:g}")
    Console().print(table)


def _readable(result: SimulationResult) -> dict[str, str]:
    rows = {
        key.replace("_", " "): f"{value:.3f}" if isinstance(value, float) else str(value)
        for key, value in figures(result).items()
    }
    return rows | {
        "time": f"{result.hours:.2f} hours" if result.hours >= 1 else f"{result.hours * 3600:.0f} seconds"
    }


def write_simulation(path: Path, name: str, chosen: Preset, result: SimulationResult) -> None:
    """Write roles and waterlevel over time as one page (the paper's Figures 1 and 6)."""
    cells = len(chosen.settings.cells)
    rows = "".join(f"<tr><th>{key}</th><td>{value}</td></tr>" for key, value in _readable(result).items())
    sections = [
        ("Figures", f"<table>{rows}</table>"),
        ("Roles of the cells", role_timeline(_spans(result), cells, result.hours, unit="hours")),
        (
            "Waterlevel",
            line_chart({"waterlevel": result.waterlevel}, "hours", "executions queued or running"),
        ),
    ]
    try:
        path.write_text(page(f"Simulated schedule {name}", sections))
    except OSError as error:
        raise MisuseError(f"the page cannot be written to {path}: {error.strerror}") from None


def _spans(result: SimulationResult) -> list[Span]:
    current: dict[int, tuple[str, float]] = {}
    spans = []
    for time, cell, role in [*result.timeline, *((result.hours, cell, "") for _, cell, _ in result.timeline)]:
        if cell in current:
            spans.append(Span(cell, current[cell][0], current[cell][1], time))
        current[cell] = ("transition" if role.startswith("to_") else role, time)
    return [span for span in spans if span.role]


def _overridden(chosen: Preset, assignments: list[str]) -> Preset:
    tree: dict[str, Any] = {}
    for assignment in assignments:
        part, dot, _ = assignment.split("=")[0].partition(".")
        assign(tree, assignment if part in PARTS and dot else f"settings.{assignment}")
    for part, values in tree.items():
        chosen = replace(chosen, **{part: _changed(getattr(chosen, part), values)})
    return chosen


def _changed(value: Any, changes: dict[str, Any]) -> Any:
    known = [field.name for field in fields(value)] if is_dataclass(value) else list(type(value).model_fields)
    for name in changes:
        if name not in known:
            raise MisuseError(f"there is no setting {name!r}; there are {', '.join(known)}")
    try:
        present = {name: getattr(value, name) for name in known}
        return TypeAdapter(type(value)).validate_python({**present, **changes})
    except ValidationError as error:
        first = error.errors()[0]
        raise MisuseError(f"setting {'.'.join(map(str, first['loc']))} refused: {first['msg']}") from None
