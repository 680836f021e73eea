"""The live runtime: executes the scheduler's actions through three small Protocols and feeds back events.

Invariants: events reach the scheduler one at a time, and `log(event, actions)` sees each of them, so that the
log replayed through a fresh scheduler gives the same actions. Each launched execution is reported launched,
terminated and assessed exactly once, whatever its implementation does. When `run` returns or raises, every
task it started has ended.

Concurrency: `dispatch` and `drop` are awaited in order before anything later happens. The trainer's four
operations run one at a time in order. Each execution, transition and reroute runs in a task of its own, those of
one cell one after another. What moves executions first waits until each of them is launched, so that its route
exists, and routes it to where the scheduler last placed it.

Losses: the environment posts each of them, once, and nobody else does. A loss ends whatever transition
of the cell is under way: its RoleChanged is not posted, and if it has not begun, only its routes are moved.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from .actions import (
    Abort,
    Action,
    Admit,
    Cancel,
    CloseStream,
    Destination,
    Dispatch,
    Drop,
    Finish,
    Launch,
    Publish,
    Reroute,
    Step,
    Transition,
)
from .errors import LostCell, ProtocolError, RunAborted, RunStalled, SchedulerError, SettingsError
from .events import (
    Assessed,
    CellLost,
    Event,
    Expected,
    Launched,
    Published,
    RoleChanged,
    Started,
    StepTrained,
    Terminated,
    Termination,
)
from .scheduler import Scheduler

logger = logging.getLogger("gyre_scheduler")

Log = Callable[[Event, list[Action]], None]


class Report:
    """How an execution says where it is; each of the three exactly once, in this order."""

    def __init__(self, execution: str, post: Callable[[Event], None]):
        self.execution = execution
        self.said = 0
        self._post = post

    def launched(self) -> None:
        """The execution's route exists and its harness was started, or the attempt failed for good."""
        self._say(0, Launched(self.execution))

    def terminated(self, outcome: Termination) -> None:
        """The harness ended and makes no more calls."""
        self._say(1, Terminated(self.execution, outcome))

    def assessed(self, valid: bool) -> None:
        """The designated assessment is known; `valid` says that its reward may train."""
        self._say(2, Assessed(self.execution, valid))

    def close(self, outcome: Termination) -> None:
        """Say what is missing, for an execution that broke off."""
        missing = (self.launched, lambda: self.terminated(outcome), lambda: self.assessed(False))
        for say in missing[self.said :]:
            say()

    def _say(self, turn: int, event: Event) -> None:
        if turn != self.said:
            raise ProtocolError(f"{event} is out of turn: launched, terminated, assessed, each once")
        self.said += 1
        self._post(event)


class Executions(Protocol):
    """Runs harnesses and evaluates their workspaces."""

    def expected(self, group: int) -> float | None:
        """How long the executions of a group that is about to be dispatched may take; None when nothing is known.

        Asked under launch order "longest" alone, in the order of dispatch, for each group once but for replacements.
        """

    async def dispatch(self, group: int, version: int, replaces: int | None) -> None:
        """A group entered the queue: choose its task, record it."""

    async def run(self, execution: str, cell: Destination, report: Report) -> None:
        """Open the route to `cell`, start the harness, wait, evaluate; say so through `report`.

        Bounded by the execution's own budget. A SchedulerError ends the run; any other exception makes this
        one execution failed and invalid. Cancelled when the run is over, or its group needs it no more.
        """

    async def drop(self, group: int, reason: str) -> None:
        """A group left without being trained."""


class Cells(Protocol):
    """Changes roles and routes; each operation has its own deadline.

    A cell that dies, at whatever time, is told once, as CellLost through `Runtime.post`; once more, permanent,
    if it turns out not to come back. An operation that cannot
    end because of it raises LostCell, before or after; that ends the operation and tells nothing. Of moves of the
    same execution the one asked for last must win, whichever operation carries it.
    """

    async def to_training(self, cell: int, moves: dict[str, Destination]) -> None:
        """Stop admitting, route `moves`, drain, release memory, join (a satellite pulls the core's weights).

        Executions in `moves` that ended meanwhile are ignored. LostCell is raised only after `moves` are routed.
        """

    async def to_rollout(self, cell: int) -> None:
        """Restore the engine; the core's serves the published version, a satellite's waits for `publish`."""

    async def reroute(self, cell: int, moves: dict[str, Destination]) -> None:
        """Route executions away from a lost cell, which may be back already."""


