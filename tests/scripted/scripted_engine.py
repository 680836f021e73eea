"""Owns the scripted engine: SGLang's HTTP API played from a script, for tests that need to say what is sampled and when.

Invariants: it answers as the real server does in every case of tests/conformance; nothing in it takes time, so a test
decides what happens first; every /generate is answered once or its connection is cut.
"""

import asyncio
import threading
from collections.abc import Callable

import orjson
import uvicorn
from gyre_proxy.codec import Codec
from scripted_cache import PrefixCache
from scripted_requests import VALUE, Refused, check_types, check_values, read, room

DEADLINE_S = 20
HEALTH_S = 20
"""How long /health waits for a sign of life; a paused server gives none."""

DELIVERED_EVERY = 50
"""Tokens between two deliveries of a call that is not streamed: of one that ends while it waits, the rest is lost."""

_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
_ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}
_MODES = ("abort", "retract", "in_place")


class Call:
    """One /generate in hand. `phase`: "held" (came during a pause), "waiting", "running", "done"."""

    def __init__(self, given: dict) -> None:
        self.given = given
        self.phase = "held"
        self.aborted, self.news = asyncio.Event(), asyncio.Event()
        self.ids: list[int] = []
        self.versions: list[str] = []
        """Of each token in `ids`."""
        self.cached = self.retractions = 0

    @property
    def key(self) -> tuple:
        return self.given.get("extra_key") or "", self.given.get("cache_salt") or ""

    def spans(self, version: str) -> list[dict]:
        spans: list[dict] = []
        for index, name in enumerate(self.versions):
            if not spans or spans[-1]["version"] != name:
                spans.append({"version": name, "start": index, "end": index})
            spans[-1]["end"] = index + 1
        return spans or [{"version": version, "start": 0, "end": 0}]


