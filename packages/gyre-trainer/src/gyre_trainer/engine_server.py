"""SGLang's HTTP API over the embedded engine, as raw ASGI on uvicorn.

    python -m gyre_trainer.engine_server --model DIR [--host 127.0.0.1] [--port 0]

prints one JSON line `{"url": ...}` when it is ready. Owns the wire: shapes of answers and errors, which client gets
which output, and what is held: a `/generate` that comes during a pause, or while an update waits for what runs, is
given to the engine after it and cannot be aborted before. Invariants: every `/generate` is answered exactly once; a
client that goes away aborts its request; no request body can end the process; 400 is for good, 503 for now. Tokens in,
tokens out: there is no tokenizer here, so `text` and stop strings are refused (as SGLang does under
--skip-tokenizer-init).
"""

import argparse
import asyncio
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import orjson
import uvicorn
import uvloop

from gyre_trainer.engine import Engine, GenerateRequest, field_of
from gyre_trainer.engine_options import check_options
from gyre_trainer.errors import (
    ContractError,
    EngineError,
    EngineReleased,
    MalformedRequest,
    RequestError,
    SettingsError,
    TrainerError,
)
from gyre_trainer.generation import PAUSE_MODES, Output
from gyre_trainer.model_qwen3 import DTYPES

# longer than any client's pool keeps a connection, so that none is closed under a request
KEEP_ALIVE_S = 600
STOP_GRACE_S = 5
# how long /health waits for a sign of life, as SGLang does; a paused engine gives none
HEALTH_S = 20


class _Waiter:
    """One /generate in hand: the newest output, and an event that says there is one. `gone`: so is its client."""

    __slots__ = ("event", "gone", "latest", "submitted")

    def __init__(self):
        self.event = asyncio.Event()
        self.latest: Output | None = None
        self.gone = self.submitted = False


