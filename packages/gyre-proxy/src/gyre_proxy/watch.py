"""Owns looking after engines: whether one that keeps calls in silence still lives, and what it says of itself.

A frozen engine keeps its connections open, so only silence tells. Invariants: an engine that answers a ping keeps its
calls (it may be paused, or thinking); one that answers nothing loses them to the others, with what they sampled.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from gyre_proxy.engine_client import EngineClient
from gyre_proxy.flights import Flight
from gyre_proxy.router import Engine

INTERVAL_S = 1.0
"""Time between two looks."""
LEARN_S = 10.0
"""Time between two questions for the name of an engine's weights, where nobody told it."""

_LOG = logging.getLogger("gyre_proxy")


class Watch:
    """Looks at every engine of `engines()` while it runs; `running()` are the calls under way."""

    def __init__(
        self,
        engines: Callable[[], Iterable[Engine]],
        running: Callable[[], Iterable[Flight]],
        client: EngineClient,
        silence_s: float,
    ) -> None:
        self._engines, self._running, self._client, self._silence_s = engines, running, client, silence_s
        self._busy: dict[Engine, asyncio.Task] = {}
        self._asked: dict[Engine, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._look(time.monotonic())
                await asyncio.sleep(INTERVAL_S)
        finally:
            for task in self._busy.values():
                task.cancel()

    def _look(self, now: float) -> None:
        engines = list(self._engines())
        self._asked = {engine: at for engine, at in self._asked.items() if engine in engines}
        for engine in engines:
            if engine in self._busy:
                continue
            silent = [f for f in self._running() if f.engine is engine and f.heard + self._silence_s <= now]
            if silent:
                self._start(engine, self._ping(engine, silent))
            elif _unknown(engine) and self._asked.get(engine, 0.0) + LEARN_S <= now:
                self._asked[engine] = now
                self._start(engine, self.learn(engine))

    def _start(self, engine: Engine, work: object) -> None:
        task = self._busy[engine] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._busy.pop(engine, None))

    async def _ping(self, engine: Engine, silent: list[Flight]) -> None:
        legs = [(flight, flight.rid) for flight in silent]
        if await self._client.alive(engine.url):
            for flight, _ in legs:
                flight.heard = time.monotonic()
            return
        left = [f for f, rid in legs if f.engine is engine and f.rid == rid]
        for flight in left:
            flight.drop("frozen")
        if left:
            _LOG.warning(
                "engine frozen",
                extra={"fields": {"engine": engine.url, "calls": [flight.id for flight in left]}},
            )

    async def learn(self, engine: Engine) -> None:
        """Take over what an engine says of itself: how it calls its weights, how long a prompt may be."""
        if engine.limits is None:
            engine.limits = await self._client.limits(engine.url)
        label = await self._client.weights(engine.url)
        engine.asked = True
        engine.label = label or engine.label


def _unknown(engine: Engine) -> bool:
    return engine.version is None or engine.limits is None
