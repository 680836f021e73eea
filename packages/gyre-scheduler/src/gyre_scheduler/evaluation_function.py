"""An evaluator that is a Python function "module:function" of (workspace: Path, task: dict), giving a number or an answer.

It runs in worker processes of ours (`evaluation_worker`), so that one that hangs or crashes is ended without harm to the
driver.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from .errors import EvaluatorNotFound, Unresolved
from .evaluation_answers import ANSWER_LIMIT, Verdict, Work, parsed, verdict

WORKER = "gyre_scheduler.evaluation_worker"
START_S = 120.0
"""A worker must have imported the evaluator's module by then."""


class Function:
    """The function's workers, all started at the beginning and again when one was ended.

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

    async def score(self, work: Work, timeout_s: float, deadline: float) -> Verdict:
        worker = self._idle.pop() if self._idle else await self._start(deadline - time.monotonic())
        self._busy.add(worker)
        limit_s = min(timeout_s, deadline - time.monotonic())
        try:
            async with asyncio.timeout(limit_s):
                answer = await _ask(worker, work)
        except TimeoutError:
            await self._end(worker)
            raise Unresolved(f"the evaluator ran longer than {limit_s:.1f} s") from None
        except BaseException:
            await self._end(worker)
            raise
        self._rest(worker)
        if "error" in answer:
            raise Unresolved(answer["error"])
        return verdict(answer)

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
                limit=ANSWER_LIMIT,
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


async def _ask(worker: asyncio.subprocess.Process, work: Work) -> dict[str, Any]:
    assert worker.stdin is not None
    request = json.dumps({"workspace": str(work.workspace), "task": dict(work.task)})
    try:
        worker.stdin.write(request.encode() + b"\n")
        await worker.stdin.drain()
    except ConnectionError:
        raise Unresolved("the evaluator's process died before it was asked") from None
    return await _answer(worker)


async def _answer(worker: asyncio.subprocess.Process) -> dict[str, Any]:
    assert worker.stdout is not None
    try:
        line = await worker.stdout.readline()
        if not line.endswith(b"\n"):
            raise Unresolved("the evaluator's process died")
        return parsed(line)
    except ValueError as error:  # a line above the limit is one, too
        raise Unresolved(f"the evaluator's process answered what cannot be read: {error}") from None
