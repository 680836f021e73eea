"""Runs executions: a harness process each, its evaluation, its records (`gyre_scheduler.runtime.Executions`).

Invariants: every execution gets an "opened" line, a "closed" line after the last of its calls, and one designated assessment
unless it is cancelled (the run ends, or its group is complete without it); a workspace is evaluated after a timeout and
after a failure as well, for a score never depends on how the execution ended.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gyre_scheduler.dispatch import group_of
from gyre_scheduler.errors import SchedulerError, TaskError
from gyre_scheduler.evaluation import Assessment, Evaluator
from gyre_scheduler.evaluation_files import Unreadable, digest
from gyre_scheduler.executions import ExecutionFolder, Harness, HarnessEnd, run_harness
from gyre_scheduler.guard import Guard
from gyre_scheduler.history import DurationHistory
from gyre_scheduler.runtime import Report
from gyre_trajtree import Execution

from gyre_cli.config import RunConfig
from gyre_cli.errors import RunFailed
from gyre_cli.proxy import ProxyProcess
from gyre_cli.record import RunRecord
from gyre_cli.routes import Routes
from gyre_cli.sources import Task

DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
NO_CONTAINER = 125
"""Exit status of docker and podman when they could not make a container: an image that cannot be pulled, for example."""
CLOCK_MARGIN_S = 60.0
"""How much longer than the execution its key is valid, so that the harness's own time limit always comes first."""


@dataclass(frozen=True)
class DispatchedGroup:
    """A group in the queue: its task and the published version at its dispatch (v_d)."""

    task: Task
    version: int


