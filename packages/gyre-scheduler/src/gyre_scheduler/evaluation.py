"""Assessment of a preserved workspace: one score in [0, 1], or unresolved with a reason (section 5.2).

An evaluator is a Python function "module:function" of (workspace: Path, task: dict), or a command that reads
the task as JSON from its standard input and whose last line of standard output is JSON {"score": x}. A
failure (exception, time limit, no number, out of range) is never a zero: it leaves the assessment unresolved
and is retried on the same workspace within the deadline.

Harnesses of other executions still run meanwhile, as the same user, so nothing of an evaluation is written to
a named file: the task goes through standard input, what the evaluator says stays in memory. Evaluators run in
the driver's current folder and environment. Functions run in worker processes of ours, so that one that hangs
or crashes is ended without harm to the driver.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol

from .errors import CommandNotFound, EvaluatorNotFound, SettingsError, Unresolved
from .executions import ExecutionFolder, last_line, render
from .guard import Guard
from .processes import run_process

WORKER = "gyre_scheduler.evaluation_worker"
START_S = 120.0
"""A worker must have imported the evaluator's module by then."""
OUTPUT_LIMIT = 1 << 20
GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Assessment:
    """The designated assessment of an execution. `score` is None exactly when it is unresolved."""

    status: Literal["valid", "unresolved"]
    score: float | None
    detail: str | None
    attempt: int
    """The attempt that gave it, from 1; 0 when there was no time for any."""


class Scoring(Protocol):
    """One way to run an evaluator."""

    async def check(self) -> None:
        """EvaluatorNotFound if the evaluator cannot be loaded. The only place where that can happen."""

    async def score(self, workspace: Path, task: Mapping[str, Any], timeout_s: float, deadline: float) -> Any:
        """The raw score; Unresolved if there is none within `timeout_s`, and in any case by `deadline`."""

    async def close(self) -> None:
        """End every process of it."""


