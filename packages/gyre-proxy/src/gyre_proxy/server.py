"""Owns the HTTP face for harnesses: paths, keys, bodies, answers, event streams; a raw ASGI application.

Invariants: the final byte of an answer leaves after the call is durable; a failure after the first byte
resets the connection, because some harnesses take a cleanly ended stream for a whole answer.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from types import ModuleType

import orjson

from gyre_proxy import admin, metrics
from gyre_proxy.bodies import request_body
from gyre_proxy.capability import execution_of
from gyre_proxy.conversation import Request
from gyre_proxy.dialects import BY_PATH, chat, messages, responses
from gyre_proxy.errors import (
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    Busy,
    ContextOverflow,
    EngineUnavailable,
    NotFound,
    ProxyError,
    RecordingFailed,
)
from gyre_proxy.evidence import hints
from gyre_proxy.flights import Flight
from gyre_proxy.gateway import Gateway

BODY_FLOOR, BODY_CEILING = 8 * 2**20, 64 * 2**20
"""Bytes a body may always have, and may have at most; between them twice the longest text that fits the context."""

Send = Callable[[dict], Awaitable[None]]
Receive = Callable[[], Awaitable[dict]]

_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Application:
    """ASGI application of one proxy. `secret` signs and checks the executions' keys."""

    def __init__(self, gateway: Gateway, secret: bytes, base_url: str) -> None:
        self.gateway, self.secret, self.base_url = gateway, secret, base_url
        largest = 2 * gateway.context_length * gateway.codec.longest_token
        self.body_limit = min(max(largest, BODY_FLOOR), BODY_CEILING)

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        dialect: ModuleType = chat
        try:
            execution, path = _route(scope["path"])
            dialect = BY_PATH.get(path, messages if path == "messages/count_tokens" else chat)
            if path.startswith("admin/") and execution is None:
                admin.authorise(self.gateway.settings.admin_token, scope)
                status, answer = await admin.handle(self, scope, await self._body(receive))
                return await _send_json(send, status, answer)
            await self._serve(scope, receive, send, execution, path)
        except ProxyError as error:
            self.gateway.metrics.refused.labels(error.status).inc()
            await _send_error(send, dialect, error)

    async def _serve(
        self, scope: dict, receive: Receive, send: Send, execution: str | None, path: str
    ) -> None:
        method = scope["method"]
        if method == "HEAD" or (method == "GET" and path in ("", "health")):
            return await _send_json(send, 200, {"status": "ok", **admin.load(self.gateway)})
        if path == "metrics" and execution is None:
            if self.gateway.settings.strict:  # it names engines
                admin.authorise(self.gateway.settings.admin_token, scope)
            content_type = (b"content-type", metrics.CONTENT_TYPE.encode())
            return await _send(send, 200, [content_type], self.gateway.metrics.text())
        headers = dict(scope["headers"])
        if method == "GET" and (path == "models" or path.startswith("models/")):
            return await _send_json(send, 200, self._models(path))
        counting = path == "messages/count_tokens"
        dialect = messages if counting else BY_PATH.get(path)
        if dialect is None or method != "POST":
            raise NotFound(
                f"{method} {scope['path']} is not served here; see the proxy's README for its paths"
            )
        settings = self.gateway.settings
        name = execution_of(self.secret, bearer(headers), execution, settings.strict, time.time())
        raw = await self._body(receive)
        readings = self.gateway.executions.readings(name)
        request = dialect.parse(request_body(headers, raw, readings, dialect.Reader))
        if request.images and settings.images == "refuse":
            raise BadRequest(f"{request.images} images: this model reads text only; send none")
        if counting:
            return await _send_json(send, 200, messages.count(await self.gateway.count_tokens(name, request)))
        try:
            flight = await self.gateway.open_flight(
                name, request, hints(headers), path, dialect.TOOL_ID_PREFIX
            )
        except ContextOverflow as error:
            if dialect is responses and request.stream:
                failed = responses.failed_stream(request, error, secrets.token_hex(8), int(time.time()))
                return await _send(send, 200, _STREAM_HEADERS, failed)
            raise
        await self._follow(flight, request, dialect, receive, send)

    async def _follow(
        self, flight: Flight, request: Request, dialect: ModuleType, receive: Receive, send: Send
    ) -> None:
        """Give one client the call's answer; the call ends when its last client is gone."""
        gone = asyncio.ensure_future(receive())
        gone.add_done_callback(lambda _: flight.changed.fire())
        flight.readers += 1
        delivered = False
        try:
            if request.stream:
                delivered = await self._stream(flight, request, dialect, gone, send)
            else:
                delivered = await self._whole(flight, request, dialect, gone, send)
        except TimeoutError:
            return  # it stopped reading: as good as gone
        finally:
            gone.cancel()
            self.gateway.leave(flight, delivered)

    async def _whole(
        self, flight: Flight, request: Request, dialect: ModuleType, gone: asyncio.Future, send: Send
    ) -> bool:
        """Whether the client got the answer."""
        while not flight.done and not gone.done():
            await flight.changed.wait()
        if flight.failure is not None:
            raise flight.failure
        if flight.answer is not None and not gone.done():
            await _send_json(send, 200, dialect.answer(request, flight.answer), *_call_id(flight))
            return True
        return False

    async def _stream(
        self, flight: Flight, request: Request, dialect: ModuleType, gone: asyncio.Future, send: Send
    ) -> bool:
        """Whether the client got the answer."""
        parent = flight.prompt.parent
        reused = parent.length if parent else 0
        writer = dialect.Stream(request, flight.id, int(flight.started), len(flight.prompt), reused)
        begun, sent, silence = False, 0, self.gateway.settings.keepalive_s
        quiet_until = time.monotonic() + silence
        while not gone.done():
            out = b"".join(writer.delta(*piece) for piece in flight.pieces[sent:])
            sent = len(flight.pieces)
            if flight.failure is not None:
                if not begun:
                    raise flight.failure
                return False  # an unfinished response makes the server reset the connection
            if flight.answer is not None:
                out += writer.finish(flight.answer)
            if not begun and (out or flight.ids):
                out = writer.start() + out
            if flight.answer is not None:
                await self._stream_out(send, flight, begun, out, last=True)
                return True
            if not out and (left := quiet_until - time.monotonic()) > 0:
                await flight.changed.wait(left)
                continue
            await self._stream_out(
                send, flight, begun, out or (writer.keepalive() if begun else writer.start())
            )
            begun, quiet_until = True, time.monotonic() + silence
        return False

    async def _stream_out(
        self, send: Send, flight: Flight, begun: bool, data: bytes, last: bool = False
    ) -> None:
        """Raises TimeoutError for a client that does not take what it asked for."""
        async with asyncio.timeout(self.gateway.settings.body_timeout_s):
            if not begun:
                headers = [*_STREAM_HEADERS, *_call_id(flight)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _body(self, receive: Receive) -> bytes:
        limit = self.gateway.settings.body_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await _body(receive, self.body_limit)
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {limit:g} s") from None

    def _models(self, path: str) -> dict:
        model = {
            "id": path.removeprefix("models/") if "/" in path else self.gateway.settings.model,
            "object": "model",
            "type": "model",
            "display_name": self.gateway.settings.model,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "gyre",
            "max_model_len": self.gateway.context_length,
        }
        if "/" in path:
            return model
        return {
            "object": "list",
            "data": [model],
            "has_more": False,
            "first_id": model["id"],
            "last_id": model["id"],
        }


def _route(path: str) -> tuple[str | None, str]:
    """(execution or None, the path under it without any /v1): clients append /v1 themselves or not.

    Raises NotFound for an execution without a name.
    """
    execution = None
    if path.startswith("/x/"):
        execution, _, path = path.removeprefix("/x/").partition("/")
        if not execution:
            raise NotFound(
                "the path names no execution between /x/ and /v1; is a variable of the base URL empty?"
            )
    parts = [part for part in path.split("/") if part]
    while parts[:1] == ["v1"]:
        parts = parts[1:]
    return execution, "/".join(parts)


def bearer(headers: dict[bytes, bytes]) -> str | None:
    """The key of a request: x-api-key or Authorization: Bearer."""
    key = headers.get(b"x-api-key")
    if key is None:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
    return key.decode("latin-1").strip() or None


async def _body(receive: Receive, limit: int) -> bytes:
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the connection closed before the body was whole")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise BodyTooLarge(f"the body exceeds {limit} bytes")
        more = message.get("more_body", False)
    return b"".join(chunks)


async def _send(send: Send, status: int, headers: list, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _send_json(send: Send, status: int, value: dict, *headers: tuple[bytes, bytes]) -> None:
    await _send(send, status, [(b"content-type", b"application/json"), *headers], orjson.dumps(value))


def _call_id(flight: Flight) -> list[tuple[bytes, bytes]]:
    """The call's id under the names that the SDKs of the protocols look for."""
    return [(b"request-id", flight.id.encode()), (b"x-request-id", flight.id.encode())]


async def _send_error(send: Send, dialect: ModuleType, error: ProxyError) -> None:
    later = isinstance(error, EngineUnavailable | RecordingFailed | Busy)
    headers = [(b"retry-after", b"1")] if later else []
    await _send_json(send, error.status, dialect.error(error), *headers)
