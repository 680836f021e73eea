"""Elastic against async and colocate, live: real runtime, proxy and harness processes over emulated cells.

    uv run python benchmarks/elastic_live.py [--hour-s 4] [--seed 0] [--steps 12] [--policies elastic,async,...]

The paper's run with a sixteenth of its executions: B=4 groups of N=8, 8 cells of 9 executions and 4 nodes, 12 steps, mean
staleness 1.5, its node-hours of training and its two-level lognormal. An hour lasts `--hour-s` seconds; the defaults take
six minutes. All policies have the same cells, costs, and executions (workload and seed). `async` (1.5, 1) waits for whole
batches, as the paper's baseline does, `async-streaming` does not; each has the split that simulates fastest with these
executions, out of all. `colocate` has no standalone pool: (0, 2E+1) = (0, 4).

An execution's time passes in a harness process that calls the proxy until its work is done; calls take their time in
emulated engines and are rerouted through the proxy's admin API, by the classes that `gyre train` uses. What the
real parts add to each operation is measured once, in an elastic run of one burst with other executions, and given to
the simulator; nothing is fitted to the compared runs. Every run is replayed, and its run log searched for losses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_run import LiveRun, Pace, run_live
from gyre_scheduler import SchedulerSettings
from gyre_scheduler.simulator import Costs, simulate
from gyre_scheduler.workloads import TwoLevelLognormal, Workload

CELLS, LIMIT, NODES = 8, 9, 4
COSTS = Costs(executions_per_node=LIMIT / NODES, micro_steps_per_group=8)
COMMON = {"group_size": 8, "groups_per_step": 4, "cells": (LIMIT,) * CELLS}
POLICIES = {
    "elastic": {"policy": "elastic", "phi": 0.5, "mu": 3},
    "async": {"policy": "async", "phi": 1.5, "mu": 1, "streaming": False},
    "async-streaming": {"policy": "async", "phi": 1.5, "mu": 1},
    "colocate": {"policy": "colocate", "phi": 0, "mu": 4},
}


@dataclass(frozen=True)
class Delayed:
    """Each execution takes longer by the same time."""

    workload: Workload
    by_hours: float

    def hours(self, seed: int, group: int, size: int) -> list[float]:
        return [hours + self.by_hours for hours in self.workload.hours(seed, group, size)]

    def query(self, seed: int, group: int) -> Hashable:
        return self.workload.query(seed, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hour-s", type=float, default=4.0, help="seconds that stand for an hour")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}")
    given = parser.parse_args()
    if unknown := set(given.policies.split(",")) - POLICIES.keys():
        parser.error(f"no policy {', '.join(sorted(unknown))}")
    asyncio.run(compare(given.policies.split(","), given.steps, given.seed, Pace(given.hour_s)))


async def compare(policies: list[str], steps: int, seed: int, pace: Pace) -> None:
    workload = TwoLevelLognormal()
    settings = {name: best(name, steps, workload, seed) for name in policies}
    say("measuring what the real parts add, in one burst")
    burst = SchedulerSettings(**COMMON, **POLICIES["elastic"], steps=3)
    overheads = (await live(burst, workload, seed + 1, pace)).overheads_s
    say("  " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in overheads.items()))
    costs, delayed = predicted_costs(overheads, pace), Delayed(workload, overheads["execution"] / pace.hour_s)
    rows = {}
    for name, chosen in settings.items():
        predicted = simulate(chosen, delayed, costs, seed).hours
        rows[name] = row = row_of(await live(chosen, workload, seed, pace), predicted, pace)
        say(f"{name:16} live {row['hours']:6.2f} h  predicted {predicted:6.2f} h  ratio {row['ratio']:.3f}")
    result = {"hour_s": pace.hour_s, "seed": seed, "steps": steps, "cores": len(os.sched_getaffinity(0))}
    result |= {"overheads_s": {name: round(seconds, 4) for name, seconds in overheads.items()}, "runs": rows}
    if "elastic" in rows:
        result["speedup"] = {
            name: speedup(row, rows["elastic"]) for name, row in rows.items() if name != "elastic"
        }
        for name, gains in result["speedup"].items():
            say(f"elastic is {gains['live']:.2f}x {name}, predicted {gains['predicted']:.2f}x")
    print(json.dumps(result))


def best(name: str, steps: int, workload: Workload, seed: int) -> SchedulerSettings:
    """The settings of a policy; for async the split of cells that is fastest in simulation."""
    base = {**COMMON, **POLICIES[name], "steps": steps}
    if base["policy"] != "async":
        return SchedulerSettings(**base)
    splits = [SchedulerSettings(**base, training_cells=cells) for cells in range(1, CELLS)]
    chosen = min(splits, key=lambda split: simulate(split, workload, COSTS, seed).hours)
    say(f"{name} does best with {chosen.training_cells} of {CELLS} cells in training")
    return chosen


async def live(settings: SchedulerSettings, workload: Workload, seed: int, pace: Pace) -> LiveRun:
    with tempfile.TemporaryDirectory() as folder:
        run = await run_live(settings, workload, COSTS, seed, pace, Path(folder))
    for fault in run.faults:
        say(f"  fault: {fault}")
    return run


def predicted_costs(overheads: dict[str, float], pace: Pace) -> Costs:
    """The emulated costs and what the real parts add."""
    added = {
        f"{name}_hours": getattr(COSTS, f"{name}_hours") + overheads[name] / pace.hour_s
        for name in ("to_training", "to_rollout", "update", "publish")
    }
    return replace(COSTS, **added)


def row_of(run: LiveRun, predicted: float, pace: Pace) -> dict:
    hours = run.seconds / pace.hour_s
    return {
        "hours": round(hours, 3),
        "predicted_hours": round(predicted, 3),
        "ratio": round(hours / predicted, 4),
        "staleness": round(run.staleness_mean, 3),
        "staleness_target": float(run.settings.staleness_target),
        "training_cells": run.settings.training_cells if run.settings.policy == "async" else None,
        "executions": run.executions,
        "switches": run.switches,
        "rerouted_calls": run.continued,
        "cpu_share": round(run.cpu_share, 3),
        "overheads_s": {name: round(seconds, 4) for name, seconds in run.overheads_s.items()},
        "faults": len(run.faults),
    }


def speedup(row: dict, elastic: dict) -> dict:
    return {
        "live": round(row["hours"] / elastic["hours"], 3),
        "predicted": round(row["predicted_hours"] / elastic["predicted_hours"], 3),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
