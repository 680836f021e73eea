"""A random environment: answers the scheduler's actions in any order, loses cells, and checks every action.

It keeps its own books from the actions alone, so that its checks do not trust the scheduler's.
"""

from __future__ import annotations

import json
import random

import pytest
from gyre_scheduler.actions import (
    STANDALONE,
    Abort,
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
from gyre_scheduler.dispatch import execution_names, group_of
from gyre_scheduler.events import (
    Assessed,
    CellBack,
    CellLost,
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
from gyre_scheduler.scheduler import Scheduler


class RandomEnvironment:
    """Drives one scheduler to its end. `pending` holds what could happen next; chance picks."""

    def __init__(self, settings, seed, invalid=0.2, losses=0.0, permanent=0.0, snapshots=0.05, expected=0.05):
        self.settings = settings
        self.random = random.Random(seed)
        self.invalid, self.losses, self.permanent, self.snapshots = invalid, losses, permanent, snapshots
        self.expected = expected
        self.scheduler = Scheduler(settings)
        self.log = []
        self.pending = []
        self.version_of = {}
        self.valid = {}
        self.open = {}
        self.launches = set()
        self.complete, self.surplus, self.cancelled = set(), set(), set()
        self.outstanding = set()
        self.place = {}
        self.roles = {cell: "rollout" for cell in range(len(settings.cells))}
        self.rerouted = False
        self.admitted = {}
        self.closed = set()
        self.window_closed = False
        self.publishing = False
        self.unclaimed = 0
        self.d = self.p = self.f = 0
        self.published = 0
        self.staleness = []
        self.replaced_age = 0
        self.ended = None

    def drive(self, limit=100_000):
        """Run until Finish or Abort; returns that action. Fails on a deadlock."""
        self.deliver(Started())
        for _ in range(limit):
            if self.ended is not None:
                return self.ended
            assert self.pending, f"deadlock: {self.scheduler.to_state()}"
            self.maybe_lose_cell()
            self.maybe_expect()
            self.happen(self.pending.pop(self.random.randrange(len(self.pending))))
        raise AssertionError("no end in sight")

    # -- what happens --------------------------------------------------------------------------------------

    def happen(self, thing):
        kind, *what = thing
        getattr(self, f"happen_{kind}")(*what)

    def happen_launch(self, execution):
        self.p += 1
        self.pending.append(("end", execution))
        self.deliver(Launched(execution))

    def happen_end(self, execution):
        self.f += 1
        del self.place[execution]
        self.pending.append(("assess", execution))
        outcome = self.random.choice(["completed", "failed", "timeout"])
        self.deliver(Terminated(execution, "cancelled" if execution in self.cancelled else outcome))

    def happen_assess(self, execution):
        group = group_of(execution)
        valid = self.random.random() >= self.invalid and execution not in self.cancelled
        if group in self.complete:  # a surplus execution: late, and ignored
            self.deliver(Assessed(execution, valid))
            return
        self.open[group].remove(execution)
        if valid:
            self.valid[group].append(execution)
        if len(self.valid[group]) == self.settings.group_size:
            self.complete.add(group)
            self.surplus = {each for each in self.open[group] if each in self.place}
            withdrawn = self.open[group] - self.launches
            self.p += len(withdrawn)
            self.f += len(withdrawn)
        self.deliver(Assessed(execution, valid))
        assert not self.surplus or self.ended is not None

    def happen_change(self, cell, role):
        self.roles[cell] = "restored" if role == "rollout" and self.publishing else role
        self.deliver(RoleChanged(cell, role))

    def happen_micro_step(self, step):
        if "training" not in self.roles.values():
            self.pending.append(("micro_step", step))
            return
        self.unclaimed -= 1
        self.deliver(Supply(step, self.unclaimed))
        self.maybe_drain(step)

    def happen_drain(self, step):
        self.window_closed = True
        self.deliver(StreamDrained(step))

    def happen_train(self, step):
        for group in self.admitted[step]:
            self.staleness.append(step - 1 - self.version_of[group])
            self.outstanding.remove(group)
        self.window_closed = False
        self.publishing = step % self.settings.mu == 0 or step == self.settings.steps
        self.deliver(StepTrained(step))

    def happen_publish(self, version):
        self.published = version
        self.publishing = False
        for cell, role in self.roles.items():
            self.roles[cell] = "rollout" if role == "restored" else role
        self.deliver(Published(version))
        self.check_identity(version)

    def happen_back(self, cell):
        self.roles[cell] = "restored" if self.publishing else "rollout"
        self.deliver(CellBack(cell))

    def maybe_lose_cell(self):
        satellites = [cell for cell, role in self.roles.items() if cell and role != "lost"]
        if not satellites or self.random.random() >= self.losses:
            return
        cell = self.random.choice(satellites)
        permanent = self.random.random() < self.permanent
        self.roles[cell] = "lost"
        self.pending = [thing for thing in self.pending if thing[:2] != ("change", cell)]
        if not permanent:
            self.pending.append(("back", cell))
        self.deliver(CellLost(cell, permanent))

    def maybe_expect(self):
        if self.random.random() < self.expected:
            group = self.random.randrange(len(self.version_of) + 2 * self.settings.queue_depth)
            self.deliver(Expected(group, self.random.uniform(0.1, 10)))

    # -- what the scheduler asks -----------------------------------------------------------------------------

    def deliver(self, event):
        if self.ended is not None:
            return
        copy = None
        if self.random.random() < self.snapshots:
            copy = Scheduler.from_state(json.loads(json.dumps(self.scheduler.to_state())))
        actions = self.scheduler.handle(event)
        self.log.append((event, actions))
        if copy is not None:
            assert copy.handle(event) == actions
            assert copy.to_state() == self.scheduler.to_state()
            self.scheduler = copy
        for action in actions:
            assert self.ended is None, f"{action} after {self.ended}"
            getattr(self, f"do_{type(action).__name__}")(action, event)
        self.check_counters()

    def do_Dispatch(self, action: Dispatch, event):
        assert action.group == len(self.version_of)
        assert action.version == self.published
        self.version_of[action.group] = action.version
        names = execution_names(action.group, self.settings.group_size + self.settings.oversample)
        self.valid[action.group] = []
        self.open[action.group] = set(names)
        self.outstanding.add(action.group)
        self.d += len(names)

    def do_Drop(self, action: Drop, event):
        self.outstanding.remove(action.group)
        if action.reason == "the run is over":
            return
        assert not self.open[action.group] and len(self.valid[action.group]) < 2
        self.replaced_age += self.published - self.version_of[action.group]

    def do_Launch(self, action: Launch, event):
        assert action.execution not in self.launches
        assert group_of(action.execution) not in self.complete
        self.launches.add(action.execution)
        self.occupy(action.execution, action.cell)
        assert self.load(action.cell) <= self.limit(action.cell) or self.rerouted
        self.pending.append(("launch", action.execution))

    def do_Cancel(self, action: Cancel, event):
        self.surplus.remove(action.execution)
        self.cancelled.add(action.execution)

    def do_Transition(self, action: Transition, event):
        cell = action.cell
        self.pending.append(("change", cell, action.role))
        if action.role == "rollout":
            assert isinstance(event, StepTrained | Published | CellLost)
            assert not action.moves and self.roles[cell] == "training"
            self.roles[cell] = "to_rollout"
            return
        assert self.roles[cell] == "rollout" and not self.window_closed
        assert cell == 0 or self.roles[0] == "training"
        self.roles[cell] = "to_training"
        self.move(cell, action.moves)
        if self.settings.policy != "async":
            assert self.waterlevel() <= self.capacity()

    def do_Reroute(self, action: Reroute, event):
        assert self.roles[action.cell] == "lost" and action.moves
        self.rerouted = True
        self.move(action.cell, action.moves)

    def do_Admit(self, action: Admit, event):
        group, step = action.group, action.step
        assert sorted(action.members) == sorted(self.valid[group]) and len(action.members) >= 2
        assert group in self.complete or not self.open[group]
        assert all(group not in groups for groups in self.admitted.values())
        assert step == len(self.staleness) // self.settings.groups_per_step + 1
        self.admitted.setdefault(step, []).append(group)
        assert len(self.admitted[step]) <= self.settings.groups_per_step
        for _ in range(self.random.randrange(3)):
            self.unclaimed += 1
            self.pending.append(("micro_step", step))
        if self.random.random() < 0.7:
            self.pending.append(("supply", step))

    def happen_supply(self, step):
        self.deliver(Supply(step, self.unclaimed))

    def do_CloseStream(self, action: CloseStream, event):
        assert len(self.admitted[action.step]) == self.settings.groups_per_step
        self.closed.add(action.step)
        self.maybe_drain(action.step)

    def maybe_drain(self, step):
        if step in self.closed and not self.unclaimed:
            self.closed.remove(step)
            self.pending.append(("drain", step))

    def do_Step(self, action: Step, event):
        training = [cell for cell, role in self.roles.items() if role == "training"]
        assert list(action.cells) == training and training[0] == 0
        assert "to_training" not in self.roles.values()
        self.pending.append(("train", action.step))

    def do_Publish(self, action: Publish, event):
        if self.settings.policy != "async":
            assert all(role != "training" for cell, role in self.roles.items() if cell)
        self.pending.append(("publish", action.version))

    def do_Finish(self, action: Finish, event):
        assert self.published == self.settings.steps
        assert len(self.staleness) == self.settings.steps * self.settings.groups_per_step
        assert not self.outstanding
        self.ended = action

    def do_Abort(self, action: Abort, event):
        self.ended = action

    # -- books -----------------------------------------------------------------------------------------------

    def occupy(self, execution, place):
        assert place == STANDALONE or self.roles[place] == "rollout"
        assert place == STANDALONE or self.settings.policy != "async" or place >= self.settings.training_cells
        self.place[execution] = place

    def move(self, cell, moves):
        assert set(moves) == {execution for execution, place in self.place.items() if place == cell}
        for execution, place in moves.items():
            self.occupy(execution, place)

    def limit(self, place):
        return self.settings.standalone if place == STANDALONE else self.settings.cells[place]

    def load(self, place):
        return sum(found == place for found in self.place.values())

    def waterlevel(self):
        return self.d - self.f

    def capacity(self):
        serving = (c for c, role in self.roles.items() if role == "rollout")
        return self.settings.standalone + sum(self.settings.cells[cell] for cell in serving)

    def check_counters(self):
        ledger = self.scheduler.ledger
        assert 0 <= ledger.terminated <= ledger.launched <= ledger.dispatched
        assert (ledger.dispatched, ledger.launched, ledger.terminated) == (self.d, self.p, self.f)
        assert len(self.outstanding) <= self.settings.queue_depth
        assert (ledger.staleness, ledger.age_replaced) == (self.staleness, self.replaced_age)

    def check_identity(self, version):
        if version % self.settings.mu or version == self.settings.steps:
            return
        age = sum(version - self.version_of[group] for group in self.outstanding)
        bursts = version // self.settings.mu
        total = bursts * self.settings.burst_groups * self.settings.staleness_target
        assert sum(self.staleness) + self.replaced_age == total - age


@pytest.fixture
def random_environment():
    return RandomEnvironment
