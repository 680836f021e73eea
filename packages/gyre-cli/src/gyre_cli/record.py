"""What the driver itself writes into a run directory: its lines of run.jsonl, and metrics.jsonl.

Invariant: a line is in the file before anything acts on it. A full disk fails the run with one clear line, and both files
stay readable.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
from gyre_scheduler.evaluation import Assessment as Assessed
from gyre_scheduler.evaluation import Intermediate
from gyre_trajtree import Assessment, Event, RunLogWriter


class RunRecord:
    """The driver's writer of one run directory. Raises RunLogFull or OSError where the disk refuses."""

    def __init__(self, run_dir: Path, meta: dict[str, Any]) -> None:
        self.path = run_dir / "run.jsonl"
        self._log = RunLogWriter(self.path, meta)
        self._metrics = (run_dir / "metrics.jsonl").open("ab", buffering=0)

    def append(self, record: Any) -> None:
        """Append an execution, assessment or event record."""
        self._log.append(record)

    def assessed(self, execution: str, found: Assessed, designated: bool = True) -> None:
        """Append an assessment: what it says of earlier states first, each with the reference of its own state."""
        for each in found.intermediate:
            branch = {} if each.branch is None else {"branch": each.branch}
            self._assessment(execution, each, found.attempt, False, branch)
        self._assessment(execution, found, found.attempt, designated, {})

    def _assessment(
        self,
        execution: str,
        of: Assessed | Intermediate,
        attempt: int,
        designated: bool,
        extra: dict[str, str],
    ) -> None:
        self._log.append(
            Assessment(
                execution,
                of.status,
                of.score,
                artifact=of.artifact,
                attempt=attempt,
                detail=of.detail,
                designated=designated,
                time=time.time(),
                extra=extra,
            )
        )

    def event(self, name: str, **fields: Any) -> None:
        """Append an event that happened now."""
        self._log.append(Event(name, time.time(), fields))

    def metrics(self, row: dict[str, Any]) -> None:
        """Append one row of metrics.jsonl."""
        self._metrics.write(orjson.dumps(row) + b"\n")

    def close(self) -> None:
        self._log.close()
        self._metrics.close()
