"""How long a simulated run of 48 steps takes, and how the simulator agrees with the paper's Table 1.

    python benchmarks/simulator.py [--repeats 5] [--seeds 4]

`seconds` is the median time of one run of 48 steps of 512 executions under each policy. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time

from gyre_scheduler.comparison import compare, deviation
from gyre_scheduler.presets import COMPARISONS, TABLE1
from gyre_scheduler.simulator import simulate


def seconds(name: str, repeats: int) -> float:
    """Median time of a simulation, after one that is not counted."""
    preset, taken = COMPARISONS["nl2repo"][name], []
    for repeat in range(repeats + 1):
        begun = time.perf_counter()
        simulate(preset.settings, preset.workload, preset.costs, repeat)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--seeds", type=int, default=4, help="workloads of each row of Table 1")
    chosen = options.parse_args()
    taken = {
        policy: round(seconds(f"{policy}-1.5", chosen.repeats), 3)
        for policy in ("elastic", "async", "colocate")
    }
    rows = compare(TABLE1, chosen.seeds)
    found = deviation(rows)
    table1 = {"rms_error": found.rms, "worst_error": found.worst, "same_order": found.same_order}
    hours = {row.name: [round(row.hours, 2), row.preset.paper_hours] for row in rows}
    print(json.dumps({"seconds": taken, "table1": table1, "hours": hours}))


if __name__ == "__main__":
    main()
