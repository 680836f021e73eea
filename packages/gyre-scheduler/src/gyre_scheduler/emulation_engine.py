"""An engine that takes time instead of compute: the part of SGLang's HTTP API that a run and its proxy ask for.

A call samples one token every `token_s` seconds from the moment it arrives, however many others do. Tokens are all the
same id with log-prob -1. Invariants: every /generate is answered once, aborted ones with what they had; an engine that
is paused samples nothing, one that is released refuses calls with 503; each token is labelled with the weight version
that was loaded when it was sampled.

    python -m gyre_scheduler.emulation_engine --token-s 0.02        prints {"url": ...}, serves until SIGINT or SIGTERM
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

STREAM_S = 0.05
"""Least time between two events of a stream."""
LARGEST_BODY = 1 << 26

Answer = tuple[int, Any]


class Refused(Exception):
    """A request that is answered with a status other than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Call:
    """One /generate in hand. Times are those of the engine's own clock, which stands still in a pause."""

    def __init__(self, given: dict[str, Any], begun: float, tokens: int, finish: dict[str, Any]):
        self.rid = str(given.get("rid"))
        self.prompt_tokens = len(given["input_ids"])
        self.begun, self.tokens, self.finish = begun, tokens, finish
        self.stop_token: int | None = finish.get("matched")
        self.changed = asyncio.Event()
        """Set whenever the call must look again: it was aborted, the engine paused or went on."""
        self.aborted = False


