"""Discrete-event simulation: a virtual clock, in hours, drives the same `Scheduler` object as a live run.

The model: an execution takes its workload's duration wherever it runs, reroutes cost nothing; training work
is split into equal micro-steps, which the cells in training claim one at a time and finish at a speed
proportional to their nodes; transitions, optimizer updates and publications take constant times. A cell's
nodes follow from its concurrency limit. A lost satellite's executions go on elsewhere at no cost, its micro-step
goes back to the queue. With launch order "longest" the environment expects of a group what the
history of its query says by then, as a live run does.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field
from functools import singledispatchmethod

from .actions import (
    Abort,
    Action,
    Admit,
    Cancel,
    CloseStream,
    Dispatch,
    Launch,
    Publish,
    Step,
    Transition,
)
from .dispatch import group_of
from .errors import RunAborted, SettingsError
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
from .history import DurationHistory
from .scheduler import Scheduler
from .settings import SchedulerSettings
from .workloads import Workload

SECOND = 1 / 3600
MOST = 1e9
"""Bound of every cost, so that sums of them stay numbers."""


@dataclass(frozen=True)
class Costs:
    """What training and switching cost. Defaults are of the size of the paper's 122B runs; `presets` has them calibrated."""

    node_hours_per_step: float = 12.5
    """Training work of one batch."""
    executions_per_node: float = 36.0
    """Concurrency limit of one node; a cell of limit c has c / this nodes."""
    micro_steps_per_group: int = 4
    to_training_hours: float = 8.52 * SECOND
    to_rollout_hours: float = 3.46 * SECOND
    update_hours: float = 10 * SECOND
    """Gradient reduction and optimizer update of one step."""
    publish_hours: float = 10 * SECOND
    invalid: float = 0.0
    """Share of executions that end without a valid reward."""
    loss_hours: float = 0.0
    """Mean time, exponential, after which a satellite that serves or trains is lost; 0: never."""
    repair_hours: float = 0.25
    """Time after which a lost cell is back."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise SettingsError(f"{name} must be a finite number of 0 or more, not {value}")
            if value > MOST:
                raise SettingsError(f"{name} must be at most {MOST:g}, not {value:g}")
        for name in ("executions_per_node", "micro_steps_per_group"):
            if not getattr(self, name):
                raise SettingsError(f"{name} must be above 0")
        if self.invalid > 1:
            raise SettingsError(f"invalid must be a share from 0 to 1, not {self.invalid}")

    def nodes(self, limit: int) -> float:
        """Nodes of a cell with this concurrency limit."""
        return limit / self.executions_per_node

    def micro_step_hours(self, settings: SchedulerSettings) -> list[float]:
        """Hours that each cell takes for one of its equal micro-steps."""
        work = self.node_hours_per_step / settings.groups_per_step / self.micro_steps_per_group
        return [work / self.nodes(limit) for limit in settings.cells]


@dataclass
class SimulationResult:
    """One simulated run. Times are hours since the start."""

    hours: float = 0.0
    steps: int = 0
    groups: int = 0
    """Groups that were dispatched."""
    executions: int = 0
    staleness_mean: float = 0.0
    staleness_target: float = 0.0
    utilisation: float = 0.0
    """Node-hours of rollout and training over node-hours available."""
    training_share: list[float] = field(default_factory=list)
    """For each cell, the share of time in role training."""
    role_switches: int = 0
    step_times: list[float] = field(default_factory=list)
    """When each step was trained."""
    timeline: list[tuple[float, int, str]] = field(default_factory=list)
    """(time, cell, role), roles rollout | to_training | training | to_rollout | lost, from time 0 on."""
    waterlevel: list[tuple[float, int]] = field(default_factory=list)


def simulate(
    settings: SchedulerSettings, workload: Workload, costs: Costs, seed: int = 0
) -> SimulationResult:
    """Run to the end on a virtual clock. The same arguments give the same result."""
    return _Simulation(settings, workload, costs, seed).run()


class _Simulation:
    """The simulated environment: answers each action with events at later times."""

    def __init__(self, settings: SchedulerSettings, workload: Workload, costs: Costs, seed: int):
        self.settings, self.workload, self.costs, self.seed = settings, workload, costs, seed
        self.scheduler = Scheduler(settings)
        self.result = SimulationResult(staleness_target=float(settings.staleness_target))
        self.now = 0.0
        self._agenda: list[tuple[float, int, Event | int]] = []
        self._entries = 0
        self._hours: dict[str, float] = {}
        self._history = DurationHistory()
        self._faults = random.Random(f"{seed}/faults")
        self._running = 0
        self._ends: dict[str, tuple[int, int]] = {}
        """Entries of the agenda with which a running execution ends."""
        self._void: set[int] = set()
        self._training: set[int] = set()
        self._unclaimed: deque[int] = deque()
        self._claimed: dict[int, int] = {}
        self._busy: dict[int, int] = {}
        """By cell, the agenda's entry with which its transition or micro-step ends."""
        self._closed = False
        self._busy_node_hours = self._rollout_node_hours = 0.0
        self._nodes = [costs.nodes(limit) for limit in settings.cells]
        self._micro_step_hours = costs.micro_step_hours(settings)

    def run(self) -> SimulationResult:
        self.result.timeline = [(0.0, cell, "rollout") for cell in range(len(self.settings.cells))]
        self._after(0.0, Started())
        for cell in range(1, len(self.settings.cells)):
            self._lose_later(cell)
        while not self.scheduler.done:
            time, entry, what = heapq.heappop(self._agenda)
            if entry in self._void:
                continue
            self._pass_time(time)
            if isinstance(what, Event):
                self._deliver(what)
            else:
                self._micro_step_done(what)
        return self._summary()

    def _after(self, hours: float, what: Event | int) -> int:
        """Put an event, or the cell that ends its micro-step, on the agenda. Returns the entry's number."""
        self._entries += 1
        heapq.heappush(self._agenda, (self.now + hours, self._entries, what))
        return self._entries

    def _pass_time(self, time: float) -> None:
        self._rollout_node_hours += (time - self.now) * self._running / self.costs.executions_per_node
        self.now = time

    def _deliver(self, event: Event) -> None:
        for group in self.scheduler.wants_expected(event):
            duration = self._history.expected(self.workload.query(self.seed, group))
            if duration is not None:
                self.scheduler.handle(Expected(group, duration))
        if isinstance(event, Launched):
            self._running += 1
        elif isinstance(event, Terminated):
            self._running -= 1
            hours = self._hours.pop(event.execution)
            del self._ends[event.execution]
            if event.outcome == "completed":
                self._history.observe(self.workload.query(self.seed, group_of(event.execution)), hours)
        elif isinstance(event, RoleChanged):
            del self._busy[event.cell]
            self._role(event.cell, event.role)
        elif isinstance(event, CellLost):
            self._lose(event.cell)
        elif isinstance(event, CellBack):
            self._role(event.cell, "rollout")
            self._lose_later(event.cell)
        elif isinstance(event, StepTrained):
            self.result.step_times.append(self.now)
        for action in self.scheduler.handle(event):
            self._do(action)
        if isinstance(event, Started | Terminated | Published):
            self.result.waterlevel.append((self.now, self.scheduler.waterlevel))
        if isinstance(event, RoleChanged | CellLost):
            self._claim()

    def _lose_later(self, cell: int) -> None:
        if self.costs.loss_hours:
            self._after(self._faults.expovariate(1 / self.costs.loss_hours), CellLost(cell))

    def _lose(self, cell: int) -> None:
        """What the cell was about to end never ends; another takes its micro-step."""
        self._role(cell, "lost")
        if cell in self._busy:
            self._void.add(self._busy.pop(cell))
        if cell in self._claimed:
            self._unclaimed.appendleft(self._claimed.pop(cell))
        self._after(self.costs.repair_hours, CellBack(cell))

    def _role(self, cell: int, role: str) -> None:
        self.result.timeline.append((self.now, cell, role))
        (self._training.add if role == "training" else self._training.discard)(cell)

    # -- actions ---------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _do(self, action: Action) -> None:
        """Actions without a cost: Drop, Reroute, Finish."""

    @_do.register
    def _(self, action: Abort) -> None:
        raise RunAborted(action.reason)

    @_do.register
    def _(self, action: Dispatch) -> None:
        size = self.settings.group_size + self.settings.oversample
        hours = self.workload.hours(self.seed, action.group, size)
        names = self.scheduler.ledger.groups[action.group].members
        self._hours.update(zip(names, hours, strict=True))

    @_do.register
    def _(self, action: Launch) -> None:
        hours = self._hours[action.execution]
        valid = self._faults.random() >= self.costs.invalid
        self._after(0.0, Launched(action.execution))
        self._ends[action.execution] = (
            self._after(hours, Terminated(action.execution, "completed")),
            self._after(hours, Assessed(action.execution, valid)),
        )

    @_do.register
    def _(self, action: Cancel) -> None:
        self._void.update(self._ends[action.execution])
        self._after(0.0, Terminated(action.execution, "cancelled"))
        self._after(0.0, Assessed(action.execution, False))

    @_do.register
    def _(self, action: Transition) -> None:
        self._role(action.cell, f"to_{action.role}")
        self.result.role_switches += 1
        to_training = action.role == "training"
        hours = self.costs.to_training_hours if to_training else self.costs.to_rollout_hours
        self._busy[action.cell] = self._after(hours, RoleChanged(action.cell, action.role))

    @_do.register
    def _(self, action: Admit) -> None:
        self._unclaimed.extend([action.step] * self.costs.micro_steps_per_group)
        self._after(0.0, Supply(action.step, len(self._unclaimed)))
        self._claim()

    @_do.register
    def _(self, action: CloseStream) -> None:
        self._closed = True
        self._drain(action.step)

    @_do.register
    def _(self, action: Step) -> None:
        self._after(self.costs.update_hours, StepTrained(action.step))

    @_do.register
    def _(self, action: Publish) -> None:
        self._after(self.costs.publish_hours, Published(action.version))

    # -- training --------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Idle training cells take micro-steps, in cell order."""
        for cell in sorted(self._training - self._claimed.keys()):
            if not self._unclaimed:
                return
            step = self._claimed[cell] = self._unclaimed.popleft()
            self._busy[cell] = self._after(self._micro_step_hours[cell], cell)
            self._after(0.0, Supply(step, len(self._unclaimed)))

    def _micro_step_done(self, cell: int) -> None:
        step = self._claimed.pop(cell)
        del self._busy[cell]
        self._busy_node_hours += self._micro_step_hours[cell] * self._nodes[cell]
        self._claim()
        self._drain(step)

    def _drain(self, step: int) -> None:
        if self._closed and not self._unclaimed and not self._claimed:
            self._closed = False
            self._after(0.0, StreamDrained(step))

    # -- result ----------------------------------------------------------------------------------------------

    def _summary(self) -> SimulationResult:
        result, ledger = self.result, self.scheduler.ledger
        nodes = sum(self._nodes) + self.costs.nodes(self.settings.standalone)
        result.hours = self.now
        result.steps = self.scheduler.version
        result.groups = ledger.next_group
        result.executions = ledger.terminated
        result.staleness_mean = float(self.scheduler.staleness_mean or 0)
        result.utilisation = (self._rollout_node_hours + self._busy_node_hours) / (nodes * self.now)
        result.training_share = [
            training_hours(result.timeline, cell, self.now) / self.now for cell in range(len(self._nodes))
        ]
        return result


def training_hours(timeline: list[tuple[float, int, str]], cell: int, end: float) -> float:
    """Hours that a cell spent in role training."""
    changes = [(time, role) for time, found, role in timeline if found == cell] + [(end, "")]
    pairs = zip(changes, changes[1:], strict=False)
    return sum(after - before for (before, role), (after, _) in pairs if role == "training")
