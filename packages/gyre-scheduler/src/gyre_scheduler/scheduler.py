"""The scheduler: events in, actions out. No clock, no I/O, no randomness.

Invariant: the same settings and the same events give the same actions, from the start or from any snapshot.
One burst:

    collect   groups become ready, cells join training, steps are trained one after another
    return    after the burst's last step satellites go back to rollout
    publish   the engines load the new weights; then the queue is refilled and the next burst collects

Between StreamDrained and StepTrained the joining window is closed: cells on their way are waited for, none
sets out. Late events after Finish or Abort are still counted and change nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from .actions import (
    Abort,
    Action,
    Admit,
    Cancel,
    CloseStream,
    Dispatch,
    Drop,
    Finish,
    Launch,
    Publish,
    Reroute,
    Step,
    Transition,
)
from .cells import AWAY, CellTable
from .dispatch import burst_end, execution_names, groups_dispatched
from .errors import ProtocolError
from .events import (
    Assessed,
    CellBack,
    CellLost,
    Event,
    Expected,
    Launched,
    Published,
    RoleChanged,
    Started,
    StepTrained,
    StreamDrained,
    Supply,
    Terminated,
)
from .ledger import TRAINABLE_MEMBERS, Ledger
from .policies import POLICIES, Facts, Policy
from .settings import SchedulerSettings
from .waterlevel import waterlevel


@dataclass
class StepState:
    """The step in progress, which turns version `number - 1` into `number`."""

    number: int
    admitted: list[int] = field(default_factory=list)
    unclaimed: int = 0
    closed: bool = False
    drained: bool = False
    stepping: bool = False


class Scheduler:
    """One run's scheduler. `handle` is the only way to change it."""

    def __init__(self, settings: SchedulerSettings):
        self.settings = settings
        self.policy: Policy = POLICIES[settings.policy](settings)
        self.ledger = Ledger(settings.group_size)
        self.cells = CellTable(settings.cells, settings.standalone, self.policy.serving())
        self.version = 0
        """The trainer's version: optimizer updates done."""
        self.published = 0
        self.phase = "new"
        """new | collect | return | publish | finished | aborted"""
        self.step = StepState(1)

    # -- what a caller may read ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.phase in ("finished", "aborted")

    @property
    def waterlevel(self) -> int:
        """Eq. 4."""
        return waterlevel(self.ledger.dispatched, self.ledger.terminated)

    @property
    def staleness_mean(self) -> Fraction | None:
        """Mean staleness of the groups consumed so far; None before the first step."""
        consumed = self.ledger.staleness
        return Fraction(sum(consumed), len(consumed)) if consumed else None

    def wants_expected(self, event: Event) -> range:
        """Groups of which `Expected` is of use before this event, which dispatches them."""
        first = self.ledger.next_group
        longest = self.settings.launch_order == "longest"
        return range(first, first + (groups_dispatched(self.settings, event) if longest else 0))

    # -- events ----------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        """Take one event, return what to do now, in order.

        Raises ProtocolError, before anything changed, for an event that cannot happen in this state.
        """
        if self.done:
            self._count_late(event)
            return []
        if isinstance(event, Expected):
            return self._expected(event)
        if (self.phase == "new") != isinstance(event, Started):
            raise ProtocolError(f"{type(event).__name__} in phase {self.phase}: Started comes first, once")
        actions = self._HANDLERS[type(event)](self, event)
        return actions if self.done else actions + self._advance()

    def _started(self, event: Started) -> list[Action]:
        self.phase = "collect"
        return self._refill(event)

    def _expected(self, event: Expected) -> list[Action]:
        if not 0 < event.duration < math.inf:
            raise ProtocolError(f"{event}: a duration is a finite number above 0")
        self.ledger.expect(event.group, event.duration)
        return []

    def _launched(self, event: Launched) -> list[Action]:
        self.ledger.launch(event.execution)
        return []

    def _terminated(self, event: Terminated) -> list[Action]:
        self.ledger.terminate(event.execution)
        self.cells.release(event.execution)
        return []

    def _assessed(self, event: Assessed) -> list[Action]:
        group = self.ledger.assess(event.execution, event.valid)
        if group is None:
            return []
        valid = self.ledger.valid_members(group)
        if valid >= TRAINABLE_MEMBERS:
            return [Cancel(execution) for execution in self.ledger.make_ready(group)]
        return self._replace(group, f"{valid} of {self._members} executions have a valid reward")

    def _replace(self, group: int, reason: str) -> list[Action]:
        in_a_row = self.ledger.drop_untrainable(group, self.published)
        if in_a_row >= self.settings.untrainable_allowed:
            why = f"{in_a_row} groups in a row could not be trained; in the last one {reason}"
            return [Drop(group, reason), *self._abort(why)]
        dispatched = self._dispatch(replaces=group)
        self._order_queue()
        return [Drop(group, reason), dispatched]

    def _supply(self, event: Supply) -> list[Action]:
        if event.step == self.step.number:
            self.step.unclaimed = event.unclaimed
        return []

    def _stream_drained(self, event: StreamDrained) -> list[Action]:
        self._require(event.step == self.step.number and self.step.closed and not self.step.drained, event)
        self.step.drained = True
        return []

    def _step_trained(self, event: StepTrained) -> list[Action]:
        self._require(event.step == self.step.number and self.step.stepping, event)
        for group in self.step.admitted:
            self.ledger.consume(group, self.version)
        ends_burst = event.step == burst_end(self.settings, self.version)
        self.version = event.step
        self.step = StepState(self.version + 1)
        if ends_burst:
            self.phase = "return"
        return self._refill(event)

    def _published(self, event: Published) -> list[Action]:
        self._require(self.phase == "publish" and event.version == self.version, event)
        self.published = self.version
        for cell in self.cells.with_role("restored"):
            self.cells.roles[cell] = "rollout"
        if self.version == self.settings.steps:
            return self._finish()
        self.phase = "collect"
        return self._refill(event) + self._keep_or_return_core()

    def _role_changed(self, event: RoleChanged) -> list[Action]:
        cell, found = event.cell, self._role(event.cell)
        if found in AWAY:
            return []
        self._require(found == f"to_{event.role}", event)
        self.cells.roles[cell] = event.role
        if event.role == "rollout" and self.phase in ("return", "publish"):
            self.cells.roles[cell] = "restored"
        return []

    def _cell_lost(self, event: CellLost) -> list[Action]:
        found = self._role(event.cell)
        if event.cell == 0:
            return self._abort("the core cell was lost, and with it the optimizer state")
        if found != "gone":
            self.cells.roles[event.cell] = "gone" if event.permanent else "lost"
        return []

    def _cell_back(self, event: CellBack) -> list[Action]:
        self._require(self._role(event.cell) == "lost", event)
        publishing = self.phase in ("return", "publish")
        self.cells.roles[event.cell] = "restored" if publishing else "rollout"
        return []

    _HANDLERS: dict[type[Event], Callable[[Scheduler, Any], list[Action]]] = {
        Started: _started,
        Launched: _launched,
        Terminated: _terminated,
        Assessed: _assessed,
        Supply: _supply,
        StreamDrained: _stream_drained,
        StepTrained: _step_trained,
        Published: _published,
        RoleChanged: _role_changed,
        CellLost: _cell_lost,
        CellBack: _cell_back,
    }

    def _count_late(self, event: Event) -> None:
        if isinstance(event, Launched):
            self.ledger.launch(event.execution)
        elif isinstance(event, Terminated):
            self.ledger.terminate(event.execution)
            self.cells.release(event.execution)
        elif isinstance(event, Assessed):
            self.ledger.assess(event.execution, event.valid)

    def _role(self, cell: int) -> str:
        if not 0 <= cell < len(self.cells.roles):
            raise ProtocolError(f"there is no cell {cell}: the settings have {len(self.cells.roles)}")
        return self.cells.roles[cell]

    def _require(self, possible: bool, event: Event) -> None:
        if not possible:
            raise ProtocolError(
                f"{event} cannot happen in phase {self.phase} of step {self.step.number} "
                f"with cells {', '.join(self.cells.roles)}"
            )

    # -- what follows from the new state ---------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        if self.phase == "collect":
            actions += self._join() + self._admit() + self._train()
        elif self.phase == "return":
            actions += self._return()
        return actions + self._reroute_lost() + self._launch() + self._give_up()

    def _facts(self) -> Facts:
        ready, unclaimed = len(self.ledger.ready), self.step.unclaimed
        return Facts(self.waterlevel, ready, self._needed(), self._wanted(), unclaimed)

    def _needed(self) -> int:
        steps = burst_end(self.settings, self.version) - self.version
        return steps * self.settings.groups_per_step - len(self.step.admitted)

    def _wanted(self) -> int:
        return 1 if self.settings.streaming else self._needed()

    def _join(self) -> list[Action]:
        if self.step.drained:
            return []
        joining = self.policy.joining(self._facts(), self.cells)
        for cell in joining:
            self.cells.roles[cell] = "to_training"
        return [Transition(cell, "training", self.cells.leave(cell)) for cell in joining]

    def _admit(self) -> list[Action]:
        step, batch = self.step, self.settings.groups_per_step
        if step.closed or self.cells.roles[0] not in ("to_training", "training"):
            return []
        if not step.admitted and len(self.ledger.ready) < self._wanted():
            return []
        actions: list[Action] = []
        while self.ledger.ready and len(step.admitted) < batch:
            step.admitted.append(self.ledger.admit())
            group = step.admitted[-1]
            actions.append(Admit(group, step.number, self.ledger.trainable(group)))
        if len(step.admitted) == batch:
            step.closed = True
            actions.append(CloseStream(step.number))
        return actions

    def _train(self) -> list[Action]:
        if not self.step.drained or self.step.stepping or self.cells.with_role("to_training"):
            return []
        self.step.stepping = True
        return [Step(self.step.number, tuple(self.cells.with_role("training")))]

    def _return(self) -> list[Action]:
        satellites = [cell for cell in self.cells.with_role("training") if cell and self.policy.returns]
        for cell in satellites:
            self.cells.roles[cell] = "to_rollout"
        actions: list[Action] = [Transition(cell, "rollout", {}) for cell in satellites]
        if not self.cells.with_role("to_rollout"):
            self.phase = "publish"
            actions.append(Publish(self.version))
        return actions

    def _keep_or_return_core(self) -> list[Action]:
        if self.policy.retains_core(self._facts(), self.cells):
            return []
        self.cells.roles[0] = "to_rollout"
        return [Transition(0, "rollout", {})]

    @property
    def _members(self) -> int:
        """Executions of a group."""
        return self.settings.group_size + self.settings.oversample

    def _refill(self, event: Event) -> list[Action]:
        dispatched = [self._dispatch() for _ in range(groups_dispatched(self.settings, event))]
        if dispatched:
            self._order_queue()
        return dispatched

    def _order_queue(self) -> None:
        if self.settings.launch_order == "longest":
            self.ledger.queue_longest_first()

    def _dispatch(self, replaces: int | None = None) -> Dispatch:
        names = execution_names(self.ledger.next_group, self._members)
        return Dispatch(self.ledger.dispatch(self.published, names), self.published, replaces)

    def _launch(self) -> list[Action]:
        actions: list[Action] = []
        while self.ledger.queue and (place := self.cells.free_place()) is not None:
            execution = self.ledger.launching()
            self.cells.put(execution, place)
            actions.append(Launch(execution, place))
        return actions

    def _reroute_lost(self) -> list[Action]:
        held = [cell for role in AWAY for cell in self.cells.with_role(role) if self.cells.places[cell]]
        if not held or not self.cells.destinations():
            return []
        return [Reroute(cell, self.cells.flee(cell)) for cell in held]

    def _give_up(self) -> list[Action]:
        """Abort when permanently lost cells leave executions that the burst needs without any capacity."""
        if "gone" not in self.cells.roles or self.phase != "collect":
            return []
        if not self.waterlevel or self._facts().burst_is_ready:
            return []
        coming = [cell for cell in self.cells.serving if self.cells.roles[cell] in ("lost", "to_rollout")]
        if coming or self.cells.capacity():
            return []
        return self._abort(f"no rollout capacity is left for {self.waterlevel} outstanding executions")

    def _finish(self) -> list[Action]:
        self.phase = "finished"
        return [*(Drop(group, "the run is over") for group in self.ledger.groups), Finish()]

    def _abort(self, reason: str) -> list[Action]:
        self.phase = "aborted"
        return [Abort(reason)]

    # -- snapshots -------------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """JSON-able snapshot, settings included."""
        return {
            "settings": self.settings.model_dump(mode="json"),
            "ledger": self.ledger.to_state(),
            "cells": self.cells.to_state(),
            "version": self.version,
            "published": self.published,
            "phase": self.phase,
            "step": asdict(self.step),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Scheduler:
        """The scheduler that `to_state` described; it continues with the same actions."""
        scheduler = cls(SchedulerSettings(**state["settings"]))
        scheduler.ledger = Ledger.from_state(state["ledger"])
        scheduler.cells.restore(state["cells"])
        scheduler.version = state["version"]
        scheduler.published = state["published"]
        scheduler.phase = state["phase"]
        scheduler.step = StepState(**{**state["step"], "admitted": list(state["step"]["admitted"])})
        return scheduler