class EmulatedEngine:
    """One engine; `start` listens, `stop` cuts every connection."""

    def __init__(
        self,
        token_s: float = 0.02,
        answer_tokens: int = 256,
        token: int = 0,
        version: int = 0,
        context_length: int = 1 << 20,
    ):
        """`answer_tokens`: length of an answer that the request does not limit further.

        `token`: the id that is sampled; 0 is a printable character in byte-level vocabularies.
        """
        self.token_s, self.answer_tokens, self.token = token_s, answer_tokens, token
        self.context_length = context_length
        self.released = False
        self.url = ""
        self._versions: list[tuple[float, int | str]] = [(0.0, version)]
        """(time on the engine's clock, version loaded then)."""
        self._calls: dict[str, Call] = {}
        self._paused_at: float | None = None
        self._stood = 0.0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connection, host, port, backlog=1024)
        self.url = f"http://{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def version(self) -> int | str:
        return self._versions[-1][1]

    @property
    def running(self) -> int:
        """Calls in hand."""
        return len(self._calls)

    def load(self, version: int | str) -> None:
        """Other weights, from now on."""
        self._versions.append((self._clock(), version))
        if not self._calls:
            del self._versions[:-1]

    # -- the clock of sampling

    def _clock(self) -> float:
        now = asyncio.get_running_loop().time()
        return (now if self._paused_at is None else self._paused_at) - self._stood

    def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = asyncio.get_running_loop().time()
            self._look_again()

    def _go_on(self) -> None:
        if self._paused_at is not None:
            self._stood += asyncio.get_running_loop().time() - self._paused_at
            self._paused_at = None
            self._look_again()

    def _look_again(self) -> None:
        for call in self._calls.values():
            call.changed.set()

    def _sampled(self, call: Call) -> int:
        passed = self._clock() - call.begun + 1e-6  # a timer may ring a rounding error early
        return min(call.tokens, int(passed / self.token_s) if self.token_s else call.tokens)

    # -- HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                while await self._exchange(reader, writer):
                    pass
        except asyncio.CancelledError:
            writer.transport.abort()  # `stop`; nobody waits for this task's cancellation
        finally:
            self._connections.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, _, path = head[0].removesuffix(" HTTP/1.1").partition(" ")
        fields = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
        }
        length = fields.get("content-length", "0")
        if "transfer-encoding" in fields or not length.isdecimal() or int(length) > LARGEST_BODY:
            return False
        body = await reader.readexactly(int(length))
        try:
            given = _object(body)
            if (method, path) == ("POST", "/generate"):
                return await self._generate(given, reader, writer)
            status, answer = self._answer(path.partition("?")[0], given)
        except Refused as refused:
            status, answer = refused.status, {"error": {"message": str(refused)}}
        _write(writer, status, answer)
        await writer.drain()
        return fields.get("connection", "").lower() != "close"

    def _answer(self, path: str, given: dict[str, Any]) -> Answer:
        handlers: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/flush_cache": lambda _: (
                (400, "Flush cache failed.\n") if self._calls else (200, "Cache flushed.\n")
            ),
            "/update_weights_from_disk": self._update_weights,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/get_model_info": self._info,
            "/model_info": self._info,
            "/get_server_info": self._info,
            "/server_info": self._info,
            "/ping": lambda _: (200, ""),
            "/ready": lambda _: (200 if self._paused_at is None else 503, ""),
            "/health": lambda _: (503 if self.released else 200, ""),
        }
        if path not in handlers:
            raise Refused(404, f"no {path} here")
        return handlers[path](given)

    def _abort(self, given: dict[str, Any]) -> Answer:
        rid = str(given.get("rid") or "")
        for call in self._calls.values():
            if given.get("abort_all") or (rid and call.rid.startswith(rid)):
                call.aborted = True
                call.changed.set()
        return 200, ""

    def _pause_generation(self, given: dict[str, Any]) -> Answer:
        if given.get("mode", "abort") == "abort":
            self._abort({"abort_all": True})
        self._pause()
        return 200, {"status": "ok"}

    def _continue_generation(self, given: dict[str, Any]) -> Answer:
        self._go_on()
        return 200, {"status": "ok"}

    def _update_weights(self, given: dict[str, Any]) -> Answer:
        self.load(given.get("weight_version", self.version))
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    def _release(self, given: dict[str, Any]) -> Answer:
        if self._calls:
            raise Refused(400, f"{len(self._calls)} calls are in hand")
        self.released = True
        return 200, ""

    def _resume(self, given: dict[str, Any]) -> Answer:
        self.released = False
        return 200, ""

    def _info(self, given: dict[str, Any]) -> Answer:
        return 200, {
            "model_path": "emulated",
            "is_generation": True,
            "weight_version": str(self.version),
            "context_length": self.context_length,
            "max_req_input_len": self.context_length - 6,
            "skip_tokenizer_init": True,
        }

    # -- one call

    async def _generate(
        self, given: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        call = self._new_call(given)
        self._calls[call.rid] = call
        gone = asyncio.create_task(_gone(reader, call))
        try:
            await self._play(call, writer if given.get("stream") else None)
        finally:
            gone.cancel()
            await asyncio.wait([gone])
            del self._calls[call.rid]
        final = json.dumps(self._payload(call, call.finish)).encode()
        if given.get("stream"):
            writer.write(_chunk(b"data: " + final + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            _write(writer, 200, final)
        await writer.drain()
        return not reader.at_eof()

    def _new_call(self, given: dict[str, Any]) -> Call:
        if self.released:
            raise Refused(503, "the engine is released")
        ids, sampling = given.get("input_ids"), given.get("sampling_params") or {}
        if not isinstance(ids, list) or not ids or not isinstance(sampling, dict):
            raise Refused(400, "input_ids must be a list of token ids, sampling_params an object")
        if str(given.get("rid")) in self._calls:
            raise Refused(400, f"Duplicate request ID detected: {given.get('rid')}")
        room = self.context_length - 2 - len(ids)
        if room < 1:
            raise Refused(400, f"the input of {len(ids)} tokens is longer than the model's context length")
        limit = min(sampling.get("max_new_tokens") or 128, room)
        left = max(self.answer_tokens - self._done_before(ids), 1)
        finish: dict[str, Any] = {"type": "length", "length": limit}
        if left <= limit:
            stops = sampling.get("stop_token_ids") or [self.token]
            finish = {"type": "stop", "matched": stops[0]}
        return Call(given, self._clock(), min(left, limit), finish)

    def _done_before(self, ids: list[int]) -> int:
        """Tokens of the answer that another engine has sampled: a prompt that goes on ends with them."""
        return next((n for n, found in enumerate(reversed(ids)) if found != self.token), len(ids))

    async def _play(self, call: Call, stream: asyncio.StreamWriter | None) -> None:
        """Let time pass until the call has its tokens or is aborted."""
        if stream is not None:
            stream.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        shown = 0
        while not call.aborted and (sampled := self._sampled(call)) < call.tokens:
            if stream is not None and sampled > shown:
                shown = sampled
                stream.write(_chunk(b"data: " + json.dumps(self._payload(call, None)).encode() + b"\n\n"))
            due = call.tokens if stream is None else max(sampled + 1, sampled + int(STREAM_S / self.token_s))
            left = call.begun + min(due, call.tokens) * self.token_s - self._clock()
            call.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._paused_at is not None else max(left, 0.0)):
                    await call.changed.wait()
        if call.aborted:
            call.tokens, call.stop_token = self._sampled(call), None
            call.finish = {"type": "abort", "message": "Aborted"}

    def _payload(self, call: Call, finish: dict[str, Any] | None) -> dict[str, Any]:
        count = call.tokens if finish else self._sampled(call)
        ids = [self.token] * count
        if finish and call.stop_token is not None:
            ids[-1] = call.stop_token
        meta = {
            "id": call.rid,
            "finish_reason": finish,
            "prompt_tokens": call.prompt_tokens,
            "completion_tokens": count,
            "weight_version": str(self.version),
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }
        if finish:
            meta["weight_versions"] = self._spans(call, count)
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _spans(self, call: Call, count: int) -> list[dict[str, Any]]:
        bounds = [
            min(max(int((time - call.begun) / (self.token_s or 1)), 0), count) for time, _ in self._versions
        ]
        spans = [
            {"version": str(version), "start": start, "end": end}
            for (_, version), start, end in zip(self._versions, bounds, [*bounds[1:], count], strict=True)
            if start < end
        ]
        return spans or [{"version": str(self.version), "start": 0, "end": count}]


async def _gone(reader: asyncio.StreamReader, call: Call) -> None:
    """Abort a call whose client goes away; a client sends nothing while it waits."""
    with suppress(ConnectionError):
        await reader.read(1)
    call.aborted = True
    call.changed.set()


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body) if body else {}
    except ValueError as error:
        raise Refused(400, f"JSON decode error: {error}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object")
    return value


def _write(writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
    """A str is answered as plain text, bytes as JSON that is encoded already."""
    kind = "text/plain" if isinstance(answer, str) else "application/json"
    body = (
        answer
        if isinstance(answer, bytes)
        else (answer if isinstance(answer, str) else json.dumps(answer)).encode()
    )
    head = f"HTTP/1.1 {status} -\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Serve SGLang's API with answers that take time, not compute."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--token-s", type=float, default=0.02, help="seconds of one token")
    parser.add_argument("--answer-tokens", type=int, default=256, help="length of an answer without a limit")
    parser.add_argument("--token", type=int, default=0, help="the token id that is sampled")
    given = parser.parse_args(arguments)
    asyncio.run(
        _serve(EmulatedEngine(given.token_s, given.answer_tokens, given.token), given.host, given.port)
    )


async def _serve(engine: EmulatedEngine, host: str, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await engine.start(host, port)
    print(json.dumps({"url": engine.url}), flush=True)
    await ended.wait()
    await engine.stop()


if __name__ == "__main__":
    main()
