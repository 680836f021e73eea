"""How much faster than the paper's elastic schedule longest-first launches are, and how far both are from the bound.

    python benchmarks/schedule_policies.py [--seeds 4] [--queries 64 128 256 400 0]

For each workload at its mean staleness: the paper's elastic schedule, then every (phi, mu) of Eq. 2 in both launch orders,
by the number of queries in the data set (0: none comes twice, so nothing is ever known). `gain` is hours of the paper's
schedule over hours, less 1; `to_bound` how far hours are above those of fully used nodes. The last line is one JSON object.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean

from gyre_scheduler.comparison import bounds
from gyre_scheduler.presets import PRESETS
from gyre_scheduler.simulator import simulate

RUNS = (
    "nl2repo-elastic-1.5",
    "nl2repo-elastic-1",
    "deepswe-elastic-1.5",
    "deepswe-elastic-1",
    "2.4t-elastic-1.5",
)
ORDERS = ("fifo", "longest")

Job = tuple[str, int, float, int, str, int]
"""Preset, queries, phi, mu, launch order, seed."""


def hours(job: Job) -> tuple[float, float]:
    """Simulated hours, and the bound."""
    name, queries, phi, mu, order, seed = job
    preset = PRESETS[name]
    workload = replace(preset.workload, queries=queries)
    settings = preset.settings.model_copy(update={"phi": phi, "mu": mu, "launch_order": order})
    return (
        simulate(settings, workload, preset.costs, seed).hours,
        bounds(settings, workload, preset.costs, seed).work,
    )


def depths(name: str) -> list[tuple[float, int]]:
    """(phi, mu) with the preset's mean staleness."""
    target = float(PRESETS[name].settings.staleness_target)
    return [(target - (mu - 1) / 2, mu) for mu in range(1, int(2 * target) + 2)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=4, help="workloads; hours are their mean")
    options.add_argument("--queries", type=int, nargs="+", default=[64, 128, 256, 400, 0])
    chosen = options.parse_args()
    jobs = [
        (name, queries, phi, mu, order, seed)
        for name in RUNS
        for queries in chosen.queries
        for phi, mu in depths(name)
        for order in ORDERS
        for seed in range(chosen.seeds)
    ]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(jobs, pool.map(hours, jobs, chunksize=4), strict=True))
    report = {}
    for name in RUNS:
        settings = PRESETS[name].settings
        for queries in chosen.queries:
            rows = {}
            for phi, mu in depths(name):
                for order in ORDERS:
                    runs = [found[name, queries, phi, mu, order, seed] for seed in range(chosen.seeds)]
                    took, bound = fmean(run[0] for run in runs), fmean(run[1] for run in runs)
                    rows[f"phi {phi:g} mu {mu} {order}"] = (took, took / bound - 1)
            paper = rows[f"phi {settings.phi:g} mu {settings.mu} fifo"][0]
            best = min(rows, key=lambda row: rows[row][0])
            report[f"{name}, {queries or 'no'} queries"] = {
                "best": best,
                "best_gain": round(paper / rows[best][0] - 1, 4),
                **{
                    row: {
                        "hours": round(took, 2),
                        "gain": round(paper / took - 1, 4),
                        "to_bound": round(away, 4),
                    }
                    for row, (took, away) in rows.items()
                },
            }
            print(f"{name}, {queries or 'no'} queries: {best}, {paper / rows[best][0] - 1:+.1%}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
