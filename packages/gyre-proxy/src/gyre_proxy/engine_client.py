"""Owns the HTTP to engines (SGLang's API): generate, abort, what they say of themselves; errors in two kinds.

The ids of the final payload are the truth; text and parsers of the engine are not used. Invariants: what no engine of
this model can have sampled never gets further than here; reading a stream costs a bounded share of its time.
"""

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import NoneType

import orjson

from gyre_proxy.connections import ConnectionFailed, Connections
from gyre_proxy.errors import ProxyError

ABORT_S = 5.0
"""Longest wait for an engine to take an abort."""

_UNFINISHED = re.compile(rb'"finish_reason":\s*null')

END_S = 1.0
"""Longest wait for the end of a stream behind the event that ends its answer."""

SHARE = 0.1
"""Of the time of a stream that reading it may cost."""

HEALTH_S = 30.0
"""Longest wait for an engine that must show that it samples; SGLang itself gives up after 20 s."""

PING_S = 5.0
"""Longest wait for a sign of life, and for the name of an engine's weights."""

_REFUSALS = (400, 413, 422)
"""What says that the call itself is at fault; others (a wrong URL, a missing key, overload) are the engine's."""

LARGEST_VERSION = LARGEST_ID = 2**31 - 1
"""Of weights and of tokens, as a run log holds them."""


class EngineDown(ProxyError):
    """The engine did not answer, or answered that it cannot now; the call may go on elsewhere.

    `held`: it had the call when it was lost, so that the call itself may be the cause.
    """

    status = 503

    def __init__(self, message: str, held: bool = False) -> None:
        super().__init__(message)
        self.held = held


class EngineRefused(ProxyError):
    """The engine will never take this call."""

    status = 400


@dataclass(slots=True)
class Output:
    """What an engine sampled so far for one /generate."""

    ids: list[int]
    logprobs: list[float | None]
    """One per id; all None when the engine's lists disagree in length, so that nobody trains on a guess."""
    spans: list[tuple[int | None, int, int]]
    """(version, start, end) over ids; version None where the engine's is no number."""
    finish: str | None
    """"stop", "length", "abort", None while running."""
    label: str | None = None
    """Weight version as the engine names it."""


