"""Owns the engine table and which engine serves which execution. Pure: time comes in as an argument.

Invariants: a call is given only to an admitting engine; an execution stays on its engine while that engine
admits (its cache is there); a failed engine rests for a growing while before it is tried again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

REST_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds a failed engine rests, by consecutive failures; the last value repeats."""


@dataclass(slots=True)
class Engine:
    """One engine as the proxy sees it."""

    url: str
    admitting: bool = True
    version: int | None = None
    """Verified weight version, None when nobody said."""
    in_flight: int = 0
    failures: int = 0
    rests_until: float = 0.0
    listed: bool = True


class Router:
    """Engine table, routes, and load."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self.engines: dict[str, Engine] = {e.url: e for e in engines}
        self._routes: dict[str, str] = {}

    def replace(self, table: Iterable[Engine]) -> None:
        """Take a new table; engines that stay keep their load, engines that go finish what they hold."""
        new = {engine.url: engine for engine in table}
        for url, old in self.engines.items():
            if url in new:
                old.admitting, old.version, old.listed = new[url].admitting, new[url].version, True
                old.failures, old.rests_until = 0, 0.0
                new[url] = old
            elif old.in_flight:
                old.admitting = old.listed = False
                new[url] = old
        self.engines = new

    def stop_admitting(self, url: str) -> None:
        self.engines[url].admitting = False

    def move(self, moves: Mapping[str, str]) -> None:
        """Set the routes of executions (execution -> engine url)."""
        self._routes.update(moves)

    def forget(self, execution: str) -> None:
        self._routes.pop(execution, None)

    def pick(self, execution: str, now: float) -> Engine | None:
        """The engine for the next call of an execution, None when none admits or all rest; sets its route."""
        awake = [e for e in self.engines.values() if e.admitting and e.rests_until <= now]
        if not awake:
            return None
        route = self.engines.get(self._routes.get(execution, ""))
        if route is None or route not in awake:
            route = min(awake, key=lambda e: (e.in_flight, self._load(e.url), e.url))
            self._routes[execution] = route.url
        return route

    def due(self, now: float) -> float | None:
        """Seconds until an admitting engine has rested enough, None when no engine admits."""
        rests = [e.rests_until - now for e in self.engines.values() if e.admitting]
        return max(0.0, min(rests)) if rests else None

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

    def _load(self, url: str) -> int:
        return sum(1 for route in self._routes.values() if route == url)
