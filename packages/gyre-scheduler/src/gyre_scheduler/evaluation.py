"""Assessment of preserved work: one score in [0, 1], or unresolved with a reason, of a state that has a name (section 5.2).

An evaluator is a Python function, a command, an HTTP service or a model as judge; `evaluation_function`,
`evaluation_command`, `evaluation_http` and `evaluation_judge` run them. A failure (exception, time limit, no number, out of
range) is never a zero: it leaves the assessment unresolved and is retried on the same workspace within the deadline. An
answer that comes later still is handed on and changes nothing.

Harnesses of other executions still run meanwhile, as the same user, so nothing of an evaluation is written to a named file:
tasks go through standard input or a request, what an evaluator says stays in memory.
"""

from __future__ import annotations

import asyncio
import math
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from .errors import EvaluatorNotFound, SettingsError, Unresolved
from .evaluation_answers import Intermediate, Scoring, Verdict, Work, clean
from .evaluation_command import Command
from .evaluation_files import Unreadable, digest
from .evaluation_function import Function
from .evaluation_http import Service, Unavailable
from .evaluation_judge import Judge
from .evaluation_settings import EvaluatorSpec, JudgeSettings, checked_url, is_url
from .executions import ExecutionFolder
from .guard import Guard

__all__ = ["Assessment", "Evaluator", "EvaluatorSpec", "Intermediate", "JudgeSettings"]


@dataclass(frozen=True, slots=True)
class Assessment:
    """The designated assessment of an execution. `score` is None exactly when it is unresolved."""

    status: Literal["valid", "unresolved", "placeholder"]
    """A placeholder has score 0: the execution left nothing that could be assessed."""
    score: float | None
    detail: str | None
    attempt: int
    """The attempt that gave it, from 1; 0 when there was none."""
    artifact: str | None = None
    """What was assessed: the evaluator's own reference, else the digest of the workspace before the first attempt
    (`evaluation_files.digest`)."""
    intermediate: tuple[Intermediate, ...] = ()
    """Assessments of earlier states, which the evaluator gave along with it."""


class Evaluator:
    """Assesses workspaces with one evaluator: `async with Evaluator("module:function") as evaluator`."""

    def __init__(
        self,
        spec: EvaluatorSpec,
        timeout_s: float = 20.0,
        attempts: int = 2,
        workers: int = 2,
        guard: Guard | None = None,
        late: Callable[[str, Assessment], None] | None = None,
    ):
        """`spec`: "module:function", a command with placeholders {python} {workspace}, a service's URL, or a judge.

        `timeout_s` bounds each of at most `attempts` attempts; at most `workers` evaluations run at a time. With a
        `guard` a command also ends when this process is killed; functions do in any case. `late` takes the execution's name
        and an assessment that came after the one that counts.
        """
        if not 0 < timeout_s < math.inf or attempts < 1 or workers < 1:
            raise SettingsError(
                "an evaluator needs a finite timeout_s above 0, attempts and workers of 1 or more"
            )
        self.timeout_s = timeout_s
        self.attempts = attempts
        self._late = late
        self._slots = asyncio.Semaphore(workers)
        self._scoring = _scoring(spec, workers, guard)

    async def __aenter__(self) -> Evaluator:
        try:
            await self._scoring.check()
        except BaseException:
            await self._scoring.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._scoring.close()

    async def assess(self, folder: ExecutionFolder, task: Mapping[str, Any], deadline: float) -> Assessment:
        """Score what an execution left; `deadline` is the end of its whole budget on `time.monotonic()`.

        Waiting for one of the `workers` counts against it. The name of the folder is the execution's.
        """
        if not _is_folder(folder.workspace):
            return Assessment("placeholder", 0.0, "the execution left no workspace", 0)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._slots.acquire()
        except TimeoutError:
            return Assessment("unresolved", None, "no evaluator was free within the execution's budget", 0)
        try:
            artifact = await _artifact(folder.workspace, deadline)
            return await self._assess(Work(folder.workspace, task, folder.path.name, 1), artifact, deadline)
        finally:
            self._slots.release()

    async def _assess(self, first: Work, artifact: str | None, deadline: float) -> Assessment:
        detail, attempt = "the execution's budget left no time for an evaluation", 0
        while attempt < self.attempts and time.monotonic() < deadline:
            attempt += 1
            last = attempt == self.attempts or time.monotonic() + self.timeout_s >= deadline
            work = replace(
                first, attempt=attempt, late=self._taker(first, attempt, artifact) if last else None
            )
            try:
                found = await self._scoring.score(work, self.timeout_s, deadline)
                return _valid(found, attempt, artifact)
            except Unresolved as reason:
                detail = str(reason)
                wait_s = reason.wait_s(attempt) if isinstance(reason, Unavailable) else 0.0
            if wait_s >= deadline - time.monotonic():
                break
            if attempt < self.attempts:
                await asyncio.sleep(wait_s)
        return Assessment("unresolved", None, clean(detail), attempt, artifact)

    def _taker(self, work: Work, attempt: int, artifact: str | None) -> Callable[[Verdict], None] | None:
        return partial(self._came_late, work.execution, attempt, artifact) if self._late else None

    def _came_late(self, execution: str, attempt: int, artifact: str | None, found: Verdict) -> None:
        assert self._late is not None
        assessment = _valid(found, attempt, artifact)
        told = f"came too late and counts for nothing; {found.detail or ''}".rstrip("; ")
        self._late(execution, replace(assessment, detail=told))


def _scoring(spec: EvaluatorSpec, workers: int, guard: Guard | None) -> Scoring:
    if isinstance(spec, JudgeSettings):
        return Judge(spec)
    if not isinstance(spec, str):
        return Command(tuple(spec), guard)
    if not is_url(spec):
        return Function(spec, workers)
    try:
        return Service(checked_url(spec))
    except ValueError as reason:
        raise EvaluatorNotFound(f"evaluator: {reason}") from None


def _valid(found: Verdict, attempt: int, artifact: str | None) -> Assessment:
    reference = found.artifact or artifact
    return Assessment("valid", found.score, found.detail, attempt, reference, found.intermediate)


async def _artifact(workspace: Path, deadline: float) -> str | None:
    """The digest of a workspace, None where there is no time for it or it vanishes."""
    with suppress(TimeoutError, Unreadable, OSError):
        async with asyncio.timeout(deadline - time.monotonic()):
            return await asyncio.to_thread(digest, workspace)
    return None


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
