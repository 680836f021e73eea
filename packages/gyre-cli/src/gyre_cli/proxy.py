"""The proxy process of a run: start it, talk to its admin API, end it. One object owns one process and its group.

Invariant: while the object is open, every call of a harness reaches a live proxy or the run fails with one clear line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
from gyre_scheduler.executions import last_line
from gyre_trajtree.runlog import LOCK_S

from gyre_cli.errors import RunFailed

ANSWER_S = LOCK_S + 10.0
"""Seconds the proxy may take to answer an administrative request: one that waits for the run log's lock still says so."""


class ProxyProcess:
    """`python -m gyre_proxy` as a child in its own process group; it also ends when its standard input closes."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, token: str, log: Path) -> None:
        self.url = url
        self._process = process
        self._log = log
        self._silent: str | None = None
        """The first request that got no answer."""
        self._client = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=ANSWER_S, trust_env=False
        )

    @classmethod
    async def start(cls, arguments: Sequence[str], log: Path, timeout_s: float = 60.0) -> ProxyProcess:
        """Start a proxy with the given arguments; standard error goes to `log`. Raises RunFailed with its last line.

        The admin token goes through standard input: harnesses of the same user could read an environment.
        """
        token = secrets.token_urlsafe(24)
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gyre_proxy", *arguments),
                *("--admin-token-stdin", "--exit-with-parent"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        process.stdin.write(token.encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                line = await process.stdout.readline()
            if not line:
                raise RunFailed(f"the proxy did not start: {said_last(log)}")
            return cls(process, orjson.loads(line)["url"], token, log)
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise RunFailed(f"the proxy did not answer within {timeout_s:g} s; see {log}") from None
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ended(self) -> str:
        """Wait until the process ends by itself; returns what it said last."""
        await self._process.wait()
        return said_last(self._log)

    async def register(self, execution: str, engine: str, deadline: float) -> tuple[str, str]:
        """Make an execution known; returns its base URL and its key. `deadline` in unix seconds."""
        body = {"id": execution, "engine": engine, "deadline": deadline, "record": False}
        answer = await self._ask("POST", "/admin/executions", body)
        return answer["base_url"], answer["key"]

    async def close_execution(self, execution: str) -> None:
        """No later call of this execution is served."""
        await self._ask("POST", f"/admin/executions/{execution}/close", {"record": False})

    async def set_engines(self, engines: list[dict[str, Any]]) -> None:
        """Replace the engine table: objects with url, admitting and version."""
        await self._ask("PUT", "/admin/engines", {"engines": engines})

    async def reroute(self, source: str, moves: dict[str, str], deadline_s: float = 60.0) -> dict[str, int]:
        """Empty `source`: its calls in flight continue at their executions' new engines."""
        body = {"source": source, "moves": moves, "deadline_s": deadline_s}
        return await self._ask("POST", "/admin/reroute", body, timeout=deadline_s + 10.0)

    async def _ask(self, method: str, path: str, body: Any = None, timeout: float = ANSWER_S) -> Any:
        content = None if body is None else orjson.dumps(body)
        if self._silent is not None:  # a run that fails must not wait for it again and again
            raise RunFailed(self._silent)
        try:
            answer = await self._client.request(method, path, content=content, timeout=timeout)
        except httpx.HTTPError as error:
            said = said_last(self._log) if self._process.returncode is not None else repr(error)
            self._silent = f"the proxy did not answer {method} {path}: {said}"
            raise RunFailed(self._silent) from error
        if answer.status_code >= 400:
            raise RunFailed(f"the proxy refused {method} {path}: {answer.status_code} {answer.text[:300]}")
        return orjson.loads(answer.content)

    async def stop(self) -> None:
        """End the process and its group."""
        await self._client.aclose()
        await _end(self._process)


async def _end(process: asyncio.subprocess.Process, grace_s: float = 5.0) -> None:
    if process.stdin:
        process.stdin.close()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()


def said_last(log: Path) -> str:
    """The last line of a process's log, or where to look."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        if line := last_line(file):
            return line
    return f"it said nothing; see {log}"