class Rollouts:
    """The executions of one run. `fail` ends the run with an error that concerns more than one execution."""

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
        fail: Callable[[BaseException], None],
    ) -> None:
        self.groups: dict[int, DispatchedGroup] = {}
        self.launched = 0
        self.last_unresolved: str | None = None
        """Why the latest execution without a score has none."""
        self._config = config
        self._tasks = tasks
        self._history = DurationHistory()
        """Seconds of past executions by task."""
        self._coming: deque[Task] = deque()
        """Tasks of the groups that are dispatched next, as far as they were asked for already."""
        self._harness = harness
        self._evaluator = evaluator
        self._proxy = proxy
        self._routes = routes
        self._record = record
        self._folder = folder
        self._guard = guard
        self._fail = fail

    def expected(self, group: int) -> float | None:
        """Draw the task of the next group, which is this one; the mean seconds of its executions, else of all so far."""
        self._coming.append(self._next_task())
        return self._history.expected(self._coming[-1]["id"])

    async def dispatch(self, group: int, version: int, replaces: int | None) -> None:
        """Choose the next task for a group. The order of dispatch alone decides, so a seed decides the tasks."""
        task = self._coming.popleft() if self._coming else self._next_task()
        self.groups[group] = DispatchedGroup(task, version)
        self._record.event(
            "dispatch", group=group, task=self.groups[group].task["id"], version=version, replaces=replaces
        )

    def _next_task(self) -> Task:
        try:
            return next(self._tasks)
        except StopIteration:
            raise RunFailed(
                f"the task source ended after {len(self.groups)} tasks; it must not end"
            ) from None
        except Exception as error:
            raise RunFailed(f"the task source failed after {len(self.groups)} tasks: {error}") from error

    async def drop(self, group: int, reason: str) -> None:
        self._record.event("drop", group=group, reason=reason)

    async def run(self, execution: str, cell: int, report: Report) -> None:
        """Launch, wait, evaluate. What goes wrong with one execution stays with it; anything else fails the run."""
        try:
            await self._run(execution, cell, report)
        except (asyncio.CancelledError, SchedulerError):
            raise
        except Exception as error:
            self._fail(error)
            raise

    async def _run(self, execution: str, cell: int, report: Report) -> None:
        group, folder = self.groups[group_of(execution)], ExecutionFolder(self._folder / execution)
        budget = self._config.execution_budget_s
        deadline, until = time.monotonic() + budget, time.time() + budget
        self.launched += 1
        self._opened(execution, group, until)
        end = HarnessEnd("cancelled", -1, "the run ended", 0.0)
        fault = _laid_out(folder, group.task)
        try:
            if fault:
                report.launched()
                end = HarnessEnd("failed", -1, fault, 0.0)
            else:
                end = await self._harness_end(execution, cell, report, folder, deadline, until)
                fault = await asyncio.to_thread(_never_began, self._harness, end, folder, group.task)
        except Exception as error:
            end = HarnessEnd("failed", -1, str(error), 0.0)
            raise
        finally:
            try:
                await self._proxy.close_execution(execution)
            except RunFailed as error:
                self._fail(error)  # a silent proxy serves nobody, whether or not anybody else asks
            finally:
                self._closed(execution, end)
        if end.termination in ("completed", "timeout"):
            self._history.observe(group.task["id"], end.seconds)
        report.terminated(end.termination)
        if fault:  # nothing to assess: the zero-reward placeholder of section 5.2
            assessment = Assessment("placeholder", 0.0, fault, attempt=0)
        else:
            assessment = await self._assessment(group, folder, deadline)
        self._record.assessed(execution, assessment)
        report.assessed(assessment.status != "unresolved")
        if not self._config.harness.keep_workspaces:
            await asyncio.to_thread(shutil.rmtree, folder.path, ignore_errors=True)

    async def _harness_end(
        self,
        execution: str,
        cell: int,
        report: Report,
        folder: ExecutionFolder,
        deadline: float,
        until: float,
    ) -> HarnessEnd:
        """Run the harness, for no longer than leaves one evaluation its time before the deadline."""
        base_url, key = await self._proxy.register(execution, self._routes.url(cell), until + CLOCK_MARGIN_S)
        report.launched()
        left = deadline - time.monotonic() - self._config.task.evaluation_timeout_s
        limit = min(self._config.harness.timeout_s, left)
        task = self.groups[group_of(execution)].task
        return await run_harness(self._harness, folder, task, base_url, key, limit, self._guard)

    async def _assessment(
        self, group: DispatchedGroup, folder: ExecutionFolder, deadline: float
    ) -> Assessment:
        """Score the preserved workspace before the execution's deadline, however the harness ended."""
        assessed = await self._evaluator.assess(folder, group.task, deadline)
        if assessed.status == "unresolved":
            self.last_unresolved = assessed.detail
        return assessed

    def _opened(self, execution: str, group: DispatchedGroup, until: float) -> None:
        self._record.append(
            Execution(
                id=execution,
                state="opened",
                group=str(group_of(execution)),
                task=group.task["id"],
                dispatch_version=group.version,
                harness=" ".join(self._harness.command),
                prompt=group.task["prompt"],
                deadline=until,
                time=time.time(),
            )
        )

    def _closed(self, execution: str, end: HarnessEnd) -> None:
        self._record.append(
            Execution(
                id=execution, state="closed", time=time.time(), termination=end.termination, error=end.error
            )
        )


def _laid_out(folder: ExecutionFolder, task: Task) -> str | None:
    """Lay out the workspace of one execution; the reason where that is impossible. A full disk is no such reason:
    it concerns every execution and is raised."""
    try:
        ExecutionFolder.create(folder.path, task)
    except (OSError, TaskError) as error:
        if isinstance(error, OSError) and error.errno in DISK_REFUSES:
            raise
        return f"its workspace could not be laid out: {error}"
    return None


def _never_began(harness: Harness, end: HarnessEnd, folder: ExecutionFolder, task: Task) -> str | None:
    """Why a harness did nothing that could be assessed; None where it may have done something."""
    if end.termination != "failed":
        return None
    if end.seconds == 0.0:  # no process was started
        return end.error
    if harness.prefix and end.code == NO_CONTAINER and _untouched(folder, task):
        return f"its container could not be made: {end.error}"
    return None


def _untouched(folder: ExecutionFolder, task: Task) -> bool:
    """Whether the workspace is as it was laid out."""
    try:
        with TemporaryDirectory(dir=folder.path) as place:
            fresh = ExecutionFolder.create(Path(place) / "fresh", task)
            return digest(folder.workspace) == digest(fresh.workspace)
    except (Unreadable, OSError):
        return False
