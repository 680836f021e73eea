"""Simulated runs side by side, and the bounds that no schedule of them can beat. Pure.

Every row meets the same executions: a workload depends on the seed and the group alone. A row's hours are the mean over
its seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from .dispatch import groups_of_run
from .errors import SettingsError
from .presets import Preset
from .settings import SchedulerSettings
from .simulator import Costs, SimulationResult, simulate
from .workloads import Workload


@dataclass(frozen=True)
class Row:
    """One preset, simulated with `seeds` seeds."""

    name: str
    preset: Preset
    results: tuple[SimulationResult, ...]

    @property
    def hours(self) -> float:
        return fmean(result.hours for result in self.results)

    @property
    def spread(self) -> float:
        """Hours between the slowest and the fastest seed."""
        hours = [result.hours for result in self.results]
        return max(hours) - min(hours)

    @property
    def utilisation(self) -> float:
        return fmean(result.utilisation for result in self.results)

    @property
    def staleness_mean(self) -> float:
        return fmean(result.staleness_mean for result in self.results)

    @property
    def error(self) -> float | None:
        """Relative to the paper's hours; None where it gives none."""
        return self.hours / self.preset.paper_hours - 1 if self.preset.paper_hours else None


def compare(
    presets: Mapping[str, Preset], seeds: int, progress: Callable[[], None] = lambda: None
) -> list[Row]:
    """Simulate each preset with seeds 0..seeds-1; `progress` is called after each simulation."""
    if seeds < 1:
        raise SettingsError(f"seeds must be at least 1, not {seeds}")
    rows = []
    for name, preset in presets.items():
        results = []
        for seed in range(seeds):
            results.append(simulate(preset.settings, preset.workload, preset.costs, seed))
            progress()
        rows.append(Row(name, preset, tuple(results)))
    return rows


@dataclass(frozen=True)
class Deviation:
    """How far a comparison is from the paper's hours."""

    rms: float
    worst: float
    same_order: bool
    """Whether the rows are as fast and as slow, in this order, as in the paper."""


def deviation(rows: list[Row]) -> Deviation | None:
    """None for rows of which the paper gives no hours."""
    known = [row for row in rows if row.error is not None]
    if not known:
        return None
    found = [row.error for row in known]
    by_paper = sorted(known, key=lambda row: row.preset.paper_hours)
    return Deviation(
        rms=math.sqrt(fmean(error * error for error in found)),
        worst=max(map(abs, found)),
        same_order=by_paper == sorted(known, key=lambda row: row.hours),
    )


@dataclass(frozen=True)
class Bounds:
    """Hours below which no schedule of these executions on these nodes can get, whatever its policy."""

    rollout: float
    """Every node rolls out all the time, training is free."""
    training: float
    """Every node trains all the time, rollouts are free."""

    @property
    def work(self) -> float:
        """Both must be done by the same nodes."""
        return self.rollout + self.training


def bounds(settings: SchedulerSettings, workload: Workload, costs: Costs, seed: int = 0) -> Bounds:
    """Bounds of one run, replacements of untrainable groups apart.

    Which groups and which members are outstanding at the end is up to the schedule, so the longest are left out.
    """
    size, surplus = settings.group_size, settings.oversample
    groups = sorted(
        sum(sorted(workload.hours(seed, group, size + surplus))[:size])
        for group in range(groups_of_run(settings))
    )
    slots = sum(settings.cells) + settings.standalone
    work = sum(groups[: settings.steps * settings.groups_per_step])
    return Bounds(work / slots, settings.steps * costs.node_hours_per_step / costs.nodes(slots))
