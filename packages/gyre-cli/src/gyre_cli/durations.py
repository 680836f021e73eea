"""Durations of real executions as a simulated workload: of a run log, or of a JSON file of samples."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import orjson
from gyre_scheduler.errors import SchedulerError
from gyre_scheduler.simulator import SECOND
from gyre_scheduler.workloads import SampledGroups
from gyre_trajtree.errors import RunLogCorrupt

from gyre_cli.errors import MisuseError
from gyre_cli.runlogs import opened, warn_of


def load_workload(path: Path) -> SampledGroups:
    """The workload that a file holds.

    A JSON list of lists gives hours, a list for each query: [[1.5, 2.0], [0.7]]. A run log gives the time between the
    opening and the closing of each execution, by task; executions that were cancelled or are still open tell nothing.
    """
    try:
        groups = _samples(path) if path.suffix == ".json" else _recorded(path)
        return SampledGroups(tuple(map(tuple, groups)))
    except SchedulerError as error:
        raise MisuseError(f"{path}: {error}") from None


def _samples(path: Path) -> list[list[float]]:
    try:
        groups = orjson.loads(path.read_bytes())
    except OSError as error:
        raise MisuseError(f"{path} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise MisuseError(f"{path} is not JSON: {error}") from None
    lists = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if not lists or not all(type(hours) in (int, float) for group in groups for hours in group):
        raise MisuseError(f"{path} must hold a list of lists of hours, as [[1.5, 2.0], [0.7]]")
    return groups


def _recorded(path: Path) -> list[list[float]]:
    by_query: dict[str, list[float]] = defaultdict(list)
    corrupt: list[RunLogCorrupt] = []
    with opened(path, corrupt) as index:
        for execution in index.outlines():
            first = next((state for state in execution.states if state.state == "opened"), None)
            last = execution.states[-1] if execution.closed else None
            if first is None or last is None or last.termination == "cancelled":
                continue
            if first.time is not None and last.time is not None and last.time > first.time:
                query = first.task or first.group or execution.id
                by_query[query].append((last.time - first.time) * SECOND)
    warn_of(corrupt)
    if not by_query:
        raise MisuseError(
            f"{path} holds no execution that was opened and closed; simulate with a preset's workload"
        )
    return list(by_query.values())
