"""Searches the settings of a run by simulation: the fastest schedule of a workload on given cells at a staleness target.

Every candidate streams, under boundary dispatch, and meets Eq. 2 exactly, so all of them have the same mean staleness.
Elastic ones differ in (phi, mu), launch order and whether one cell stays standalone, async ones in the split, all at mu 1;
the colocate one has phi 0. All are simulated once, the best then with more seeds. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from .comparison import Bounds, Row, bounds, compare
from .errors import SettingsError
from .presets import Preset
from .settings import SchedulerSettings

FINALISTS = 5
J_MAX_COST = {1: 0.414, 5: 0.748, 0: 1.0}
"""Forward-backward time of a step by J_max (0: all trajectories), relative to all: section 6.3."""
NOTABLE = 0.02
"""Relative gain from which something counts as what limits a run."""


@dataclass(frozen=True)
class Plan:
    """The best candidates, fastest first, and what is known of the first."""

    rows: tuple[Row, ...]
    others: tuple[Row, ...]
    """Candidates that were slower than those with one seed, and simulated with no other."""
    bounds: Bounds
    what_if: dict[str, float]
    """Hours of the first row if one thing cost nothing."""
    by_j_max: dict[int, float]
    """Hours of the first row by J_max, where the costs are those of J_max 5; 0 is all trajectories."""

    @property
    def limit(self) -> str:
        """What limits the first row most."""
        name, hours = min(self.what_if.items(), key=lambda item: item[1])
        return name if hours < self.rows[0].hours * (1 - NOTABLE) else TAIL


TRAINING, SLOTS, SWITCHES = "training work", "rollout slots", "switches"
TAIL = "the longest executions of each burst"


def plan(
    base: Preset, staleness: float, seeds: int = 3, progress: Callable[[int], None] = lambda simulations: None
) -> Plan:
    """Plan a run with the cells, batch, workload and costs of `base`.

    `progress` is called with the number of simulations that a stage takes, then with 0 after each. Raises SettingsError when
    no (phi, mu) meets the target.
    """
    candidates = dict(_candidates(base, Fraction(staleness).limit_denominator(10**6)))
    if not candidates:
        step = base.settings.groups_per_step
        raise SettingsError(
            f"no schedule has a mean staleness of {staleness:g}: phi + (mu - 1)/2 with phi >= 0, phi*{step} whole, mu >= 1"
        )
    progress(len(candidates))
    screened = sorted(compare(candidates, 1, lambda: progress(0)), key=_speed)
    best = {row.name: row.preset for row in screened[:FINALISTS]}
    progress(len(best) * seeds)
    finalists = sorted(compare(best, seeds, lambda: progress(0)), key=_speed)
    first = finalists[0].preset
    variants = _what_if(first)
    scaled = {
        j_max: replace(first, costs=_scaled(first, factor / J_MAX_COST[5]))
        for j_max, factor in J_MAX_COST.items()
        if j_max != 5
    }
    questions = {**variants, **{f"j_max {j_max}": preset for j_max, preset in scaled.items()}}
    progress(len(questions) * seeds)
    answers = {row.name: row.hours for row in compare(questions, seeds, lambda: progress(0))}
    found = [bounds(first.settings, first.workload, first.costs, seed) for seed in range(seeds)]
    mean = Bounds(sum(b.rollout for b in found) / seeds, sum(b.training for b in found) / seeds)
    return Plan(
        rows=tuple(finalists),
        others=tuple(screened[FINALISTS:]),
        bounds=mean,
        what_if={name: answers[name] for name in variants},
        by_j_max={j_max: answers.get(f"j_max {j_max}", finalists[0].hours) for j_max in J_MAX_COST},
    )


def _speed(row: Row) -> tuple[float, bool, int]:
    """By hours; of equals the simpler first."""
    settings = row.preset.settings
    return round(row.hours, 6), settings.launch_order != "fifo", settings.standalone


def _candidates(base: Preset, staleness: Fraction) -> Iterator[tuple[str, Preset]]:
    """(name, preset) of every schedule worth a look."""
    cells = base.settings.cells
    for phi, mu in _depths(staleness, base.settings.groups_per_step):
        depth = f"phi {float(phi):g}, mu {mu}"
        for order in ("fifo", "longest"):
            name = f"elastic, {depth}" + (", longest first" if order == "longest" else "")
            elastic = dict(policy="elastic", launch_order=order)
            yield name, _with(base, phi, mu, **elastic)
            if len(cells) > 2:
                *kept, last = cells
                kept_back = dict(cells=tuple(kept), standalone=base.settings.standalone + last)
                yield f"{name}, one cell standalone", _with(base, phi, mu, **elastic, **kept_back)
        if mu == 1:
            for training in range(1, len(cells)):
                name = f"async, {depth}, {training} of {len(cells)} cells train"
                yield name, _with(base, phi, mu, policy="async", training_cells=training)
        if phi == 0:
            yield f"colocate, {depth}", _with(base, phi, mu, policy="colocate")


def _depths(staleness: Fraction, groups_per_step: int) -> Iterator[tuple[Fraction, int]]:
    """All (phi, mu) of Eq. 2, mu descending, whose phi*B is whole."""
    for mu in range(int(2 * staleness) + 1, 0, -1):
        phi = staleness - Fraction(mu - 1, 2)
        if (phi * groups_per_step).denominator == 1:
            yield phi, mu


def _with(base: Preset, phi: Fraction, mu: int, **changes: object) -> Preset:
    plain = {"streaming": True, "launch_order": "fifo", "dispatch": "boundary", "training_cells": 1}
    values = base.settings.model_dump() | plain | {"phi": float(phi), "mu": mu, **changes}
    return replace(base, settings=SchedulerSettings(**values), paper_hours=None)


def _scaled(preset: Preset, factor: float):
    return replace(preset.costs, node_hours_per_step=preset.costs.node_hours_per_step * factor)


def _what_if(preset: Preset) -> dict[str, Preset]:
    """The preset with one thing after another free."""
    settings, costs = preset.settings, preset.costs
    enough = settings.queue_depth * settings.group_size
    wide = {
        "cells": tuple(cell * enough for cell in settings.cells),
        "standalone": settings.standalone * enough,
    }
    nothing = dict.fromkeys(("to_training_hours", "to_rollout_hours", "update_hours", "publish_hours"), 0.0)
    return {
        TRAINING: replace(preset, costs=_scaled(preset, 0.0)),
        SLOTS: replace(
            preset,
            settings=settings.model_copy(update=wide),
            costs=replace(costs, executions_per_node=costs.executions_per_node * enough),
        ),
        SWITCHES: replace(preset, costs=replace(costs, **nothing)),
    }
