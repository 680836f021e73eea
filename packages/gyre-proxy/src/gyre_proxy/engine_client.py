"""Owns the HTTP to engines (SGLang's API): one generate, one abort, errors in two kinds.

The ids of the final payload are the truth; text and parsers of the engine are not used. Cumulative chunks
that arrive together are read once, the last one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from gyre_proxy.connections import ConnectionFailed, Connections
from gyre_proxy.errors import ProxyError

ABORT_S = 5.0
"""Longest wait for an engine to take an abort."""

PING_S = 5.0
"""Longest wait for a sign of life, and for the name of an engine's weights."""

_REFUSALS = range(400, 500)
_TRANSIENT = (408, 425, 429)


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

    def __init__(self) -> None:
        self._connections = Connections()

    def close(self) -> None:
        self._connections.close()

    async def generate(
        self, url: str, body: dict, progress: Callable[[Output], None] | None = None
    ) -> Output:
        """Run one /generate to its end; with `progress` it is streamed and every step is reported.

        Raises EngineDown or EngineRefused; what `progress` saw before EngineDown stays valid.
        """
        content = orjson.dumps({**body, "stream": progress is not None})
        events = None if progress is None else _Events(url, progress)
        try:
            status, data = await self._connections.post(
                url, "/generate", content, None if events is None else events.feed
            )
        except ConnectionFailed as error:
            raise EngineDown(f"{url}: {error}", error.sent) from error
        _check(url, status, data)
        output = _output(_loads(url, data), None) if events is None else events.last
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

    async def alive(self, url: str) -> bool:
        """Whether the engine answers anything at all within PING_S; one that is paused does."""
        return await self._get(url, "/ping") is not None

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

    async def _get(self, url: str, path: str) -> tuple[int, bytes] | None:
        try:
            async with asyncio.timeout(PING_S):
                return await self._connections.get(url, path)
        except (ConnectionFailed, TimeoutError):
            return None


class _Events:
    """Reads a /generate stream; only the newest of the cumulative events that arrived together is parsed."""

    def __init__(self, url: str, progress: Callable[[Output], None]) -> None:
        self._url, self._progress = url, progress
        self._rest = b""
        self.last: Output | None = None

    def feed(self, data: bytes) -> None:
        events = (self._rest + data).split(b"\n\n")
        self._rest = events.pop()
        whole = [e for e in events if e.startswith(b"data:") and not e.endswith(b"[DONE]")]
        if whole:
            self.last = _output(_loads(self._url, whole[-1][5:]), self.last)
            self._progress(self.last)


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
    if status in _REFUSALS and status not in _TRANSIENT:
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


def _output(payload: dict, before: Output | None) -> Output:
    """What one payload says; ids that came after `before` get the version the payload names."""
    meta = payload["meta_info"]
    finish = meta.get("finish_reason")
    if finish and finish["type"] == "abort" and finish.get("status_code") in _REFUSALS:
        raise EngineRefused(f"the engine refused the call: {finish.get('message')}")
    ids = payload.get("output_ids") or []
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
    return int(value) if str(value).isdecimal() else None
