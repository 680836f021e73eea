"""Owns the records of one execution: its states, its calls, its assessments, its one reward (paper section 5.2).

Invariant: closing an execution fixes its calls. A call recorded after the "closed" line is kept apart in `late`:
it is shown and accounted for, never trained.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre_trajtree.records import Assessment, Call, Execution, Record

_PRECEDENCE = {"unresolved": 0, "placeholder": 1, "valid": 2}


@dataclass(slots=True)
class RecordedExecution:
    """All records of one execution, each list in the order of the log."""

    id: str
    states: list[Execution] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Calls recorded while the execution was open."""
    assessments: list[Assessment] = field(default_factory=list)
    late: list[Call] = field(default_factory=list)
    """Calls recorded after the execution was closed: flagged, never trained."""

    def add(self, record: Execution | Call | Assessment) -> None:
        """Take in the next record of the log that belongs to this execution."""
        if isinstance(record, Call):
            (self.late if self.closed else self.calls).append(record)
        elif isinstance(record, Execution):
            self.states.append(record)
        else:
            self.assessments.append(record)

    @property
    def closed(self) -> bool:
        """Whether its latest state is "closed"; an execution that was opened again is open."""
        return bool(self.states) and self.states[-1].state == "closed"

    @property
    def group(self) -> str | None:
        """Rollout group, as the latest state that names one says."""
        return self._latest("group")

    @property
    def task(self) -> str | None:
        """Task, as the latest state that names one says."""
        return self._latest("task")

    @property
    def harness(self) -> str | None:
        """Harness, as the latest state that names one says."""
        return self._latest("harness")

    @property
    def prompt(self) -> str | None:
        """The text that the harness was started with, as the latest state that names one says."""
        return self._latest("prompt")

    @property
    def designated(self) -> Assessment | None:
        """The assessment that supplies the reward; None when no assessment is marked as designated.

        The latest valid one, else the latest placeholder, else the latest unresolved one: an evaluation that failed says
        nothing about the work, so it never takes back a score, and a score found later always resolves it.
        """
        marked = [assessment for assessment in self.assessments if assessment.designated]
        return max(reversed(marked), key=lambda each: _PRECEDENCE[each.status], default=None)

    @property
    def assessed(self) -> bool:
        """Whether it has a designated assessment, resolved or not."""
        return self.designated is not None

    @property
    def reward(self) -> float | None:
        """The execution's one reward; None when it is unassessed or unresolved (which is not zero)."""
        designated = self.designated
        return designated.reward() if designated else None

    def _latest(self, name: str) -> str | None:
        named = (getattr(state, name) for state in reversed(self.states))
        return next((value for value in named if value is not None), None)


def executions(records: Iterable[Record]) -> dict[str, RecordedExecution]:
    """Records by execution, in the order in which executions first appear. Other records are left out."""
    found: dict[str, RecordedExecution] = {}
    for record in records:
        identity = execution_of(record)
        if identity is not None:
            found.setdefault(identity, RecordedExecution(identity)).add(record)
    return found


def execution_of(record: Record) -> str | None:
    """Id of the execution that a record belongs to; None for records of the whole run."""
    if isinstance(record, Call | Assessment):
        return record.execution
    return record.id if isinstance(record, Execution) else None
