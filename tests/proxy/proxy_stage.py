"""A stage for whole-proxy tests: one event loop in a thread, scripted engines and real proxies on it."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from gyre_proxy.codec import Codec
from gyre_proxy.service import run
from gyre_proxy.settings import Settings
from gyre_trajtree import Call, read_run_log

sys.path.insert(0, str(Path(__file__).parent.parent / "scripted"))

from scripted_engine import ScriptedEngine as FakeEngine  # the name that these tests know it by

ADMIN = {"authorization": "Bearer admin-secret"}
DEADLINE_S = 20


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds; fails after DEADLINE_S."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{condition} did not hold within {DEADLINE_S} s"
        time.sleep(0.005)


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
