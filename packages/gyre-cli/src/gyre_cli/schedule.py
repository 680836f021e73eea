"""`gyre schedule`: the live scheduler on a virtual clock. One run, runs side by side, and the search for the best one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gyre_scheduler.comparison import Row, compare
from gyre_scheduler.dispatch import groups_of_run
from gyre_scheduler.errors import RunAborted, SchedulerError
from gyre_scheduler.planning import Plan, plan
from gyre_scheduler.presets import COMPARISONS, PRESETS, Preset, comparison, preset
from gyre_scheduler.simulator import SimulationResult, simulate
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress

from gyre_cli.config import assign
from gyre_cli.durations import load_workload
from gyre_cli.errors import CommandError, MisuseError
from gyre_cli.runlogs import LINE_EVERY_S, refuse_existing

PARTS = ("settings", "workload", "costs")
MOST_EVENTS = 5_000_000
"""Some minutes of simulation."""
SEARCHED = ("policy", "phi", "mu", "launch_order", "training_cells", "streaming", "dispatch")
"""Settings that a plan chooses."""


def run_simulation(
    name: str, assignments: list[str], seed: int, workload: Path | None = None
) -> tuple[Preset, SimulationResult]:
    """Simulate a preset with overrides: a setting of the scheduler, or `workload.x=`, `costs.x=`."""
    chosen = chosen_preset(name, assignments, workload)
    console = Console(stderr=True)
    with _one_line(), console.status("simulating") if console.is_terminal else nullcontext():
        return chosen, simulate(chosen.settings, chosen.workload, chosen.costs, seed)


def chosen_preset(name: str, assignments: list[str], workload: Path | None = None) -> Preset:
    """The preset of that name with overrides, and with the workload of a file if there is one."""
    with _one_line():
        return _checked(_overridden(preset(name), assignments, workload))


@contextmanager
def _one_line() -> Iterator[None]:
    """What the scheduler refuses is misuse, a simulated run that it aborts a failure."""
    try:
        yield
    except RunAborted as error:
        raise CommandError(f"the simulated run was aborted: {error}") from None
    except SchedulerError as error:
        raise MisuseError(str(error)) from None


def _checked(chosen: Preset) -> Preset:
    settings = chosen.settings
    groups = groups_of_run(settings)
    events = groups * max(settings.group_size + settings.oversample, chosen.costs.micro_steps_per_group)
    if events > MOST_EVENTS:
        raise MisuseError(
            f"{events:,} executions or micro-steps are more than the {MOST_EVENTS:,} one simulation may have"
        )
    return chosen


def run_comparison(
    names: list[str], assignments: list[str], seeds: int, workload: Path | None = None
) -> list[Row]:
    """Simulate the rows of a comparison, or presets, side by side, each with the same overrides."""
    mixed = COMPARISONS.keys() & names
    if mixed and len(names) > 1:
        raise MisuseError(f"{mixed.pop()} is a comparison of its own; name it alone, or presets only")
    if len(set(names)) < len(names):
        raise MisuseError("a preset is named twice; name each once")
    if unknown := [name for name in names if name not in COMPARISONS and name not in PRESETS]:
        known = f"comparisons {', '.join(COMPARISONS)}; presets {', '.join(sorted(PRESETS))}"
        raise MisuseError(f"nothing is called {unknown[0]!r}; there are {known}")
    with _one_line():
        rows = comparison(names[0]) if mixed else {name: preset(name) for name in names}
        chosen = {name: _checked(_overridden(row, assignments, workload)) for name, row in rows.items()}
        with _progress("simulating") as advance:
            advance(len(chosen) * seeds)
            return compare(chosen, seeds, lambda: advance(0))


def run_plan(chosen: Preset, staleness: float, seeds: int) -> Plan:
    """Search the fastest schedule for the preset's cells, batch, workload and costs."""
    with _one_line(), _progress("simulating") as advance:
        return plan(chosen, staleness, seeds, advance)


def refuse_searched(assignments: list[str]) -> None:
    """Raise MisuseError for an override of what a plan searches."""
    for assignment in assignments:
        name = assignment.split("=")[0].removeprefix("settings.")
        if name in SEARCHED:
            raise MisuseError(
                f"a plan searches {name} itself (all of {', '.join(SEARCHED)}); leave it out of --set"
            )


@contextmanager
def _progress(doing: str) -> Iterator[Any]:
    """Progress on standard error: called with how much is to come, or with 0 for one more that is done."""
    console, total, done, last = Console(stderr=True), 0, 0, time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)

        def advance(more: int) -> None:
            nonlocal total, done, last
            total, done = total + more, done + (not more)
            bar.update(task, total=total, completed=done)
            if not console.is_terminal and time.monotonic() - last > LINE_EVERY_S:
                last = time.monotonic()
                print(f"{doing}: {done} of {total} runs", file=sys.stderr, flush=True)

        yield advance


def check_page(page: Path | None, workload: Path | None) -> None:
    """Raise MisuseError before any work for a page that cannot be written, or that would take the place of the workload."""
    if page is not None:
        refuse_existing(page, force=True, log=workload)


def _overridden(chosen: Preset, assignments: list[str], workload: Path | None) -> Preset:
    if workload is not None:
        chosen = replace(chosen, workload=load_workload(workload))
    if assignments or workload is not None:
        chosen = replace(chosen, paper_hours=None)
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