class EngineClient:
    """Speaks to all engines over kept-alive connections."""

    def __init__(self, vocabulary: int | None = None) -> None:
        """`vocabulary`: ids from which on none can be the model's; None when nobody knows."""
        self._connections = Connections()
        self._vocabulary = LARGEST_ID + 1 if vocabulary is None else vocabulary

    def close(self) -> None:
        self._connections.close()

    async def generate(
        self, url: str, body: dict, progress: Callable[[Output], None] | None = None
    ) -> Output:
        """Run one /generate to its end; with `progress` it is streamed and every step is reported.

        Raises EngineDown or EngineRefused; what `progress` saw before EngineDown stays valid.
        """
        content = orjson.dumps({**body, "stream": progress is not None})
        events = None if progress is None else _Events(url, self._answer, progress)
        try:
            async with asyncio.timeout(None) as patience:
                status, data = await self._connections.post(
                    url,
                    "/generate",
                    content,
                    None if events is None else partial(events.feed, patience=patience),
                )
        except TimeoutError:  # the answer is whole, its stream does not end
            return events.last
        except ConnectionFailed as error:
            if events is not None:
                events.read()
            raise EngineDown(f"{url}: {error}", error.sent) from error
        except asyncio.CancelledError:
            if events is not None:
                with suppress(Exception):  # what is left to read must not keep the call here
                    events.read()
            raise
        if events is not None:
            events.read()
        _check(url, status, data)
        output = self._answer(url, _loads(url, data), None) if events is None else events.last
        if output is None or output.finish is None:
            raise EngineDown(f"{url}: the answer ended without a finish reason", held=True)
        return output

    async def abort(self, url: str, rid: str) -> None:
        """Ask the engine to end a request; its /generate then answers with what it has. Raises EngineDown."""
        try:
            async with asyncio.timeout(ABORT_S):
                await self._connections.post(url, "/abort_request", orjson.dumps({"rid": rid}))
        except (ConnectionFailed, TimeoutError) as error:
            raise EngineDown(f"{url}: /abort_request: {error}") from error

    def _answer(self, url: str, payload: dict, before: Output | None) -> Output:
        """What one payload says. Raises EngineDown for what no engine of this model can have sampled."""
        try:
            output = _read(url, payload, before)
            _check_output(output, self._vocabulary)
            known = len(before.ids) if before else 0
            if len(output.ids) < known or (known and output.ids[known - 1] != before.ids[-1]):
                raise ValueError("what was sampled before changed")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineDown(f"{url}: the answer is not as SGLang's: {error!r}", held=True) from error
        return output

    async def alive(self, url: str) -> bool:
        """Whether an engine that is silent still samples, or is paused.

        SGLang's /ping tells of its front end only; /ready is refused during a pause; /health asks the part that samples.
        """
        answer = await self._get(url, "/ping")
        if answer is None or answer[0] >= 500:
            return False
        ready = await self._get(url, "/ready")
        if ready is not None and ready[0] == 503:
            return True
        health = await self._get(url, "/health", HEALTH_S)
        return health is not None and health[0] < 500

    async def mute(self, url: str) -> bool:
        """Whether the engine takes connections and answers nothing within PING_S."""
        try:
            async with asyncio.timeout(PING_S):
                await self._connections.get(url, "/ping")
        except TimeoutError:
            return True
        except ConnectionFailed:
            return False
        return False

    async def weights(self, url: str) -> str | None:
        """The weight version that the engine names, None when it does not say."""
        answer = await self._get(url, "/get_model_info")
        if answer is None or answer[0] != 200:
            return None
        try:
            return _label(orjson.loads(answer[1]))
        except orjson.JSONDecodeError:
            return None

    async def limits(self, url: str) -> tuple[int, int] | None:
        """(tokens of the longest prompt, of prompt and answer) that the engine takes, None when it does not say."""
        answer = await self._get(url, "/server_info")
        try:
            told = orjson.loads(answer[1]) if answer is not None and answer[0] == 200 else {}
        except orjson.JSONDecodeError:
            return None
        told = told if isinstance(told, dict) else {}
        most, context = told.get("max_req_input_len"), told.get("context_length")
        if type(most) is not int or type(context) is not int or not 1 < most <= context:
            return None
        return most - 1, context  # SGLang refuses a prompt of the length that it names

    async def _get(self, url: str, path: str, limit_s: float | None = None) -> tuple[int, bytes] | None:
        try:
            async with asyncio.timeout(limit_s or PING_S):
                return await self._connections.get(url, path)
        except (ConnectionFailed, TimeoutError):
            return None


class _Events:
    """Reads a /generate stream, whose events are cumulative: an event that is overtaken by the next is not read.

    The longer an answer, the longer an event: the next one is looked at when the last has cost at most SHARE of the
    time, so that the cost of a stream stays in proportion to its time.
    """

    def __init__(
        self,
        url: str,
        answer: Callable[[str, dict, Output | None], Output],
        progress: Callable[[Output], None],
    ) -> None:
        self._url, self._answer, self._progress = url, answer, progress
        self._rest = b""
        self._held: bytes | None = None
        self._next = 0.0
        self.last: Output | None = None

    def feed(self, data: bytes, patience: asyncio.Timeout) -> None:
        """Take what arrived; `patience` ends the wait for the end of a stream that has said why the answer ends."""
        events = (self._rest + data).split(b"\n\n")
        self._rest = events.pop()
        whole = [e for e in events if e.startswith(b"data:")]
        ended = bool(whole) and whole[-1].endswith(b"[DONE]")
        if ended:
            whole.pop()
        if whole:
            self._held = whole[-1]
        if ended or time.monotonic() >= self._next or (self._held and not _UNFINISHED.search(self._held)):
            self.read()
        if self.last is not None and self.last.finish is not None and patience.when() is None:
            patience.reschedule(asyncio.get_running_loop().time() + END_S)

    def read(self) -> None:
        """Read the newest event, if there is one."""
        if self._held is None:
            return
        event, self._held = self._held, None
        begun = time.monotonic()
        self.last = self._answer(self._url, _loads(self._url, event[5:]), self.last)
        self._progress(self.last)
        self._next = time.monotonic() + (time.monotonic() - begun) / SHARE


