"""Owns looking after engines: whether one that keeps calls in silence still lives, and what it says of itself.

A frozen engine keeps its connections open, so only silence tells. Invariants: an engine that answers a ping keeps its
calls (it may be paused, or thinking); one that answers nothing loses them to the others, with what they sampled.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from math import inf

from gyre_proxy.engine_client import EngineClient
from gyre_proxy.flights import Flight
from gyre_proxy.router import Engine

INTERVAL_S = 1.0
"""Time between two looks."""
LEARN_S = 10.0
"""Time between two questions for the name of an engine's weights, where nobody told it."""

_LOG = logging.getLogger("gyre_proxy")


class Watch:
    """Looks at every engine of `engines()` while it runs; `running()` are the calls under way.

    `changed()` is called when a call may have got an engine.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable[Engine]],
        running: Callable[[], Iterable[Flight]],
        client: EngineClient,
        silence_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._engines, self._running, self._client, self._silence_s = engines, running, client, silence_s
        self._changed = changed
        self._busy: dict[tuple[str, Engine], asyncio.Task] = {}
        self._asked: dict[Engine, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._look(time.monotonic())
            await asyncio.sleep(INTERVAL_S)

    def close(self) -> None:
        for task in self._busy.values():
            task.cancel()

    def ask(self, engine: Engine) -> None:
        """Begin to learn what an engine says of itself, if that is not under way."""
        self._asked[engine] = time.monotonic()
        self._start("learn", engine, self._learn)

    def _look(self, now: float) -> None:
        engines = list(self._engines())
        self._asked = {engine: at for engine, at in self._asked.items() if engine in engines}
        for engine in engines:
            silent = [f for f in self._running() if f.engine is engine and f.heard + self._silence_s <= now]
            if silent or engine.mute:
                self._start("ping", engine, self._ping)
            elif _unknown(engine) and self._asked.get(engine, -inf) + LEARN_S <= now:
                self.ask(engine)

    def _start(self, what: str, engine: Engine, work: Callable[[Engine], Awaitable[None]]) -> None:
        if (what, engine) not in self._busy:
            task = self._busy[what, engine] = asyncio.ensure_future(work(engine))
            task.add_done_callback(lambda _: self._busy.pop((what, engine), None))

    async def _ping(self, engine: Engine) -> None:
        """Has it a sign of life to give? Its silent calls go on elsewhere when it has none."""
        begun = time.monotonic()
        legs = [(flight, flight.rid) for flight in self._running() if flight.engine is engine]
        if await self._client.alive(engine.url):
            for flight, rid in legs:
                if flight.rid == rid:
                    flight.heard = max(flight.heard, begun)
            self._hears(engine, True)
            return
        left = [f for f, rid in legs if f.engine is engine and f.rid == rid and f.heard < begun]
        self._hears(engine, False)
        for flight in left:
            flight.drop("frozen")
        if left:
            fields = {"engine": engine.url, "calls": [flight.id for flight in left]}
            _LOG.warning("engine frozen", extra={"fields": fields})

    def _hears(self, engine: Engine, answers: bool) -> None:
        """A mute engine gets no calls: it would be the least loaded one, and first choice, for ever."""
        if engine.mute == answers:
            engine.mute = not answers
            self._changed()

    async def _learn(self, engine: Engine) -> None:
        """Take over what an engine says of itself: how it calls its weights, how long a prompt may be."""
        if await self._client.mute(engine.url):
            self._hears(engine, False)
        else:
            if engine.limits is None:
                engine.limits = await self._client.limits(engine.url)
            engine.label = await self._client.weights(engine.url) or engine.label
        engine.asked = True
        self._changed()


def _unknown(engine: Engine) -> bool:
    return engine.version is None or engine.limits is None
