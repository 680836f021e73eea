"""The stream of one training step: a packing buffer and the shared queue of micro-steps (paper section 4.4).

Pure and synchronous: no torch, no clock, no async. Invariants:
- an admitted execution is in exactly one place: the buffer, or one micro-step that is queued, claimed or
  done;
- a micro-step is done by exactly one cell. A cell that fails loses its claimed *and* its done micro-steps,
  because its gradient sum is lost with it: they are queued again;
- the stream is drained when it is closed and every micro-step is done, and stays a ledger until `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from gyre_trajtree import pack

from gyre_trainer.errors import LedgerError, TrainerError
from gyre_trainer.rows import MicroStep, TrainingExecution
from gyre_trainer.statistics import TrainStatistics


class PackingBuffer:
    """Whole executions waiting to be packed. The fullest bin goes first, the rest may still pack better."""

    def __init__(self, budget: int):
        if budget < 1:
            raise TrainerError(f"the token budget of a micro-step must be at least 1, got {budget}")
        self.budget = budget
        self._waiting: list[TrainingExecution] = []
        self._bins: list[list[int]] | None = []

    def add(self, executions: Iterable[TrainingExecution]) -> None:
        self._waiting.extend(executions)
        self._bins = None

    def bins(self) -> list[list[int]]:
        """Indices of the micro-steps that wait now; an execution over the budget sits alone."""
        if self._bins is None:
            self._bins = pack([execution.token_count for execution in self._waiting], self.budget)
        return self._bins

    def take(self) -> list[TrainingExecution]:
        """Remove and return the executions of the fullest bin; an empty list when nothing waits."""
        if not self.bins():
            return []
        fullest = max(self.bins(), key=lambda bin: sum(self._waiting[i].token_count for i in bin))
        taken = [self._waiting[i] for i in fullest]
        chosen = set(fullest)
        self._waiting = [execution for i, execution in enumerate(self._waiting) if i not in chosen]
        self._bins = None
        return taken


class _State(Enum):
    QUEUED = "queued"
    CLAIMED = "claimed"
    DONE = "done"


class MicroStepQueue:
    """The shared queue of one training step, and its ledger.

    `step` names the training step. Executions without targets, and those whose advantage is exactly 0, whose
    gradient therefore is too, are counted in |E| and go no further.
    """

    def __init__(self, step: int, budget: int):
        self.step = step
        self.closed = False
        self.committed = False
        self.execution_count = 0
        """|E| so far: admitted executions, those without work included."""
        self.oversize: list[str] = []
        """Executions larger than the token budget; each is a micro-step of its own."""
        self._buffer = PackingBuffer(budget)
        self._steps: dict[int, MicroStep] = {}
        self._state: dict[int, _State] = {}
        self._holder: dict[int, int] = {}
        self._results: dict[int, TrainStatistics] = {}
        self._skipped = TrainStatistics()
        self._admitted: set[str] = set()
        self._watchers: list[Callable[[], None]] = []

    # -- filling
    def admit(self, executions: Iterable[TrainingExecution]) -> None:
        """Add executions of a ready group. Each execution is admitted once."""
        if self.closed:
            raise LedgerError(f"step {self.step}: the stream is closed, no execution can be admitted")
        executions = list(executions)
        for execution in executions:
            if execution.id in self._admitted:
                raise LedgerError(f"step {self.step}: execution {execution.id} was admitted before")
            self._admitted.add(execution.id)
        self.execution_count += len(executions)
        trained = [execution for execution in executions if execution.target_count]
        working = [execution for execution in trained if execution.advantage != 0.0]
        self._skipped += _skipped([execution for execution in trained if execution.advantage == 0.0])
        self.oversize += [e.id for e in working if e.token_count > self._buffer.budget]
        self._buffer.add(working)
        self._changed()

    def close(self) -> None:
        """Nothing more will be admitted."""
        self.closed = True
        self._changed()

    # -- working
    def claim(self, cell: int) -> MicroStep | None:
        """Give the next micro-step to a cell; None when nothing is available now."""
        self._not_committed()
        for id, state in self._state.items():
            if state is _State.QUEUED:
                return self._give(id, cell)
        executions = self._buffer.take()
        if not executions:
            return None
        id = len(self._steps)
        self._steps[id] = MicroStep(id, tuple(executions))
        return self._give(id, cell)

    def done(self, cell: int, id: int, statistics: TrainStatistics) -> None:
        """The cell has added the micro-step's gradient to its sum."""
        if self._state.get(id) is not _State.CLAIMED or self._holder[id] != cell:
            raise LedgerError(f"step {self.step}: cell {cell} does not hold micro-step {id}")
        self._state[id] = _State.DONE
        self._results[id] = statistics
        self._changed()

    def fail(self, cell: int) -> list[int]:
        """A cell was lost: queue again all it claimed or did. Returns their ids."""
        self._not_committed()
        lost = [id for id, holder in self._holder.items() if holder == cell]
        for id in lost:
            self._state[id] = _State.QUEUED
            self._results.pop(id, None)
            del self._holder[id]
        self._changed()
        return lost

    def commit(self) -> TrainStatistics:
        """The optimizer step was taken with every micro-step once. Returns the statistics of the whole step."""
        self._not_committed()
        if not self.drained:
            raise LedgerError(f"step {self.step}: cannot be committed before the stream is drained")
        self.committed = True
        return sum(self._results.values(), self._skipped)

    # -- looking
    @property
    def unclaimed(self) -> int:
        """Micro-steps a cell could claim now (the supply of Eq. 5)."""
        queued = sum(state is _State.QUEUED for state in self._state.values())
        return queued + len(self._buffer.bins())

    @property
    def drained(self) -> bool:
        return self.closed and not self._buffer.bins() and all(s is _State.DONE for s in self._state.values())

    @property
    def scale(self) -> float:
        """1/|E|, the one global scale, applied before clipping. 0 when no execution was admitted."""
        return 1.0 / self.execution_count if self.execution_count else 0.0

    def workers(self) -> set[int]:
        """Cells that hold or did a micro-step of this step."""
        return set(self._holder.values())

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change."""
        self._watchers.append(callback)

    def unwatch(self, callback: Callable[[], None]) -> None:
        self._watchers.remove(callback)

    def _give(self, id: int, cell: int) -> MicroStep:
        self._state[id] = _State.CLAIMED
        self._holder[id] = cell
        self._changed()
        return self._steps[id]

    def _not_committed(self) -> None:
        if self.committed:
            raise LedgerError(f"step {self.step}: is committed already")

    def _changed(self) -> None:
        for callback in list(self._watchers):
            callback()


def _skipped(executions: list[TrainingExecution]) -> TrainStatistics:
    targets = sum(execution.target_count for execution in executions)
    count = len(executions)
    return TrainStatistics(
        targets=targets, executions=count, skipped_targets=targets, skipped_executions=count
    )
