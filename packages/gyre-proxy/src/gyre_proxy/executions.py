"""Owns which executions are open, and what is kept of those that ended. Pure: time comes in as an argument.

Invariants: an ended execution is refused, never opened again; of it only its count of calls is kept, and that only as
long as a key of it could be valid; memory is that of the executions in use.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gyre_proxy.dialects.readings import Readings
from gyre_proxy.errors import ExecutionClosed
from gyre_proxy.sessions import Session

KEY_LIFETIME_S = 24 * 3600.0
"""Life of an execution that was opened without a deadline, and of its key."""
IDLE_S = 6 * 3600.0
"""An execution that was created at first use (open mode) is forgotten after this long without a call."""
SWEEP_S = 60.0
"""Time between two looks for what has expired."""


@dataclass(frozen=True, slots=True)
class _Ended:
    calls: int
    until: float
    """Unix seconds until which later calls are told that the execution is over."""


class Executions:
    """Sessions of open executions by name, and the names of ended ones.

    `forget(name)` is called for every execution that ends or is forgotten.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._open: dict[str, Session] = {}
        self._ended: dict[str, _Ended] = {}
        self._closing = 0
        """Open ones that take no more calls."""
        self._swept = 0.0

    def __len__(self) -> int:
        """Open executions."""
        return len(self._open) - self._closing

    def holds(self, name: str) -> bool:
        """Whether it is open and its session in memory."""
        return name in self._open

    def readings(self, name: str) -> Readings | None:
        """What was read of its last requests, None when it is not in memory."""
        session = self._open.get(name)
        return session.readings if session else None

    def adopt(self, session: Session, now: float) -> None:
        """Go on with an execution that an earlier process recorded."""
        session.used = now
        self._open[session.execution] = session

    def adopt_ended(self, name: str, calls: int, now: float) -> None:
        """Refuse an execution that an earlier process recorded as closed."""
        self._ended[name] = _Ended(calls, now + KEY_LIFETIME_S)

    def is_open(self, name: str, now: float) -> bool:
        self._sweep(now)
        return name in self._open and self._refusal(name, now) is None

    def open(self, name: str, deadline: float, now: float) -> Session:
        """Make an execution known before its first call. Raises ExecutionClosed when it already ended."""
        session = self.use(name, now)
        session.deadline = deadline
        return session

    def use(self, name: str, now: float) -> Session:
        """The execution's session, created at first use. Raises ExecutionClosed."""
        self._sweep(now)
        refusal = self._refusal(name, now)
        if refusal is not None:
            raise ExecutionClosed(refusal)
        session = self._open.get(name)
        if session is None:
            session = self._open[name] = Session(name)
        session.used = now
        return session

    def stop(self, name: str) -> Session | None:
        """Refuse later calls from now on; the session whose calls are to be ended, None when it ended already."""
        if name in self._ended:
            return None
        session = self._open.setdefault(name, Session(name))
        self._closing += not session.closed
        session.closed = True
        return session

    def end(self, name: str, now: float) -> int:
        """Free a stopped execution none of whose calls runs. Returns its recorded calls."""
        session = self._open.pop(name, None)
        if session is not None:
            self._closing -= session.closed
            until = max(now + KEY_LIFETIME_S, session.deadline or 0.0)
            self._ended[name] = _Ended(session.calls, until)
            self._forget(name)
        return self._ended[name].calls

    def _refusal(self, name: str, now: float) -> str | None:
        session = self._open.get(name)
        if name in self._ended or (session is not None and session.closed):
            return f"execution {name} is closed"
        if session is not None and session.deadline is not None and session.deadline <= now:
            return f"execution {name} is past its deadline"
        return None

    def _sweep(self, now: float) -> None:
        """End what is past its deadline, forget what is idle; what has calls under way stays."""
        if now < self._swept + SWEEP_S:
            return
        self._swept = now
        for name, session in list(self._open.items()):
            if session.in_flight or session.closed:
                continue
            if session.deadline is not None and session.deadline <= now:
                self.end(name, now)
            elif session.deadline is None and session.used + IDLE_S <= now:
                del self._open[name]
                self._forget(name)
        self._ended = {name: ended for name, ended in self._ended.items() if ended.until > now}
