"""An evaluator that is a command, run once for each attempt in the folder and with the environment of the driver.

It reads the task as JSON from its standard input; the last line of its standard output is its answer.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

from .errors import CommandNotFound, EvaluatorNotFound, Unresolved
from .evaluation_answers import ANSWER_LIMIT, Verdict, Work, parsed, shown, verdict
from .executions import last_line, render
from .guard import Guard
from .processes import run_process

GRACE_S = 1.0


class Command:
    """A command with placeholders {python} {workspace}."""

    def __init__(self, command: tuple[str, ...], guard: Guard | None):
        self._command = command
        self._guard = guard

    async def check(self) -> None:
        program, *_ = self._rendered("") or [""]
        if not program or shutil.which(program) is None:
            raise EvaluatorNotFound(f"evaluator command {program!r} does not exist or is not executable")

    async def score(self, work: Work, timeout_s: float, deadline: float) -> Verdict:
        limit_s = min(timeout_s, deadline - time.monotonic())
        out, err = BytesIO(), BytesIO()
        try:
            with tempfile.TemporaryFile() as request:
                request.write(json.dumps(work.task).encode())
                request.seek(0)
                end = await run_process(
                    self._rendered(str(work.workspace)),
                    cwd=Path.cwd(),
                    env=os.environ,
                    stdin=request,
                    stdout=out,
                    stderr=err,
                    output_limit=ANSWER_LIMIT,
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
        return verdict(_answer(last_line(out, ANSWER_LIMIT)))

    async def close(self) -> None:
        """Nothing outlives an attempt."""

    def _rendered(self, workspace: str) -> list[str]:
        return [render(part, {"python": sys.executable, "workspace": workspace}) for part in self._command]


def _answer(line: str) -> object:
    try:
        return parsed(line)
    except ValueError:
        raise Unresolved(f'the evaluator\'s last line is not {{"score": x}} but {shown(line)}') from None
