"""What the environment tells the scheduler. The only input of `Scheduler.handle`.

`Started` comes first but for `Expected`. For each launched execution the environment posts Launched, Terminated and
Assessed in this order, each exactly once, whatever happens to it. For each step it posts Supply any number of times,
StreamDrained once after CloseStream, StepTrained once after Step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .message import Message

Role = Literal["rollout", "training"]
Termination = Literal["completed", "failed", "timeout", "cancelled"]


class Event(Message):
    """Base of all events."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Event.kinds[cls.__name__] = cls


@dataclass(frozen=True, slots=True)
class Started(Event):
    """Every cell serves rollouts at version 0. Once, before any other event but Expected."""


@dataclass(frozen=True, slots=True)
class Expected(Event):
    """The environment expects the executions of a group to take `duration` (any unit, the same for all groups).

    Optional, at any time, also before Started; it counts for the launch order when the group is dispatched or when others
    are while it still waits. `history` makes such expectations.
    """

    group: int
    duration: float


@dataclass(frozen=True, slots=True)
class Launched(Event):
    """The harness of an execution runs (or was tried): `p` rises."""

    execution: str


@dataclass(frozen=True, slots=True)
class Terminated(Event):
    """The harness of an execution ended and frees its slot: `f` rises."""

    execution: str
    outcome: Termination


@dataclass(frozen=True, slots=True)
class Assessed(Event):
    """The execution's designated assessment is known. `valid` says that its reward may train."""

    execution: str
    valid: bool


@dataclass(frozen=True, slots=True)
class RoleChanged(Event):
    """A Transition is complete."""

    cell: int
    role: Role


@dataclass(frozen=True, slots=True)
class Supply(Event):
    """Micro-steps in the step's stream that no cell has claimed yet."""

    step: int
    unclaimed: int


@dataclass(frozen=True, slots=True)
class StreamDrained(Event):
    """The step's stream is closed and each of its micro-steps is done."""

    step: int


@dataclass(frozen=True, slots=True)
class StepTrained(Event):
    """The core did the step's optimizer update; the cells that took part hold the new weights."""

    step: int


@dataclass(frozen=True, slots=True)
class Published(Event):
    """Every engine in rollout serves this version."""

    version: int


@dataclass(frozen=True, slots=True)
class CellLost(Event):
    """A cell died. `permanent` says that no CellBack will follow."""

    cell: int
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class CellBack(Event):
    """A lost cell serves rollouts again, at the published version."""

    cell: int
