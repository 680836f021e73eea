"""What the scheduler asks of the environment. The only output of `Scheduler.handle`.

A step is numbered by the version it produces: step k turns version k-1 into version k, k = 1..steps.
Actions of one list are meant in this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .events import Role
from .message import Message

STANDALONE = "standalone"
Destination = int | Literal["standalone"]


class Action(Message):
    """Base of all actions."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Action.kinds[cls.__name__] = cls


@dataclass(frozen=True, slots=True)
class Dispatch(Action):
    """Admit a new group at the published version. `replaces`: the untrainable group it stands for."""

    group: int
    version: int
    replaces: int | None = None


@dataclass(frozen=True, slots=True)
class Launch(Action):
    """Start the harness of an execution; its calls go to `cell`, a cell index or "standalone"."""

    execution: str
    cell: Destination


@dataclass(frozen=True, slots=True)
class Cancel(Action):
    """End an execution that its group needs no more (oversampling); Terminated and Assessed follow as always."""

    execution: str


@dataclass(frozen=True, slots=True)
class Transition(Action):
    """Move a cell to `role`; answered by RoleChanged.

    Towards training: stop admitting, route `moves` (execution -> reserved destination), drain, join.
    Towards rollout: restore the engine. A satellite then waits for the publication that follows; the core
    must serve the published version before RoleChanged.
    """

    cell: int
    role: Role
    moves: dict[str, Destination]


@dataclass(frozen=True, slots=True)
class Reroute(Action):
    """Route the executions of a lost cell elsewhere; nothing answers it."""

    cell: int
    moves: dict[str, Destination]


@dataclass(frozen=True, slots=True)
class Admit(Action):
    """Feed a ready group to the step's stream. `members`: its executions with a valid reward, which train."""

    group: int
    step: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CloseStream(Action):
    """The step has all its groups; answered by StreamDrained when the last micro-step is done."""

    step: int


@dataclass(frozen=True, slots=True)
class Step(Action):
    """The joining window is closed: sum the gradients of `cells`, update once, send them the weights.

    Answered by StepTrained.
    """

    step: int
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Publish(Action):
    """Load the core's weights into every engine in rollout; answered by Published."""

    version: int


@dataclass(frozen=True, slots=True)
class Drop(Action):
    """A group leaves without being trained: it is replaced, or the run is over."""

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish(Action):
    """All steps are trained and published. Executions that still run may be cancelled."""


@dataclass(frozen=True, slots=True)
class Abort(Action):
    """The run cannot go on."""

    reason: str
