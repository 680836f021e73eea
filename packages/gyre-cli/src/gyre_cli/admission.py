"""Training admission: recorded executions of a ready group become what the trainer consumes (paper section 5.3).

Reads the run log alone, so what is trained was durable first. Invariant: every sampled token of the run ends in exactly one
of trained or excluded, each exclusion with a reason (`Ledger`). An execution is admitted at most once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gyre_trainer.rows import TrainingExecution
from gyre_trajtree import AccountError, Ledger, RecordedExecution, RunLogTail, flat_row, group_advantages
from gyre_trajtree.admission import Admitted, admit, refusal_of
from gyre_trajtree.executions import execution_of


class History:
    """The run log of a run in progress, by execution."""

    def __init__(self, log: Path) -> None:
        self._tail = RunLogTail(log)
        self.executions: dict[str, RecordedExecution] = {}

    def refresh(self) -> None:
        """Take in what was appended since the last call."""
        for record in self._tail.poll():
            if identity := execution_of(record):
                self.of(identity).add(record)

    def of(self, execution: str) -> RecordedExecution:
        return self.executions.setdefault(execution, RecordedExecution(execution))


@dataclass(frozen=True)
class AdmittedGroup:
    """One consumed group: what the trainer gets and what the metrics say of it."""

    executions: list[TrainingExecution]
    rewards: list[float]
    """Valid rewards; the unresolved are absent."""
    trained_tokens: int
    trajectories: int
    calls: int
    failed_calls: int
    """Calls that an engine or the proxy refused."""


class Admission:
    """Admits groups of executions and keeps the token ledger of the run."""

    def __init__(self, history: History, j_max: int, normalise: str, seed: int) -> None:
        """`j_max` 0 takes all trajectories; `seed` decides the
        draws, whatever the order of admission.
        """
        self.history = history
        self.ledger = Ledger()
        self._j_max = j_max or None
        self._normalise = normalise
        self._seed = seed
        self._admitted: set[str] = set()

    def admit(self, members: list[str]) -> AdmittedGroup:
        """Admit the executions of one ready group, given in the order of their numbers."""
        self.history.refresh()
        recorded = [self.history.of(execution) for execution in members]
        calls = [call.finish for each in recorded for call in each.calls]
        advantages = group_advantages([each.reward for each in recorded], self._normalise)
        admitted = [
            self._execution(each, advantage)
            for each, advantage in zip(recorded, advantages, strict=True)
            if advantage is not None
        ]
        return AdmittedGroup(
            executions=admitted,
            rewards=[each.reward for each in recorded if each.reward is not None],
            trained_tokens=sum(execution.target_count for execution in admitted),
            trajectories=sum(len(execution.rows) for execution in admitted),
            calls=len(calls),
            failed_calls=calls.count("error"),
        )

    def close(self) -> Ledger:
        """Account for the tokens of every execution that was not admitted; the ledger is then whole."""
        self.history.refresh()
        for execution, recorded in self.history.executions.items():
            if execution in self._admitted:
                self.ledger.exclude([*recorded.calls, *recorded.late], "late")
            else:
                self._admit(
                    recorded, refusal_of(recorded, require_reward=recorded.assessed) or "not-consumed"
                )
        self.ledger.check()
        return self.ledger

    def _execution(self, recorded: RecordedExecution, advantage: float) -> TrainingExecution:
        """The rows of one execution; a failure placeholder has none."""
        if recorded.id in self._admitted:
            raise AccountError(f"execution {recorded.id} is admitted a second time")
        self._admitted.add(recorded.id)
        found = self._admit(recorded, refusal_of(recorded, require_reward=True))
        rows = [flat_row(recorded.id, drawn) for drawn in found.draws]
        recorded.calls.clear()  # the log keeps them; a long run must not hold all its tokens
        recorded.late.clear()
        return TrainingExecution.from_trajectories(recorded.id, advantage, rows)

    def _admit(self, recorded: RecordedExecution, refusal: str | None) -> Admitted:
        found = admit(recorded, self._j_max, self._seed, refusal)
        self.ledger.merge(found.ledger)
        return found
