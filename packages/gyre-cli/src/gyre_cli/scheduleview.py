"""What `gyre schedule` shows: one simulated run, runs side by side, a plan; for machines, for terminals, as pages."""

from __future__ import annotations

from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from gyre_scheduler.comparison import Bounds, Row, deviation
from gyre_scheduler.planning import Plan
from gyre_scheduler.presets import FITTED, Preset
from gyre_scheduler.simulator import SimulationResult
from rich.console import Console
from rich.table import Table

from gyre_cli.charts import Span, line_chart, page, role_timeline
from gyre_cli.errors import MisuseError


def comparison_figures(rows: list[Row], fitted: bool) -> dict[str, Any]:
    """A comparison for machines. `fitted`: it is one of the paper's, with its calibration."""
    found = deviation(rows)
    return {
        "rows": [
            {
                "name": row.name,
                "policy": row.preset.settings.policy,
                "hours": row.hours,
                "paper_hours": row.preset.paper_hours,
                "error": row.error,
                "spread": row.spread,
                "staleness_mean": row.staleness_mean,
                "staleness_target": float(row.preset.settings.staleness_target),
                "utilisation": row.utilisation,
            }
            for row in rows
        ],
        "rms_error": found.rms if found else None,
        "worst_error": found.worst if found else None,
        "same_order": found.same_order if found else None,
        "fitted": FITTED if fitted else {},
    }


def show_comparison(rows: list[Row]) -> None:
    """Print runs side by side."""
    console = Console()
    console.print(_comparison_table(rows))
    if found := deviation(rows):
        order = "the paper's order" if found.same_order else "not the paper's order"
        console.print(
            f"against the paper: RMS error {found.rms:.1%}, worst {found.worst:.1%}, {order}", style="dim"
        )


def _comparison_table(rows: list[Row]) -> Table:
    table = Table(box=None, padding=(0, 1))
    fastest = min(row.hours for row in rows)
    for heading in _headings(fastest):
        table.add_column(heading, justify="left" if heading in ("run", "policy") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_columns(row, fastest))
    return table


def _headings(fastest: float) -> tuple[str, ...]:
    return ("run", "policy", _unit(fastest)[0], "paper", "error", "ratio", "staleness", "used")


def _unit(hours: float) -> tuple[str, float]:
    """What times of this size are told in, and how much of it is an hour."""
    return ("hours", 1.0) if hours >= 1 else ("seconds", 3600.0)


def _columns(row: Row, fastest: float) -> list[str]:
    settings, paper = row.preset.settings, row.preset.paper_hours
    return [
        row.name,
        settings.policy,
        f"{row.hours * _unit(fastest)[1]:.2f}",
        f"{paper:g}" if paper else "",
        f"{row.error:+.1%}" if row.error is not None else "",
        f"{row.hours / fastest:.2f}",
        f"{row.staleness_mean:.2f}/{float(settings.staleness_target):g}",
        f"{row.utilisation:.1%}",
    ]


def write_comparison(path: Path, title: str, rows: list[Row]) -> None:
    """Write a comparison as a page: the figures, and the roles of each run's cells (the paper's Figure 1)."""
    fastest = min(row.hours for row in rows)
    lines = ["".join(f"<th>{heading}</th>" for heading in _headings(fastest))]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in _columns(row, fastest)) for row in rows]
    sections = [("Figures", "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>")]
    longest = max(row.results[0].hours for row in rows)
    for row in rows:
        cells = len(row.preset.settings.cells)
        sections.append((row.name, role_timeline(_spans(row.results[0]), cells, longest, unit="hours")))
    _write(path, page(f"Schedules side by side: {title}", sections))


def plan_figures(found: Plan) -> dict[str, Any]:
    """A plan for machines."""
    best = found.rows[0]
    return {
        "best": {
            "name": best.name,
            "hours": best.hours,
            "utilisation": best.utilisation,
            "staleness_mean": best.staleness_mean,
            "staleness_target": float(best.preset.settings.staleness_target),
            "settings": best.preset.settings.model_dump(mode="json"),
        },
        "limit": found.limit,
        "what_if_free": found.what_if,
        "hours_by_j_max": {str(j_max or "all"): hours for j_max, hours in found.by_j_max.items()},
        "bounds": _bound_figures(found.bounds),
        "rows": [
            {"name": row.name, "hours": row.hours, "utilisation": row.utilisation} for row in found.rows
        ],
    }


