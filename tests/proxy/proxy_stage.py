"""A stage for whole-proxy tests: one event loop in a thread, scripted engines and real proxies on it."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import orjson
import uvicorn
from gyre_proxy.codec import Codec
from gyre_proxy.service import run
from gyre_proxy.settings import Settings
from gyre_trajtree import Call, read_run_log

ADMIN = {"authorization": "Bearer admin-secret"}
DEADLINE_S = 20


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds; fails after DEADLINE_S."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{condition} did not hold within {DEADLINE_S} s"
        time.sleep(0.005)


class FakeEngine:
    """SGLang's /generate and /abort_request, playing a script.

    Script items are texts (ended by the turn-end token) or (text, "length"). The log-prob of the token at
    position p of prompt plus output is -p / 1000, whichever engine samples it. With `hold_after = n` a
    request stops after n tokens until it is aborted or `release()`.
    """

    def __init__(self, codec: Codec, script: list, version: int | str = 0) -> None:
        self.codec, self.script, self.version = codec, list(script), version
        self.requests: list[dict] = []
        self.aborted: list[str] = []
        self.hold_after: int | None = None
        self.refuse: int | None = None
        self.die_after: int | None = None
        self.ignore_aborts = False
        self.aborts_everything = False
        self.url = ""
        self.port = 0
        self._released = asyncio.Event()
        self._held = threading.Event()
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task | None = None
        self._abort_events: dict[str, asyncio.Event] = {}

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
        for event in self._abort_events.values():
            event.set()
        self._abort_events = {}

    async def release(self) -> None:
        self._released.set()

    async def _app(self, scope: dict, receive: Callable, send: Callable) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        given = orjson.loads(body) if body else {}
        if self.refuse is not None:
            return await _json(send, self.refuse, {"error": {"message": "refused by script"}})
        if scope["path"] in ("/ping", "/get_model_info"):
            return await _json(send, 200, {"weight_version": str(self.version)})
        if scope["path"] == "/abort_request":
            self.aborted.append(given["rid"])
            if given["rid"] in self._abort_events and not self.ignore_aborts:
                self._abort_events[given["rid"]].set()
            return await _json(send, 200, {})
        self.requests.append(given)
        await self._generate(given, send)

    async def _generate(self, given: dict, send: Callable) -> None:
        aborted = self._abort_events.setdefault(given["rid"], asyncio.Event())
        if self.aborts_everything:
            aborted.set()
        version = self.version
        tokens, finish = self._plan(given)
        limit = given["sampling_params"]["max_new_tokens"]
        if limit < len(tokens):
            tokens, finish = tokens[:limit], "length"
        if given["stream"]:
            head = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
        for count in range(len(tokens) + 1):
            if given["stream"] and count:
                data = b"data: " + orjson.dumps(self._payload(given, tokens[:count], None, version)) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if count == self.die_after:
                return
            if count == self.hold_after and not self._released.is_set():
                self._held.set()
                waits = [asyncio.ensure_future(e.wait()) for e in (aborted, self._released)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            if aborted.is_set():
                tokens, finish = tokens[:count], "abort"
                break
        final = self._payload(given, tokens, finish, version)
        if given["stream"]:
            data = b"data: " + orjson.dumps(final) + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": data})
        else:
            await _json(send, 200, final)

    def _plan(self, given: dict) -> tuple[list[int], str]:
        """What is left of the script's item: a continued request holds its first tokens already."""
        item = self.script[0]
        text, finish = item if isinstance(item, tuple) else (item, "stop")
        tokens = self.codec._tokenizer.encode(text, add_special_tokens=False).ids
        tokens += [] if finish == "length" else [self.codec.turn_end]
        done = next(n for n in range(len(tokens), -1, -1) if n == 0 or given["input_ids"][-n:] == tokens[:n])
        if len(self.script) > 1:
            self.script.pop(0)
        return tokens[done:], finish

    def _payload(self, given: dict, tokens: list[int], finish: str | None, version: object) -> dict:
        start = len(given["input_ids"])
        meta = {
            "id": given["rid"],
            "finish_reason": {"type": finish} if finish else None,
            "prompt_tokens": start,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": str(version),
            "output_token_logprobs": [[-(start + i) / 1000, t, None] for i, t in enumerate(tokens)],
        }
        if finish and tokens:
            meta["weight_versions"] = [{"version": str(version), "start": 0, "end": len(tokens)}]
        return {"text": "", "output_ids": tokens, "meta_info": meta}


async def _json(send: Callable, status: int, value: dict) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json")],
        }
    )
    await send({"type": "http.response.body", "body": orjson.dumps(value)})


class Proxy:
    """A running proxy and what it recorded.

    Its URLs are plain http: `verify=False` only spares each request the loading of certificates, 0.1 s of CPU time.
    """

    def __init__(self, url: str, facts: dict, record: Path) -> None:
        self.url, self.facts, self.record = url, facts, record

    def calls(self) -> list[Call]:
        return [record for record in read_run_log(self.record) if isinstance(record, Call)]

    def admin(self, method: str, path: str, body: dict | None = None, timeout: float = DEADLINE_S) -> dict:
        url = f"{self.url}/admin/{path}"
        answer = httpx.request(method, url, json=body, headers=ADMIN, timeout=timeout, verify=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(
        self, path: str, body: dict, execution: str = "e", headers: dict | None = None
    ) -> httpx.Response:
        url = f"{self.url}/x/{execution}/v1/{path}"
        return httpx.post(url, json=body, headers=headers, timeout=DEADLINE_S, verify=False)


class Stage:
    """Owns the event loop; everything started on it is stopped by `clear`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._stops: list[Callable] = []

    def do(self, coroutine: object) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def engine(self, codec: Codec, script: list, version: int = 0) -> FakeEngine:
        engine = FakeEngine(codec, script, version)
        self.do(engine.start())
        self._stops.append(engine.stop)
        return engine

    def proxy(self, **settings: object) -> Proxy:
        settings = Settings(**{"admin_token": "admin-secret", "keepalive_s": 5.0, **settings})
        return self.do(self._start(settings))

    async def _start(self, settings: Settings) -> Proxy:
        ready, stop = self.loop.create_future(), asyncio.Event()
        task = asyncio.create_task(run(settings, ready.set_result, stop))

        async def end() -> None:
            stop.set()
            await task

        self._stops.append(end)
        done, _ = await asyncio.wait((ready, task), timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            task.result()
        facts = ready.result()
        return Proxy(facts["url"], facts, settings.record)

    def clear(self) -> None:
        stops, self._stops = self._stops, []

        async def stop_all() -> None:
            await asyncio.gather(*(stop() for stop in stops))

        self.do(stop_all())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
