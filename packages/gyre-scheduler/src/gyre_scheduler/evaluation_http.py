"""An evaluator that is an HTTP service, and what it shares with every other service that evaluates.

One POST for each attempt, with JSON {"task", "workspace", "execution", "attempt"}; the service reads the workspace at the
path that it is given and answers with {"score": x} (`evaluation_answers`). An answer after the time limit of the last
attempt is handed on as late.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httpx

from .errors import EvaluatorNotFound, Unresolved
from .evaluation_answers import ANSWER_LIMIT, Verdict, Work, parsed, shown, verdict

CHECK_S = 10.0
LATE_S = 600.0
"""How long a late answer is waited for."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
PASSING = {404, 408, 425, 429}
"""Statuses below 500 that may be others a moment later; gateways answer 404 while a model is loaded."""
SECRET = 8
"""Keys with fewer characters are not removed: local endpoints take any word, which may well be part of an answer."""
NOT_BY_PROXY = ("all://127.0.0.1", "all://localhost", "all://[::1]")


class Unavailable(Unresolved):
    """The service gave no answer, or said that it cannot answer now; it may need a moment."""

    def __init__(self, reason: str, wait_s: float | None = None):
        """`wait_s`: how long it asks to be left alone."""
        super().__init__(reason)
        self._wait_s = wait_s

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after this failed attempt (from 1), longer each time."""
        if self._wait_s is not None:
            return self._wait_s
        return min(FIRST_WAIT_S * 2.0 ** min(attempt - 1, 10), LONGEST_WAIT_S)


class Caller:
    """A client of one service. Nothing that comes from it, errors included, holds `secret`, though the service repeat it."""

    def __init__(self, name: str, url: str, secret: str | None = None):
        headers = {"Accept-Encoding": "identity"}  # no answer may become larger than what came over the wire
        if secret is not None:
            headers["Authorization"] = f"Bearer {secret}"
        self._name, self._url = name, url
        self._secret = secret if secret and len(secret) >= SECRET else None
        # A proxy that the environment names is for the world outside, whether or not NO_PROXY says so.
        self._client = httpx.AsyncClient(headers=headers, timeout=None, mounts=dict.fromkeys(NOT_BY_PROXY))

    async def find(self, url: str) -> int:
        """The status that a GET gets. EvaluatorNotFound if there is no answer."""
        try:
            async with asyncio.timeout(CHECK_S), self._client.stream("GET", url) as response:
                return response.status_code
        except TimeoutError:
            why = f"no answer within {CHECK_S:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            why = self._line(error)
        raise EvaluatorNotFound(f"{self._name} at {self._url} cannot be reached: {why}")

    async def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """The JSON that the service answers with; Unresolved or Unavailable if it does not. No time limit."""
        content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", url, content=content, headers=headers) as response:
                text = await self._text(response)
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
            raise Unavailable(f"{self._name} at {self._url} gave no answer: {self._line(error)}") from None
        if not response.is_success:
            reason = f"{self._name} answered with status {response.status_code}: {shown(text)}"
            if response.status_code < 500 and response.status_code not in PASSING:
                raise Unresolved(reason)
            raise Unavailable(reason, _retry_after(response))
        try:
            return parsed(text)
        except ValueError:
            raise Unresolved(f"{self._name} answered not with JSON but with {shown(text)}") from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _text(self, response: httpx.Response) -> str:
        text = bytearray()
        async for chunk in response.aiter_bytes():
            text += chunk
            if len(text) > ANSWER_LIMIT:
                raise Unresolved(f"{self._name} answered with more than {ANSWER_LIMIT:,} bytes")
        return self._without_secret(text.decode(errors="replace"))

    def _line(self, error: Exception) -> str:
        said = " ".join(str(error).split())
        return self._without_secret(said or type(error).__name__)[:200]

    def _without_secret(self, text: str) -> str:
        return text.replace(self._secret, "[key]") if self._secret else text


class Service:
    """The service at a URL."""

    def __init__(self, url: str):
        self._url = url
        self._caller = Caller("the evaluator", url)
        self._asked: set[asyncio.Task[Verdict]] = set()

    async def check(self) -> None:
        await self._caller.find(self._url)

    async def score(self, work: Work, timeout_s: float, deadline: float) -> Verdict:
        limit_s = min(timeout_s, deadline - time.monotonic())
        asked = asyncio.create_task(self._ask(work, limit_s + LATE_S))
        self._asked.add(asked)
        asked.add_done_callback(self._ended)
        await asyncio.wait({asked}, timeout=limit_s)
        if asked.done():
            return asked.result()
        if work.late is None:
            asked.cancel()
        else:
            asked.add_done_callback(partial(_hand_on, work.late))
        raise Unavailable(f"the evaluator at {self._url} gave no answer within {limit_s:.1f} s")

    async def close(self) -> None:
        for asked in self._asked:
            asked.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        await self._caller.close()

    async def _ask(self, work: Work, timeout_s: float) -> Verdict:
        body = {
            "task": dict(work.task),
            "workspace": str(work.workspace.absolute()),
            "execution": work.execution,
            "attempt": work.attempt,
        }
        async with asyncio.timeout(timeout_s):
            return verdict(await self._caller.post(self._url, body))

    def _ended(self, asked: asyncio.Task[Verdict]) -> None:
        self._asked.discard(asked)
        if not asked.cancelled():
            asked.exception()  # seen here where nobody waits any more


def _hand_on(late: Callable[[Verdict], None], asked: asyncio.Task[Verdict]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        late(asked.result())


def _retry_after(response: httpx.Response) -> float | None:
    """The seconds of a Retry-After header; dates are not read."""
    try:
        return max(0.0, float(int(response.headers.get("Retry-After", ""))))
    except (ValueError, OverflowError):
        return None