def _bound_figures(found: Bounds) -> dict[str, float]:
    return {"rollout_only": found.rollout, "training_only": found.training, "work": found.work}


def show_plan(found: Plan) -> None:
    """Print the recommendation, what limits it, and the bounds."""
    best, console = found.rows[0], Console()
    settings, bound = best.preset.settings, found.bounds
    unit, factor = _unit(best.hours)

    def told(hours: float) -> str:
        return f"{hours * factor:.2f}"

    table = Table(box=None, padding=(0, 1))
    for heading in ("schedule", unit, "ratio", "used"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for row in found.rows:
        table.add_row(row.name, told(row.hours), f"{row.hours / best.hours:.2f}", f"{row.utilisation:.1%}")
    console.print(table)
    if found.others:
        console.print(f" … {len(found.others)} others were slower in a first simulation", style="dim")
    facts = Table(box=None, show_header=False, padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_row("best", f"{best.name}: {told(best.hours)} {unit} for {settings.steps} steps")
    facts.add_row(
        "staleness", f"{best.staleness_mean:.2f} of {float(settings.staleness_target):g} (a run begins below)"
    )
    facts.add_row("what limits it", found.limit)
    for name, hours in found.what_if.items():
        facts.add_row(f"  {name} for free", f"{told(hours)} {unit}")
    shown = ", ".join(f"{j_max or 'all'}: {told(hours)}" for j_max, hours in found.by_j_max.items())
    facts.add_row("by J_max", f"{shown} (the costs are those of 5)")
    floors = f"rollouts {told(bound.rollout)} + training {told(bound.training)}"
    facts.add_row("no schedule beats", f"{told(bound.work)} {unit} ({floors})")
    facts.add_row("settings", ", ".join(f"{name}={value}" for name, value in _chosen_settings(best).items()))
    console.print(facts)


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


def _chosen_settings(row: Row) -> dict[str, Any]:
    """What a plan chose, as far as it concerns the policy."""
    settings = row.preset.settings
    chosen = {"policy": settings.policy, "phi": f"{settings.phi:g}", "mu": settings.mu}
    if settings.policy == "async":
        chosen["training_cells"] = settings.training_cells
    if settings.policy == "elastic":
        chosen["launch_order"] = settings.launch_order
    return chosen | ({"standalone": settings.standalone} if settings.standalone else {})


def write_simulation(path: Path, name: str, chosen: Preset, result: SimulationResult) -> None:
    """Write roles and waterlevel over time as one page (the paper's Figures 1 and 6)."""
    cells = len(chosen.settings.cells)
    rows = "".join(f"<tr><th>{key}</th><td>{value}</td></tr>" for key, value in _readable(result).items())
    shares = {cell: f"{share:.1%}" for cell, share in enumerate(result.training_share)}
    trained = "".join(f"<tr><th>{cell or 'core'}</th><td>{share}</td></tr>" for cell, share in shares.items())
    sections = [
        ("Figures", f"<table>{rows}</table>"),
        ("Share of the time in training, by cell", f"<table>{trained}</table>"),
        ("Roles of the cells", role_timeline(_spans(result), cells, result.hours, unit="hours")),
        (
            "Waterlevel",
            line_chart({"waterlevel": result.waterlevel}, "hours", "executions queued or running"),
        ),
    ]
    _write(path, page(f"Simulated schedule {name}", sections))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise MisuseError(f"the page cannot be written to {path}: {error.strerror}") from None


def _spans(result: SimulationResult) -> list[Span]:
    current: dict[int, tuple[str, float]] = {}
    spans = []
    for moment, cell, role in [
        *result.timeline,
        *((result.hours, cell, "") for _, cell, _ in result.timeline),
    ]:
        if cell in current:
            spans.append(Span(cell, current[cell][0], current[cell][1], moment))
        current[cell] = ("transition" if role.startswith("to_") else role, moment)
    return [span for span in spans if span.role]
