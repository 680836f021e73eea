"""Engines as their clients see them, and the two that are started here.

An `Engine` says nothing of its kind but its name: what a test may ask of it, it asks over HTTP.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from conformance_model import VOCABULARY
from gyre_proxy.codec import Codec
from scripted_engine import Call, ScriptedEngine
from scripted_requests import room

WAIT_S = 60
PROMPT = [11, 12, 13, 14, 15]
TOKEN_S = 0.001
"""Time that a scripted token takes."""

LONG = 3000
"""More tokens than any engine samples before a test has aborted them."""

UNFLUSHED = "Weights were updated, but the cache was not flushed"


class Engine:
    """A running engine. `models`: directories of weights that it may load, None where nobody knows any."""

    def __init__(self, name: str, url: str, models: dict[str, Path] | None) -> None:
        self.name, self.url, self.models = name, url, models
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.Client(base_url=url, timeout=WAIT_S, limits=limits, verify=False)
        self._first = self.info()
        self.context = self.server_info()["context_length"]
        self.max_running = self.server_info()["max_running_requests"]

    def info(self) -> dict:
        return self.client.get("/get_model_info").json()

    def server_info(self) -> dict:
        return self.client.get("/server_info").json()

    @property
    def version(self) -> str:
        return self.info()["weight_version"]

    def post(self, path: str, /, timeout: float = WAIT_S, **body: object) -> httpx.Response:
        return self.client.post(path, json=body, timeout=timeout)

    def generate(self, new: int | None = 6, /, **body: object) -> httpx.Response:
        return self.client.post("/generate", json=request(new, **body))

    def answer(self, new: int | None = 6, /, **body: object) -> dict:
        """Of a request that is served."""
        response = self.generate(new, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def pause(self, mode: str) -> None:
        assert self.post("/pause_generation", mode=mode).status_code == 200

    def go_on(self) -> None:
        assert self.post("/continue_generation").status_code == 200

    def flush(self) -> None:
        """Drop the cache; a request that was just answered may still be on its way out."""
        until(lambda: self.post("/flush_cache").status_code == 200)

    def update(self, **body: object) -> dict:
        """Load weights. A request that was just answered may still be on its way out and forbid the flush, though no
        other runs; then again.
        """
        answer = self.post("/update_weights_from_disk", **body)
        while answer.status_code == 400 and answer.json()["message"].startswith(UNFLUSHED):
            self.flush()
            answer = self.post("/update_weights_from_disk", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def restore(self) -> None:
        self.go_on()
        assert self.post("/abort_request", abort_all=True).status_code == 200
        self.flush()  # which succeeds once all that was aborted has gone
        info = self.info()
        if (info["model_path"], info["weight_version"]) != (
            self._first["model_path"],
            self._first["weight_version"],
        ):
            self.update(model_path=self._first["model_path"], weight_version=self._first["weight_version"])


def request(new: int | None = 6, /, **body: object) -> dict:
    """The body of a /generate for `new` tokens whatever is sampled."""
    sampling = {"max_new_tokens": new, "ignore_eos": True, "temperature": 1.0} | body.pop("sampling", {})
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **body}


def until(condition: Callable[[], object]) -> None:
    """Ask until it holds; fails after WAIT_S."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"{condition} did not hold within {WAIT_S} s"
        time.sleep(0.02)


