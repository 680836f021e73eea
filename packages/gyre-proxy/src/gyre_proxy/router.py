"""Owns the engine table and which engine serves which execution. Pure: time comes in as an argument.

Invariants: a call is given only to an admitting engine with room that is not mute; room that a reroute reserved is
given to nobody else; an execution stays on its engine while that engine admits (its cache is there), and waits for it
when it is full unless another has plenty of room; a failed engine rests for a growing while before it is tried again.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

REST_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds a failed engine rests, by consecutive failures; the last value repeats."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine as the proxy sees it."""

    url: str
    admitting: bool = True
    version: int | None = None
    """Verified weight version, None when nobody said."""
    capacity: int | None = None
    """Calls it may hold at a time, None for no limit."""
    label: str | None = None
    """Weight version as the engine itself names it; looked at only when `version` is None."""
    limits: tuple[int, int] | None = None
    """(tokens of the longest prompt it takes, of prompt and answer together), as it says itself."""
    mute: bool = False
    """Whether it gave no sign of life when it was asked for one, and none since."""
    asked: bool = False
    """Whether the engine was asked what it says of itself."""
    in_flight: int = 0
    reserved: int = 0
    """Room kept for calls that a reroute brings."""
    failures: int = 0
    rests_until: float = 0.0
    listed: bool = True

    @property
    def room(self) -> float:
        """Calls it can take now."""
        return inf if self.capacity is None else self.capacity - self.in_flight - self.reserved

    @property
    def serving(self) -> bool:
        """Whether it may be given calls, and did not lose the last one."""
        return self.admitting and not self.mute and not self.failures

    @property
    def cache_key(self) -> str | None:
        """What keeps keys and values of other weights out of an answer; None when the weights have no name."""
        return self.label if self.version is None else str(self.version)


class Router:
    """Engine table, routes, and load."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self.engines: dict[str, Engine] = {e.url: e for e in engines}
        self._routes: dict[str, str] = {}
        self._loads: Counter[str] = Counter()
        """Executions routed to each engine."""

    def replace(self, table: Iterable[Engine]) -> None:
        """Take a new table; engines that stay keep their load, engines that go finish what they hold."""
        new = {engine.url: engine for engine in table}
        for url, old in self.engines.items():
            if url in new:
                old.admitting, old.version, old.listed = new[url].admitting, new[url].version, True
                old.capacity = new[url].capacity
                old.failures, old.rests_until = 0, 0.0
                new[url] = old
            elif old.in_flight:
                old.admitting = old.listed = False
                new[url] = old
        self.engines = new

    def limits(self, context_length: int) -> tuple[int, int]:
        """(tokens of the longest prompt, of prompt and answer) that every admitting engine takes and the context holds."""
        told = [engine.limits for engine in self.engines.values() if engine.limits and engine.admitting]
        prompts, wholes = zip(*told, (context_length - 1, context_length), strict=True)
        return min(prompts), min(wholes)

    def stop_admitting(self, url: str) -> None:
        self.engines[url].admitting = False

    def move(self, moves: Mapping[str, str]) -> None:
        """Set the routes of executions (execution -> engine url)."""
        for execution, url in moves.items():
            self._route(execution, url)

    def forget(self, execution: str) -> None:
        if execution in self._routes:
            self._loads[self._routes.pop(execution)] -= 1

    def pick(self, execution: str, now: float, reserved: Engine | None = None) -> Engine | None:
        """The engine for the next call of an execution; sets its route. None when none can take it now.

        `reserved`: the engine that keeps room for this call; the caller releases it.
        """
        awake = [e for e in self.engines.values() if e.admitting and not e.mute and e.rests_until <= now]
        if reserved in awake:
            return reserved
        route = self.engines.get(self._routes.get(execution, ""))
        if route in awake and route.room > 0:
            return route
        free = [e for e in awake if e.room > 0]
        if route in awake:  # full: moving costs its cache, waiting costs time
            free = [e for e in free if e.capacity is None or 2 * e.room >= e.capacity]
        if not free:
            return None
        route = min(free, key=lambda e: (e.in_flight + e.reserved, self._loads[e.url], e.url))
        self._route(execution, route.url)
        return route

    def reserve(self, execution: str) -> Engine | None:
        """Keep room for a call at the execution's engine, else at one with room; None when there is none."""
        admitting = [e for e in self.engines.values() if e.admitting and not e.mute and e.room > 0]
        route = self.engines.get(self._routes.get(execution, ""))
        if route not in admitting:
            route = min(admitting, key=lambda e: (e.in_flight + e.reserved, e.url), default=None)
        if route is not None:
            route.reserved += 1
        return route

    def waits_for(self) -> str:
        """What a call that no engine takes waits for."""
        admitting = [e for e in self.engines.values() if e.admitting]
        if not admitting:
            return "an engine that admits calls"
        return "a sign of life of an engine" if all(e.mute for e in admitting) else "room at an engine"

    def due(self, now: float) -> float | None:
        """Seconds until an admitting engine has rested enough, None when none rests."""
        rests = [e.rests_until - now for e in self.engines.values() if e.admitting and e.rests_until > now]
        return min(rests, default=None)

    def begin(self, engine: Engine) -> None:
        engine.in_flight += 1

    def end(self, engine: Engine, ok: bool, now: float) -> None:
        """A call left the engine; `ok` is False when the engine, not the call, was at fault."""
        engine.in_flight -= 1
        if ok:
            engine.failures, engine.rests_until = 0, 0.0
        elif engine.rests_until <= now:  # calls that fail together are one failure
            engine.rests_until = now + REST_S[min(engine.failures, len(REST_S) - 1)]
            engine.failures += 1
        if not engine.listed and not engine.in_flight:
            self.engines.pop(engine.url, None)

    def _route(self, execution: str, url: str) -> None:
        self.forget(execution)
        self._routes[execution] = url
        self._loads[url] += 1