class ScriptedEngine:
    """Plays a script; subclasses override `_plan` to decide otherwise what a request is answered with.

    Script items are texts (ended by the turn-end token) or (text, "length"). The log-prob of the token at
    position p of prompt plus output is -p / 1000, whichever engine samples it. With `hold_after = n` a
    request stops after n tokens until it is aborted or `release()`. `context`, `max_running`,
    `vocabulary` None: no limit. `grammar`: takes schemas, which it does not look at.
    """

    def __init__(
        self,
        codec: Codec,
        script: list,
        version: int | str = 0,
        *,
        model: str = "scripted",
        context: int | None = None,
        max_running: int | None = None,
        vocabulary: int | None = None,
        grammar: bool = True,
    ) -> None:
        self.codec, self.script, self.version, self.model = codec, list(script), version, model
        self.context, self.max_running, self.vocabulary = context, max_running, vocabulary
        self.grammar = grammar
        self.requests: list[dict] = []
        self.aborted: list[str] = []
        self.hold_after: int | None = None
        self.refuse: int | None = None
        self.die_after: int | None = None
        self.ignore_aborts = False
        self.aborts_everything = False
        self.url = ""
        self.port = 0
        self.paused: str | None = None
        """The mode of the pause, None while running."""
        self._updating = False
        self._cache = PrefixCache()
        self._calls: list[Call] = []
        self._changes = asyncio.Event()
        self._released = asyncio.Event()
        self._held = threading.Event()
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task | None = None
        self._post = {
            "/generate": None,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._label,
            "/weights_checker": self._checksum,
        }
        self._get = {
            "/get_model_info": self._model_info,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/ping": self._ping,
            "/ready": self._ready,
            "/health": self._health,
            "/flush_cache": self._flush,
        }

    # -- what tests steer

    def wait_held(self) -> None:
        assert self._held.wait(DEADLINE_S), "no request reached the hold"
        self._held.clear()

    async def start(self) -> None:
        config = uvicorn.Config(
            self._app, port=self.port, log_level="error", lifespan="off", ws="none", interface="asgi3"
        )
        self._server = uvicorn.Server(config)
        self._running = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(DEADLINE_S):
            while not self._server.started:
                await asyncio.sleep(0.002)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Die: every connection is cut."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await self._running
            self._server = None

    async def update(self, version: int) -> None:
        """Cut every running request, go to a version, and hold none from now on."""
        self.hold_after, self.version = None, version
        for call in self._calls:
            call.aborted.set()
        self._tell()

    async def release(self) -> None:
        self._released.set()

    # -- HTTP

    async def _app(self, scope: dict, receive: Callable, send: Callable) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        path, posted = scope["path"], scope["method"] in ("POST", "PUT")
        if self.refuse is not None:
            return await _json(send, self.refuse, {"error": {"message": "refused by script"}})
        if path not in (self._post if posted else self._get):
            known = path in self._post or path in self._get
            detail = "Method Not Allowed" if known else "Not Found"
            return await _json(send, 405 if known else 404, {"detail": detail})
        try:
            if posted and path == "/generate":
                return await self._generate(read(body), receive, send)
            if posted:
                status, answer = await self._post[path](read(body) if body or path != "/flush_cache" else {})
            else:
                status, answer = await self._get[path]({})
        except Refused as refused:
            status, answer = 400, refused.body()
        await _json(send, status, answer)

    async def _abort(self, given: dict) -> tuple[int, object]:
        """As SGLang does, every request whose id begins like that of a request in hand; not those held by a pause."""
        rid = given.get("rid") or ""
        if type(rid) is not str:
            raise Refused("malformed", "rid: Input should be a valid string")
        self.aborted.append(rid)
        everything = bool(given.get("abort_all"))
        known = any(call.given["rid"] == rid for call in self._calls)
        if not self.ignore_aborts and (everything or known):
            self._abort_where(lambda call: everything or call.given["rid"].startswith(rid))
        return 200, ""

    def _abort_where(self, chosen: Callable[[Call], bool]) -> None:
        for call in self._calls:
            if call.phase in ("waiting", "running") and chosen(call):
                call.aborted.set()
        self._tell()

    async def _pause(self, given: dict) -> tuple[int, object]:
        mode = given.get("mode") or "abort"
        if mode not in _MODES:
            raise Refused("malformed", "mode: Input should be 'abort', 'retract' or 'in_place'")
        if mode == "abort":
            self._abort_where(lambda call: True)
            self._gate("abort")
            await self._until(lambda: not self._at_work())
        else:
            self._gate(mode)
        for call in self._calls if mode == "retract" else ():
            if call.phase == "running":
                call.phase, call.retractions = "waiting", call.retractions + 1
        self._tell()
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _gate(self, mode: str) -> None:
        self.paused = mode
        self._tell()

    async def _continue(self, given: dict) -> tuple[int, object]:
        self.paused = None
        self._tell()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush(self, given: dict) -> tuple[int, object]:
        busy = ("running",) if self.paused else ("running", "waiting")
        if any(call.phase in busy for call in self._calls):
            return 400, "Flush cache failed.\n"
        self._cache.clear()
        return 200, "Cache flushed.\n"

    async def _update(self, given: dict) -> tuple[int, object]:
        """Other weights: unpaused it waits until nothing is at work, and what comes meanwhile is held."""
        path, version = given.get("model_path"), given.get("weight_version")
        for name, value in (("model_path", path), ("weight_version", version or "")):
            if type(value) is not str:
                raise Refused("malformed", f"{name}: Input should be a valid string")
        if given.get("abort_all_requests"):
            self._abort_where(lambda call: True)
        if not self.paused:
            self._updating = True
            await self._until(lambda: not self._at_work())
        self._updating = False
        flush = given.get("flush_cache", True)
        if not self._has_weights(path):
            self._tell()
            return 400, {"success": False, "message": f"no weights in {path}", "num_paused_requests": 0}
        self.model, message = path, "Succeeded to update model weights."
        if version is not None:
            self.version = version
            message += f" Weight version updated to {version}."
        flushed = not flush or (await self._flush({}))[0] == 200
        if not flushed:
            message = (
                "Weights were updated, but the cache was not flushed because requests are still running."
            )
        self._tell()
        status = 200 if flushed else 400
        return status, {"success": flushed, "message": message, "num_paused_requests": 0}

    def _has_weights(self, path: str) -> bool:
        return not path.startswith("/nowhere")

    async def _label(self, given: dict) -> tuple[int, object]:
        version = given.get("new_version")
        if type(version) is not str:
            raise Refused("malformed", "new_version: Input should be a valid string")
        if given.get("abort_all_requests", True):
            self._abort_where(lambda call: True)
        self.version = version
        text = f"Weight version updated to {version}"
        return 200, {"success": True, "message": text, "new_version": version}

    async def _checksum(self, given: dict) -> tuple[int, object]:
        return 200, {
            "success": True,
            "message": "Success.",
            "per_engine_checksum": f"weights of {self.model}",
        }

    async def _model_info(self, given: dict) -> tuple[int, object]:
        return 200, {
            "model_path": self.model,
            "is_generation": True,
            "weight_version": str(self.version),
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }

    async def _server_info(self, given: dict) -> tuple[int, object]:
        return 200, {
            "model_path": self.model,
            "weight_version": str(self.version),
            "context_length": self.context,
            "max_req_input_len": None if self.context is None else self.context - 6,
            "max_running_requests": self.max_running,
            "skip_tokenizer_init": True,
        }

    async def _ping(self, given: dict) -> tuple[int, object]:
        return 200, ""

    async def _ready(self, given: dict) -> tuple[int, object]:
        return (503 if self.paused else 200), ""

    async def _health(self, given: dict) -> tuple[int, object]:
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._until(lambda: not self.paused)
        except TimeoutError:
            return 503, ""
        return 200, ""

    # -- one request

    async def _generate(self, given: dict, receive: Callable, send: Callable) -> None:
        check_types(given)
        self.requests.append(given)
        given = {"stream": False, "rid": f"request-{len(self.requests)}", "sampling_params": {}, **given}
        call = Call(given)
        watch = None
        try:
            self._enter(call)
            watch = asyncio.create_task(self._watch(receive, call))
            await self._until(lambda: not self.paused and not self._updating)
            check_values(given, self.context, self.vocabulary, self.grammar)
            call.phase = "waiting"
            await self._play(call, send)
        except Refused as refused:
            if not given["stream"] or refused.shape != VALUE:
                raise
            await _start_stream(send)
            data = b"data: " + orjson.dumps(refused.event()) + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": data})
        finally:
            if watch is not None:
                watch.cancel()
            if call in self._calls:
                self._calls.remove(call)
            self._tell()

    def _enter(self, call: Call) -> None:
        rid = call.given["rid"]
        if any(other.given["rid"] == rid for other in self._calls):
            raise Refused(VALUE, f"Duplicate request ID detected: {rid}")
        self._calls.append(call)

    async def _watch(self, receive: Callable, call: Call) -> None:
        """Abort the call when its client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        call.aborted.set()
        self._tell()

    async def _play(self, call: Call, send: Callable) -> None:
        given = call.given
        if self.aborts_everything:
            call.aborted.set()
        tokens, finish = self._cut(given, *self._plan(given))
        if given["stream"]:
            await _start_stream(send)
        while True:
            await self._turn(call)
            if len(call.ids) == self.die_after:
                return
            if call.phase == "running" and len(call.ids) == self.hold_after and not self._released.is_set():
                await self._hold(call)
            if call.aborted.is_set():
                finish = _ABORTED if call.phase == "running" else _ABORTED_WAITING
                break
            if len(call.ids) == len(tokens):
                break
            call.ids.append(tokens[len(call.ids)])
            call.versions.append(str(self.version))
            if given["stream"]:
                data = b"data: " + orjson.dumps(self._payload(call, None)) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
        if finish is _ABORTED_WAITING and not given["stream"]:
            kept = len(call.ids) // DELIVERED_EVERY * DELIVERED_EVERY
            call.ids, call.versions = call.ids[:kept], call.versions[:kept]
        elif call.phase == "running":
            self._cache.keep(call.key, given["input_ids"] + call.ids[:-1])
        call.phase = "done"
        self._tell()
        final = self._payload(call, finish)
        if given["stream"]:
            data = b"data: " + orjson.dumps(final) + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": data})
        else:
            await _json(send, 200, final)

    async def _turn(self, call: Call) -> None:
        """Wait until the call may sample its next token or, where it waits, ends. Lets others go first."""
        await asyncio.sleep(0)
        await self._until(lambda: self._may_go_on(call))
        if call.phase == "waiting" and not call.aborted.is_set():
            call.phase = "running"
            if not call.retractions:
                call.cached = self._cache.shared(call.key, call.given["input_ids"])

    def _may_go_on(self, call: Call) -> bool:
        if call.phase == "waiting":
            if call.aborted.is_set():
                return True
            running = sum(other.phase == "running" for other in self._calls)
            return not self.paused and (self.max_running is None or running < self.max_running)
        return self.paused != "in_place"

    async def _hold(self, call: Call) -> None:
        self._held.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (call.aborted, self._released)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _at_work(self) -> bool:
        return any(call.phase in ("waiting", "running") for call in self._calls)

    def _tell(self) -> None:
        """Something changed that others may wait for."""
        self._changes.set()
        self._changes = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changes.wait()

    def _plan(self, given: dict) -> tuple[list[int], str]:
        """The tokens that answer a request, and "stop" or "length". Here: what is left of the script's item, since a
        continued request holds its first tokens already.
        """
        item = self.script[0]
        text, finish = item if isinstance(item, tuple) else (item, "stop")
        tokens = self.codec._tokenizer.encode(text, add_special_tokens=False).ids
        tokens += [] if finish == "length" else [self.codec.turn_end]
        done = next(n for n in range(len(tokens), -1, -1) if n == 0 or given["input_ids"][-n:] == tokens[:n])
        if len(self.script) > 1:
            self.script.pop(0)
        return tokens[done:], finish

    def _cut(self, given: dict, tokens: list[int], finish: str) -> tuple[list[int], dict]:
        """The plan up to the first stop token and the request's limit, with SGLang's finish reason."""
        sampling = given["sampling_params"]
        stops = () if sampling.get("ignore_eos") else sampling.get("stop_token_ids") or ()
        stopped = next((index + 1 for index, token in enumerate(tokens) if token in stops), None)
        end = stopped or len(tokens)
        new = sampling.get("max_new_tokens", 128)
        limit = room(len(given["input_ids"]), new, self.context)
        if limit is not None and limit < end:
            return tokens[:limit], {"type": "length", "length": limit}
        if stopped or finish == "stop":
            return tokens[:end], {"type": "stop", "matched": tokens[end - 1] if end else None}
        return tokens, {"type": "length", "length": len(tokens)}

    def _payload(self, call: Call, finish: dict | None) -> dict:
        given, start = call.given, len(call.given["input_ids"])
        meta = {"id": given["rid"], "finish_reason": finish, "weight_version": str(self.version)}
        if finish is not _ABORTED_WAITING:
            meta |= {
                "prompt_tokens": start,
                "cached_tokens": call.cached,
                "num_retractions": call.retractions,
            }
        meta["completion_tokens"] = len(call.ids)
        if given.get("return_logprob"):
            meta["output_token_logprobs"] = [[-(start + i) / 1000, t, None] for i, t in enumerate(call.ids)]
        if finish:
            meta["weight_versions"] = call.spans(str(self.version))
        return {"text": "", "output_ids": call.ids, "meta_info": meta}


async def _start_stream(send: Callable) -> None:
    head = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": head})


async def _json(send: Callable, status: int, value: object) -> None:
    """A str is answered as plain text, anything else as JSON."""
    text = isinstance(value, str)
    kind, body = (b"text/plain", value.encode()) if text else (b"application/json", orjson.dumps(value))
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})