class EngineApp:
    """The ASGI application. `deliver` and `failed` are the engine's callbacks; `bind` precedes any request."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.error: BaseException | None = None
        self._loop = loop
        self._waiters: dict[str, _Waiter] = {}
        self._paused = self._updating = self._stopping = False
        self._news = asyncio.Event()  # of anything that `_until` may wait for
        self._started = time.time()
        self._post = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._label,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._occupy,
            "/weights_checker": self._checksum,
        }
        self._get = {
            "/get_model_info": self._model_info,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/health": self._health,
            "/ping": self._ping,
            "/ready": self._ready,
            "/flush_cache": self._flush,
        }

    def bind(self, engine: Engine, server: uvicorn.Server) -> None:
        self.engine, self._server = engine, server

    def stopping(self) -> None:
        """Give every client what it has; what is held is sent elsewhere."""
        self._stopping = True
        self._tell()
        self.engine.resume()
        self.engine.abort()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._news.wait()

    def deliver(self, outputs: list[Output]) -> None:
        """Hand outputs to their clients (from the engine's thread)."""
        if outputs:
            self._loop.call_soon_threadsafe(self._settle, outputs)

    def _settle(self, outputs: list[Output]) -> None:
        for output in outputs:
            waiter = self._waiters.get(output.rid)
            if waiter:
                waiter.latest = output
                waiter.event.set()

    def failed(self, error: BaseException) -> None:
        """The engine's loop died: end the process, so that whoever started it sees it (from the engine's
        thread). Clients see their connections close.
        """
        self.error = error
        self._loop.call_soon_threadsafe(self._die)

    def _die(self) -> None:
        self._server.should_exit = self._server.force_exit = True

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        handler = (self._post if method in ("POST", "PUT") else self._get).get(path)
        if handler is None:
            known = path in self._post or path in self._get
            detail = "Method Not Allowed" if known else "Not Found"
            return await _answer(send, 405 if known else 404, {"detail": detail})
        try:
            body = await _body(receive, optional=path in self._get)
            if handler == self._generate:
                return await self._generate(body, receive, send)
            await _answer(send, *await handler(body))
        except TrainerError as error:
            await _answer(send, 503 if isinstance(error, EngineReleased) else 400, _refusal(error))

    async def _generate(self, body: dict, receive, send) -> None:
        try:
            request = GenerateRequest.parse(body)
            rid = request.rid
            if rid in self._waiters:
                raise RequestError(f"Duplicate request ID detected: {rid}")
            waiter = self._waiters[rid] = _Waiter()
            watch = asyncio.create_task(self._watch(receive, rid))
            try:
                await self._until(lambda: self._open or waiter.gone)
                if self._stopping:
                    raise EngineReleased("the engine is stopping")
                if waiter.gone:
                    return
                self.engine.submit(request)
                waiter.submitted = True
                if request.stream:
                    await _stream(send, waiter, request)
                else:
                    await waiter.event.wait()
                    await _answer(send, 200, request.answer(waiter.latest))
            finally:
                watch.cancel()
                del self._waiters[rid]
                self._tell()
        except (MalformedRequest, ContractError):
            raise
        except RequestError as error:
            if body.get("stream") is not True:
                raise
            await _stream_error(send, error)

    @property
    def _open(self) -> bool:
        """Whether a request is given to the engine, or refused by it, at once."""
        return self._stopping or self.engine.released or not (self._paused or self._updating)

    async def _watch(self, receive, rid: str) -> None:
        """Abort `rid` when its client goes away (a watch that outlives the answer is cancelled)."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._waiters[rid].gone = True
        self._tell()
        if self._waiters[rid].submitted:
            self.engine.abort(rid)

    async def _abort(self, body: dict):
        rid = field_of(body, "rid", str, "")
        if body.get("abort_all"):
            self.engine.abort()
        elif rid in self._waiters:
            self.engine.abort(rid)
        return 200, ""

    async def _pause(self, body: dict):
        mode = field_of(body, "mode", str, "abort")
        if mode not in PAUSE_MODES:
            raise MalformedRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}")
        self._paused = True
        await asyncio.wrap_future(self.engine.pause(mode))
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, body: dict):
        await asyncio.wrap_future(self.engine.resume())
        self._paused = False
        self._tell()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush(self, body: dict):
        if await asyncio.wrap_future(self.engine.flush()):
            return 200, "Cache flushed.\n"
        return 400, "Flush cache failed.\n"

    async def _update(self, body: dict):
        """Unpaused, it waits for what runs and holds what comes. During a pause it does not wait; what an in-place
        pause holds goes on over the KV of the old weights, and an update that was to flush it then fails, though
        the weights did change.
        """
        path, version = field_of(body, "model_path", str), field_of(body, "weight_version", str, None)
        if body.get("abort_all_requests"):
            self.engine.abort()
        self._updating = True
        try:
            await self._until(lambda: self._paused or not any(w.submitted for w in self._waiters.values()))
            keep_kv = body.get("flush_cache") is False
            flushed = await asyncio.wrap_future(self.engine.update(path, version, keep_kv=keep_kv))
        except TrainerError as error:
            return 400, {"success": False, "message": str(error), "num_paused_requests": 0}
        finally:
            self._updating = False
            self._tell()
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        if not flushed:
            message = (
                "Weights were updated, but the cache was not flushed because requests are still running. "
                "Retract or finish them, then call /flush_cache."
            )
        return (200 if flushed else 400), {"success": flushed, "message": message, "num_paused_requests": 0}

    async def _label(self, body: dict):
        version = field_of(body, "new_version", str)
        if body.get("abort_all_requests", True):
            self.engine.abort()
        await asyncio.wrap_future(self.engine.set_version(version))
        message = f"Weight version updated to {version}"
        return 200, {"success": True, "message": message, "new_version": version}

    async def _release(self, body: dict):
        await asyncio.wrap_future(self.engine.release())
        self._tell()
        return 200, None

    async def _occupy(self, body: dict):
        await asyncio.wrap_future(self.engine.occupy())
        return 200, None

    async def _checksum(self, body: dict):
        action = body.get("action") or "checksum"
        if action != "checksum":
            raise RequestError(f"weights_checker action {action!r} is not supported, only 'checksum'")
        checksums = await asyncio.wrap_future(self.engine.checksums())
        overall = _overall(checksums)
        rank = {"checksums": checksums, "per_gpu_checksum": overall}
        return 200, {"success": True, "message": "Success", "ranks": [rank], "per_engine_checksum": overall}

    async def _model_info(self, body: dict):
        return 200, self.engine.model_info()

    async def _server_info(self, body: dict):
        return 200, self.engine.server_info() | {"startup_time": self._started}

    async def _health(self, body: dict):
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._until(lambda: not self._paused)
        except TimeoutError:
            return 503, ""
        return await self._ping(body)

    async def _ping(self, body: dict):
        return (200 if self.engine.alive else 503), ""

    async def _ready(self, body: dict):
        return (200 if self.engine.ready else 503), ""


def _overall(checksums: dict[str, str]) -> str:
    return hashlib.sha256("".join(n + checksums[n] for n in sorted(checksums)).encode()).hexdigest()


async def _stream(send, waiter: _Waiter, request: GenerateRequest) -> None:
    await _start(send, 200, b"text/event-stream; charset=utf-8")
    finished = False
    while not finished:
        await waiter.event.wait()
        waiter.event.clear()
        output = waiter.latest
        finished = output.finish is not None
        await _event(send, request.answer(output))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _stream_error(send, error: EngineError) -> None:
    """A stream's bad request, as SGLang reports it: status 200 and the error as an event."""
    await _start(send, 200, b"text/event-stream; charset=utf-8")
    detail = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
    await _event(send, {"error": detail})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _refusal(error: TrainerError) -> dict:
    """The body of an error, in that of SGLang's shapes which its kind has there."""
    if isinstance(error, MalformedRequest):
        return {"object": "error", "message": str(error), "type": "Bad Request", "param": None, "code": 400}
    return {"error": str(error) if isinstance(error, ContractError) else {"message": str(error)}}


async def _event(send, data: dict) -> None:
    body = b"data: " + orjson.dumps(data) + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _start(send, status: int, content_type: bytes, length: int | None = None) -> None:
    headers = [(b"content-type", content_type)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send, status: int, content) -> None:
    """Answer a str as plain text, anything else as JSON."""
    if isinstance(content, str):
        body, kind = content.encode(), b"text/plain; charset=utf-8"
    else:
        body, kind = orjson.dumps(content), b"application/json"
    await _start(send, status, kind, len(body))
    await send({"type": "http.response.body", "body": body})


async def _body(receive, optional: bool) -> dict:
    """The request's JSON object; with `optional` an empty body counts as `{}`."""
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    raw = b"".join(parts)
    if optional and not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise MalformedRequest("the body must be a JSON object")
    return body


class _Server(uvicorn.Server):
    """Calls `ready` once requests are accepted, and `stopping` when no more are."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], stopping: Callable[[], object]):
        super().__init__(config)
        self._ready, self._stopping = ready, stopping

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets=None) -> None:
        self._stopping()
        await super().shutdown(sockets)


def print_ready(url: str) -> None:
    print(json.dumps({"url": url}), flush=True)


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] = print_ready,
    **engine_options,
) -> None:
    """Serve the folder `model` until SIGINT or SIGTERM; `ready` gets the URL once requests are accepted.
    `engine_options` are those of `Engine`. Raises SettingsError for an option out of its range, ModelError for a
    model that cannot be served, EngineError for a port that cannot be had.
    """
    check_options({"host": host, "port": port, **engine_options})
    bound = _bind(host, port)
    url = f"http://{host}:{bound.getsockname()[1]}"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(model, bound, lambda: ready(url), engine_options))


async def _serve(model: str, bound: socket.socket, ready: Callable[[], None], engine_options: dict) -> None:
    app = EngineApp(asyncio.get_running_loop())
    engine = Engine(model, app.deliver, app.failed, **engine_options)
    config = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_GRACE_S,
    )
    server = _Server(config, ready, stopping=app.stopping)
    app.bind(engine, server)
    engine.start()
    await server.serve([bound])
    if app.error:
        raise EngineError(f"the engine stopped: {app.error!r}") from app.error
    engine.close()


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until the model is loaded, clients are refused."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise EngineError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound


def _exit_at_end_of_stdin() -> None:
    """End this process at once when standard input ends: whoever held the other end of the pipe is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gyre_trainer.engine_server", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory of a dense Qwen3 model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--max-running", type=int, default=32, help="sequences in one step")
    parser.add_argument("--context-length", type=int, help="most tokens of prompt and output together")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--weight-version", dest="version", default="default", help="of --model")
    parser.add_argument("--seed", type=int, help="of requests that bring no sampling_seed")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input ends")
    options = vars(parser.parse_args(arguments))
    if options.pop("exit_with_parent"):
        _exit_at_end_of_stdin()
    try:
        serve(**options)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