def _loads(url: str, data: bytes) -> dict:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineDown(f"{url}: the answer is not JSON") from error
    if isinstance(value, dict) and "error" in value:
        error = value["error"]
        code = error.get("code", 500) if isinstance(error, dict) else 500
        _check(url, code if isinstance(code, int) else 500, data)
    if not isinstance(value, dict) or not isinstance(value.get("meta_info"), dict):
        raise EngineDown(f"{url}: the answer has no meta_info; is this an SGLang /generate endpoint?")
    return value


def _check(url: str, status: int, body: bytes) -> None:
    if status == 200:
        return
    message = f"{url}: answered {status}: {_message(body)}"
    if status in _REFUSALS:
        raise EngineRefused(message)
    raise EngineDown(message, held=status == 500)


def _message(body: bytes) -> str:
    """The text of an engine's error in any of its three shapes."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:200].decode("utf-8", "replace")
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _check_output(output: Output, vocabulary: int) -> None:
    """Raises ValueError for what a run log cannot hold, or the next turn must not send: it would end a server."""
    ids, logprobs = output.ids, output.logprobs
    if not set(map(type, ids)) <= {int} or (ids and not 0 <= min(ids) <= max(ids) < vocabulary):
        raise ValueError("token ids must be integers of the model's vocabulary")
    if not set(map(type, logprobs)) <= {float, int, NoneType}:
        raise ValueError("log-probs must be numbers or null")
    if output.finish not in (None, "stop", "length", "abort"):
        raise ValueError(f"finish reason {output.finish!r} is none of stop, length, abort")
    bounds = [bound for _, start, end in output.spans for bound in (start, end)]
    if bounds != sorted(bounds) or (bounds and not 0 <= bounds[0] <= bounds[-1] <= len(ids)):
        raise ValueError("spans of weight versions must follow each other within the ids")


def _read(url: str, payload: dict, before: Output | None) -> Output:
    """What one payload says; ids that came after `before` get the version the payload names."""
    meta = payload["meta_info"]
    finish = meta.get("finish_reason")
    if finish and finish["type"] == "abort" and finish.get("status_code") in _REFUSALS:
        raise EngineRefused(f"the engine refused the call: {finish.get('message')}")
    ids = payload.get("output_ids") or []
    if meta.get("completion_tokens", len(ids)) != len(ids):
        raise EngineDown(
            f"{url}: {len(ids)} ids of {meta['completion_tokens']} tokens; start SGLang without "
            "--incremental-streaming-output",
            held=True,
        )
    entries = meta.get("output_token_logprobs") or []
    agree = len(entries) == len(ids) and all(e[1] == i for e, i in zip(entries, ids, strict=True))
    logprobs = [entry[0] for entry in entries] if agree else [None] * len(ids)
    spans = _spans(meta, len(ids), before)
    return Output(ids, logprobs, spans, finish["type"] if finish else None, _label(meta))


def _label(meta: object) -> str | None:
    label = meta.get("weight_version") if isinstance(meta, dict) else None
    return str(label) if label not in (None, "") else None


def _spans(meta: dict, count: int, before: Output | None) -> list[tuple[int | None, int, int]]:
    spans = meta.get("weight_versions")
    if spans:
        return [(_version(s["version"]), s["start"], s["end"]) for s in spans if s["end"] > s["start"]]
    earlier, known = ([], 0) if before is None else (before.spans, len(before.ids))
    return [*earlier, (_version(meta.get("weight_version")), known, count)] if count > known else earlier


def _version(value: object) -> int | None:
    number = int(value) if str(value).isdecimal() and len(str(value)) < 11 else LARGEST_VERSION + 1
    return number if number <= LARGEST_VERSION else None