class Trainer(Protocol):
    """Feeds and steps the training cells. Posts Supply and StreamDrained through `Runtime.post`."""

    async def admit(self, group: int, step: int, members: tuple[str, ...]) -> None:
        """Materialize a ready group into the step's stream; `members` are its executions that train."""

    async def close_stream(self, step: int) -> None:
        """The step has all its groups. StreamDrained follows, also when the stream is empty already."""

    async def step(self, step: int, cells: tuple[int, ...]) -> None:
        """Sum the gradients of `cells`, one optimizer update, send them the new weights."""

    async def publish(self, version: int) -> None:
        """Load the weights into every engine in rollout and verify the version."""


class Runtime:
    """One live run. `post` may be called from callbacks and tasks of the same event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        executions: Executions,
        cells: Cells,
        trainer: Trainer,
        log: Log,
        stall_s: float | None = None,
    ):
        """`stall_s`: seconds without any event after which RunStalled names what the run waits for.

        None, no limit, leaves it to the deadlines that executions, cells and trainer have themselves: how long
        a healthy run is silent follows from their budgets, which this class does not know.
        """
        if stall_s is not None and not 0 < stall_s < math.inf:
            raise SettingsError(f"stall_s must be a finite number of seconds above 0, or None, not {stall_s}")
        self.scheduler = scheduler
        self._executions = executions
        self._cells = cells
        self._trainer = trainer
        self._log = log
        self._stall_s = stall_s
        self._inbox: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._lane: asyncio.Queue[tuple[str, Coroutine[Any, Any, None], Event | None]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: dict[str, asyncio.Event] = {}
        self._destination: dict[str, Destination] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cell_lock = [asyncio.Lock() for _ in scheduler.settings.cells]
        self._losses_posted: Counter[int] = Counter()
        self._losses_handled: Counter[int] = Counter()
        self._training = "nothing"

    def post(self, event: Event) -> None:
        """Hand the scheduler an event, after those already posted."""
        if isinstance(event, Launched):
            self._opening.pop(event.execution).set()
        elif isinstance(event, Terminated):
            self._destination.pop(event.execution, None)
            self._running.pop(event.execution, None)
        elif isinstance(event, CellLost):
            self._losses_posted[event.cell] += 1
        self._inbox.put_nowait(event)

    async def run(self) -> None:
        """Run until Finish. RunAborted with the scheduler's reason, RunStalled, or what a Protocol raised."""
        self._spawn("trainer", self._train())
        try:
            self.post(Started())
            while not self.scheduler.done:
                await self._handle(await self._next())
        finally:
            await self._end_tasks()

    async def _next(self) -> Event:
        try:
            async with asyncio.timeout(self._stall_s):  # wait_for of Python 3.11 may swallow a cancellation
                item = await self._inbox.get()
        except TimeoutError:
            raise RunStalled(f"no event for {self._stall_s:g} s; waiting for {self._waiting_for()}") from None
        if isinstance(item, BaseException):
            raise item
        return item

    async def _handle(self, event: Event) -> None:
        for group in self.scheduler.wants_expected(event):
            if (duration := self._executions.expected(group)) is not None:
                expected = Expected(group, duration)
                self._log(expected, self.scheduler.handle(expected))
        actions = self.scheduler.handle(event)
        if isinstance(event, CellLost):
            self._losses_handled[event.cell] += 1
        self._log(event, actions)
        for action in actions:
            await self._execute(action)

    async def _execute(self, action: Action) -> None:
        match action:
            case Dispatch(group, version, replaces):
                await self._executions.dispatch(group, version, replaces)
            case Drop(group, reason):
                await self._executions.drop(group, reason)
            case Launch(execution, cell):
                self._opening[execution] = asyncio.Event()
                self._destination[execution] = cell
                self._launch(execution, cell)
            case Transition(cell, role, moves):
                self._destination.update(moves)
                losses = self._losses_handled[cell]
                self._spawn(f"cell {cell} to {role}", self._transition(action, losses))
            case Reroute(cell, moves):
                self._destination.update(moves)
                self._spawn(f"routes away from cell {cell}", self._reroute(cell, moves))
            case Cancel(execution):
                if (
                    execution in self._running
                ):  # otherwise it ended by itself, and the scheduler will hear of it
                    self._running[execution].cancel()
            case Admit(group, step, members):
                self._queue(f"admission of group {group}", self._trainer.admit(group, step, members))
            case CloseStream(step):
                self._queue(f"end of the stream of step {step}", self._trainer.close_stream(step))
            case Step(step, cells):
                self._queue(f"step {step}", self._trainer.step(step, cells), StepTrained(step))
            case Publish(version):
                self._queue(f"version {version}", self._trainer.publish(version), Published(version))
            case Abort(reason):
                raise RunAborted(reason)
            case Finish():
                logger.debug("finished after %d steps", self.scheduler.version)

    # -- tasks -----------------------------------------------------------------------------------------------

    def _launch(self, execution: str, cell: Destination) -> None:
        report = Report(execution, self.post)
        task = self._spawn(f"execution {execution}", self._run_execution(execution, cell, report))
        # here and not in the task, which may be cancelled before it began
        task.add_done_callback(lambda done: report.close("cancelled") if done.cancelled() else None)
        self._running[execution] = task

    async def _run_execution(self, execution: str, cell: Destination, report: Report) -> None:
        try:
            await self._executions.run(execution, cell, report)
        except SchedulerError:
            report.close("failed")
            raise
        except Exception:
            logger.exception("execution %s broke off", execution)
            report.close("failed")
        if report.said < 3:
            raise ProtocolError(f"execution {execution} ended without being reported terminated and assessed")

    async def _transition(self, action: Transition, losses: int) -> None:
        """`losses`: how often the cell had been lost, as far as the scheduler knew when it asked for this."""
        cell = action.cell
        async with self._cell_lock[cell]:
            moves = await self._current(cell, action.moves)
            if self._losses_posted[cell] > losses:
                if moves:
                    await self._cells.reroute(cell, moves)
                return
            try:
                if action.role == "training":
                    await self._cells.to_training(cell, moves)
                else:
                    await self._cells.to_rollout(cell)
            except LostCell:
                return
        if self._losses_posted[cell] == losses:
            self.post(RoleChanged(cell, action.role))

    async def _reroute(self, cell: int, moves: dict[str, Destination]) -> None:
        async with self._cell_lock[cell]:
            if current := await self._current(cell, moves):
                await self._cells.reroute(cell, current)

    async def _current(self, cell: int, moves: dict[str, Destination]) -> dict[str, Destination]:
        """`moves` away from a cell, once their routes exist, as the scheduler sees them by then."""
        for execution in moves:
            if execution in self._opening:
                await self._opening[execution].wait()
        places = {execution: self._destination.get(execution, cell) for execution in moves}
        return {execution: place for execution, place in places.items() if place != cell}

    async def _train(self) -> None:
        while True:
            self._training, operation, answer = await self._lane.get()
            await operation
            if answer is not None:
                self.post(answer)
            self._training = "nothing"

    def _queue(self, name: str, operation: Coroutine[Any, Any, None], answer: Event | None = None) -> None:
        self._lane.put_nowait((name, operation, answer))

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.put_nowait(error)

    async def _end_tasks(self) -> None:
        """Cancel what still runs, then record how it ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not self._lane.empty():
            self._lane.get_nowait()[1].close()
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if self.scheduler.done and isinstance(item, Event):
                self._log(item, self.scheduler.handle(item))

    def _waiting_for(self) -> str:
        names = sorted(task.get_name() for task in self._tasks if task.get_name() != "trainer")
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return f"{shown or 'no task'}; step {self.scheduler.step.number}, the trainer is at {self._training}"