class Evaluator:
    """Assesses workspaces with one evaluator: `async with Evaluator("module:function") as evaluator`."""

    def __init__(
        self,
        spec: str | Sequence[str],
        timeout_s: float = 20.0,
        attempts: int = 2,
        workers: int = 2,
        guard: Guard | None = None,
    ):
        """`spec`: "module:function" or a command with placeholders {python} {workspace}.

        `timeout_s` bounds each of at most `attempts` attempts; at most `workers` evaluations run at a time. With a
        `guard` a command also ends when this process is killed; functions do in any case.
        """
        if not 0 < timeout_s < math.inf or attempts < 1 or workers < 1:
            raise SettingsError(
                "an evaluator needs a finite timeout_s above 0, attempts and workers of 1 or more"
            )
        self.timeout_s = timeout_s
        self.attempts = attempts
        self._slots = asyncio.Semaphore(workers)
        self._scoring: Scoring = (
            _Function(spec, workers) if isinstance(spec, str) else _Command(tuple(spec), guard)
        )

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
        """Score a workspace; `deadline` is the end of the execution's whole budget on `time.monotonic()`.

        Waiting for one of the `workers` counts against it.
        """
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._slots.acquire()
        except TimeoutError:
            return Assessment("unresolved", None, "no evaluator was free within the execution's budget", 0)
        try:
            return await self._assess(folder.workspace, task, deadline)
        finally:
            self._slots.release()

    async def _assess(self, workspace: Path, task: Mapping[str, Any], deadline: float) -> Assessment:
        detail = "the execution's budget left no time for an evaluation"
        for attempt in range(1, self.attempts + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                return Assessment("unresolved", None, detail, attempt - 1)
            try:
                raw = await self._scoring.score(workspace, task, self.timeout_s, deadline)
                return Assessment("valid", _checked(raw), None, attempt)
            except Unresolved as reason:
                detail = str(reason)
        return Assessment("unresolved", None, detail, self.attempts)


def _checked(raw: Any) -> float:
    if not isinstance(raw, int | float):
        raise Unresolved(f"the score is not a number but {str(raw)[:80]!r}")
    if not math.isfinite(raw) or not 0 <= raw <= 1:
        raise Unresolved(f"the score {raw} is outside [0, 1]")
    return float(raw)


class _Command:
    """A command, run once for each attempt."""

    def __init__(self, command: tuple[str, ...], guard: Guard | None):
        self._command = command
        self._guard = guard

    async def check(self) -> None:
        program, *_ = self._rendered("") or [""]
        if not program or shutil.which(program) is None:
            raise EvaluatorNotFound(f"evaluator command {program!r} does not exist or is not executable")

    async def score(self, workspace: Path, task: Mapping[str, Any], timeout_s: float, deadline: float) -> Any:
        limit_s = min(timeout_s, deadline - time.monotonic())
        out, err = BytesIO(), BytesIO()
        try:
            with tempfile.TemporaryFile() as request:
                request.write(json.dumps(task).encode())
                request.seek(0)
                end = await run_process(
                    self._rendered(str(workspace)),
                    cwd=Path.cwd(),
                    env=os.environ,
                    stdin=request,
                    stdout=out,
                    stderr=err,
                    output_limit=OUTPUT_LIMIT,
                    timeout_s=limit_s,
                    grace_s=GRACE_S,
                    guard=self._guard,
                )
        except (CommandNotFound, OSError) as error:
            raise Unresolved(f"the evaluator cannot be started: {error}") from None
        if end.timed_out:
            raise Unresolved(f"the evaluator ran longer than {limit_s:.1f} s")
        if end.code != 0:
            raise Unresolved(f"the evaluator ended with status {end.code}: {last_line(err)[:200]}")
        return _score_line(last_line(out))

    async def close(self) -> None:
        """Nothing outlives an attempt."""

    def _rendered(self, workspace: str) -> list[str]:
        return [render(part, {"python": sys.executable, "workspace": workspace}) for part in self._command]


def _score_line(line: str) -> Any:
    try:
        return json.loads(line)["score"]
    except (ValueError, KeyError, TypeError):
        raise Unresolved(f'the evaluator\'s last line is not {{"score": x}} but {line[:80]!r}') from None


class _Function:
    """A Python function in worker processes, all started at the beginning and again when one was ended.

    The caller sees to it that no more than `workers` evaluations run at a time.
    """

    def __init__(self, spec: str, workers: int):
        self._spec = spec
        self._workers = workers
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()

    async def check(self) -> None:
        starts = (self._start(START_S) for _ in range(self._workers))
        for started in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(started, Unresolved):
                raise EvaluatorNotFound(str(started))
            if isinstance(started, BaseException):
                raise started
            self._rest(started)

    async def score(self, workspace: Path, task: Mapping[str, Any], timeout_s: float, deadline: float) -> Any:
        worker = self._idle.pop() if self._idle else await self._start(deadline - time.monotonic())
        self._busy.add(worker)
        limit_s = min(timeout_s, deadline - time.monotonic())
        try:
            async with asyncio.timeout(limit_s):
                answer = await _ask(worker, workspace, task)
        except TimeoutError:
            await self._end(worker)
            raise Unresolved(f"the evaluator ran longer than {limit_s:.1f} s") from None
        except BaseException:
            await self._end(worker)
            raise
        self._rest(worker)
        if "error" in answer:
            raise Unresolved(answer["error"])
        return answer["score"]

    async def close(self) -> None:
        for worker in [*self._idle, *self._busy]:
            await self._end(worker)
        self._idle.clear()

    async def _start(self, timeout_s: float) -> asyncio.subprocess.Process:
        try:
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", WORKER, self._spec),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise Unresolved(f"evaluator {self._spec!r} cannot be started: {error}") from None
        self._busy.add(worker)
        try:
            async with asyncio.timeout(timeout_s):
                hello = await _answer(worker)
        except (TimeoutError, Unresolved):
            await self._end(worker)
            raise Unresolved(f"evaluator {self._spec!r} ended or hung while it was loaded") from None
        if "error" in hello:
            await self._end(worker)
            raise Unresolved(f"evaluator {self._spec!r} cannot be loaded: {hello['error']}")
        return worker

    def _rest(self, worker: asyncio.subprocess.Process) -> None:
        self._busy.discard(worker)
        self._idle.append(worker)

    async def _end(self, worker: asyncio.subprocess.Process) -> None:
        self._busy.discard(worker)
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()


async def _ask(
    worker: asyncio.subprocess.Process, workspace: Path, task: Mapping[str, Any]
) -> dict[str, Any]:
    assert worker.stdin is not None
    request = json.dumps({"workspace": str(workspace), "task": dict(task)})
    try:
        worker.stdin.write(request.encode() + b"\n")
        await worker.stdin.drain()
    except ConnectionError:
        raise Unresolved("the evaluator's process died before it was asked") from None
    return await _answer(worker)


async def _answer(worker: asyncio.subprocess.Process) -> dict[str, Any]:
    assert worker.stdout is not None
    line = await worker.stdout.readline()
    if not line.endswith(b"\n"):
        raise Unresolved("the evaluator's process died")
    return json.loads(line)
