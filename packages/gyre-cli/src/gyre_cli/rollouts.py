"""Runs executions: a harness process each, its evaluation, its records (`gyre_scheduler.runtime.Executions`).

Invariants: every launched execution gets an "opened" and a "closed" line, also when it is cancelled, and one designated
assessment unless it is; a workspace is evaluated after a timeout and after a failure as well, for a score never depends on
how the execution ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_scheduler.evaluation import Evaluator
from gyre_scheduler.executions import ExecutionFolder, Harness, HarnessEnd, run_harness
from gyre_scheduler.guard import Guard
from gyre_scheduler.runtime import Report
from gyre_trajtree import Assessment, Execution

from gyre_cli.config import RunConfig
from gyre_cli.proxy import ProxyProcess
from gyre_cli.record import RunRecord
from gyre_cli.routes import Routes
from gyre_cli.sources import Task


@dataclass(frozen=True)
class DispatchedGroup:
    """A group in the queue: its task and the published version at its dispatch (v_d)."""

    task: Task
    version: int


class Rollouts:
    """The executions of one run."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Iterator[Task],
        harness: Harness,
        evaluator: Evaluator,
        proxy: ProxyProcess,
        routes: Routes,
        record: RunRecord,
        folder: Path,
        guard: Guard,
    ) -> None:
        self.groups: dict[int, DispatchedGroup] = {}
        self.launched = 0
        self.last_unresolved: str | None = None
        """Why the latest execution without a score has none."""
        self._config = config
        self._tasks = tasks
        self._harness = harness
        self._evaluator = evaluator
        self._proxy = proxy
        self._routes = routes
        self._record = record
        self._folder = folder
        self._guard = guard

    async def dispatch(self, group: int, version: int, replaces: int | None) -> None:
        """Choose the next task for a group. The order of dispatch alone decides, so a seed decides the tasks."""
        self.groups[group] = DispatchedGroup(next(self._tasks), version)
        self._record.event(
            "dispatch", group=group, task=self.groups[group].task["id"], version=version, replaces=replaces
        )

    async def drop(self, group: int, reason: str) -> None:
        self._record.event("drop", group=group, reason=reason)

    async def run(self, execution: str, cell: int, report: Report) -> None:
        """Launch, wait, evaluate; the budget covers the harness and every attempt of its evaluation."""
        group = self.groups[group_of(execution)]
        budget = self._config.harness.timeout_s
        evaluation = self._config.task.evaluation_timeout_s * self._config.task.evaluation_attempts
        deadline = time.monotonic() + budget + evaluation
        folder = ExecutionFolder.create(self._folder / execution, group.task)
        self.launched += 1
        base_url, key = await self._proxy.register(
            execution, self._routes.url(cell), time.time() + budget + evaluation
        )
        self._opened(execution, group, time.time() + budget)
        report.launched()
        end = HarnessEnd("cancelled", -1, "the run ended", 0.0)
        try:
            end = await run_harness(self._harness, folder, group.task, base_url, key, budget, self._guard)
        finally:
            self._closed(execution, end)
        await self._proxy.close_execution(execution)
        report.terminated(end.termination)
        assessed = await self._evaluator.assess(folder, group.task, deadline)
        self._record.append(
            Assessment(
                execution=execution,
                status=assessed.status,
                score=assessed.score,
                artifact=str(folder.workspace) if self._config.harness.keep_workspaces else None,
                attempt=assessed.attempt,
                detail=assessed.detail,
                time=time.time(),
            )
        )
        if assessed.status == "unresolved":
            self.last_unresolved = assessed.detail
        if not self._config.harness.keep_workspaces:
            await asyncio.to_thread(folder.discard)
        report.assessed(assessed.status == "valid")

    def _opened(self, execution: str, group: DispatchedGroup, deadline: float) -> None:
        self._record.append(
            Execution(
                id=execution,
                state="opened",
                group=str(group_of(execution)),
                task=group.task["id"],
                dispatch_version=group.version,
                harness=Path(self._config.harness.command[-1]).name,
                deadline=deadline,
                time=time.time(),
            )
        )

    def _closed(self, execution: str, end: HarnessEnd) -> None:
        self._record.append(
            Execution(
                id=execution, state="closed", time=time.time(), termination=end.termination, error=end.error
            )
        )


def group_of(execution: str) -> int:
    """The group's number in an execution's name, g<group>-<member>."""
    return int(execution[1:].split("-")[0])