class Running(threading.Thread):
    """One /generate in the background, with an id of its own. `events`: those of a stream so far, without [DONE]."""

    _numbers = iter(range(1_000_000))

    def __init__(self, engine: Engine, new: int | None = LONG, /, **body: object) -> None:
        super().__init__(daemon=True)
        self.rid = str(body.pop("rid", f"running-{os.getpid()}-{next(self._numbers):06}"))
        self.body = request(new, rid=self.rid, **body)
        self.events: list[dict] = []
        self.ended_well = False
        self._client, self._final, self._error = engine.client, None, None
        self._first = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            if self.body.get("stream"):
                self._stream()
            else:
                self._final = self._client.post("/generate", json=self.body)
        except httpx.HTTPError as error:
            self._error = error
        finally:
            self._first.set()

    def _stream(self) -> None:
        with self._client.stream("POST", "/generate", json=self.body) as response:
            assert response.status_code == 200, response.read()
            for data in events(response):
                if data == b"[DONE]":
                    self.ended_well = True
                else:
                    self.events.append(json.loads(data))
                    self._first.set()

    def began(self) -> "Running":
        """Once the first event of the stream is there."""
        assert self._first.wait(WAIT_S) and self.events, f"no event within {WAIT_S} s: {self._error}"
        return self

    @property
    def done(self) -> bool:
        return not self.is_alive()

    def final(self, timeout: float = WAIT_S) -> dict:
        """The last event of a stream, or the answer."""
        self.join(timeout)
        assert self.done, f"{self.rid} is not answered within {timeout} s"
        assert self._error is None, self._error
        if self.body.get("stream"):
            assert self.ended_well
            return self.events[-1]
        assert self._final.status_code == 200, self._final.text
        return self._final.json()


def begun(engine: Engine, new: int = LONG, /) -> Running:
    """A stream that has some tokens."""
    running = Running(engine, new, stream=True).began()
    until(lambda: running.events[-1]["meta_info"]["completion_tokens"] >= 3)
    return running


def ended_later(engine: Engine, running: Running) -> dict:
    """The end of a stream that was aborted after it sampled more."""
    count = len(running.events)
    until(lambda: running.done or len(running.events) > count + 3)
    assert not running.done
    engine.post("/abort_request", rid=running.rid)
    return running.final()


def events(response: httpx.Response) -> Iterator[bytes]:
    """The data of each server-sent event. Lines are bytes: text in JSON may hold what other readers take for ends."""
    rest = b""
    for piece in response.iter_raw():
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            assert event.startswith(b"data: ")
            yield event[6:]
    assert rest == b""


@contextlib.contextmanager
def connection(engine: Engine, body: dict) -> Iterator[socket.socket]:
    """A bare connection that has sent one /generate; leaving closes it."""
    host, port = engine.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as plain:
        plain.sendall(head.encode() + data)
        yield plain


class EmbeddedServer:
    """`python -m gyre_trainer.engine_server` in a process group of its own."""

    def __init__(self, model: Path, *, max_running: int, context: int) -> None:
        command = [
            sys.executable,
            "-m",
            "gyre_trainer.engine_server",
            "--model",
            model,
            "--weight-version",
            "1",
        ]
        command += ["--max-running", max_running, "--context-length", context, "--exit-with-parent"]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        line = self.process.stdout.readline()
        assert line, "the embedded engine ended before it was ready"
        self.url = json.loads(line)["url"]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=WAIT_S)


class _Endless(ScriptedEngine):
    """Samples as many tokens as are asked for, no quicker than other engines, so that requests can be met while they
    run. Each follows from the one before it, its position and the weights, so
    that prompt and partial output give the rest.
    """

    def _plan(self, given: dict) -> tuple[list[int], str]:
        ids, sampling = given["input_ids"], given["sampling_params"]
        wanted = room(len(ids), sampling.get("max_new_tokens", 128), self.context)
        weights = Path(self.model).name.encode()[-1]
        token, tokens = ids[-1], []
        for position in range(len(ids), len(ids) + wanted):
            token = 3 + (31 * token + 17 * position + weights) % (VOCABULARY - 3)
            tokens.append(token)
        return tokens, "length"

    async def _turn(self, call: Call) -> None:
        await asyncio.sleep(TOKEN_S)
        await super()._turn(call)

    def _has_weights(self, path: str) -> bool:
        return (Path(path) / "config.json").exists()


class ScriptedServer:
    """The scripted engine on an event loop of its own."""

    def __init__(self, model: Path, *, max_running: int, context: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        options = {
            "model": str(model),
            "context": context,
            "max_running": max_running,
            "vocabulary": VOCABULARY,
            "grammar": False,
        }
        self._engine = _Endless(Codec(model), [], "1", **options)
        self._do(self._engine.start())
        self.url = self._engine.url

    def _do(self, coroutine: object) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def stop(self) -> None:
        self._do(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
