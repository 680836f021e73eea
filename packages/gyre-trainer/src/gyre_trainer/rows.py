"""What a cell trains on: token rows and micro-steps. No torch here.

Invariant: a row's targets carry a finite behaviour log-prob and a weight version, and none sits at position
0, which has no context. A micro-step holds whole executions: every target of an execution is in it, so the
execution-level ratio s_i (paper appendix B) is exact within one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gyre_trainer.errors import RowError


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One root-to-leaf path of one execution. All arrays have the same length L >= 1."""

    execution: str
    ids: np.ndarray
    """int32 [L], token ids."""
    targets: np.ndarray
    """bool [L], whether the token at this position is trained."""
    logprobs: np.ndarray
    """float32 [L], behaviour log-prob of the token (natural log), NaN where none was recorded."""
    versions: np.ndarray
    """int32 [L], weight version that sampled the token, -1 where it was not sampled."""

    def __post_init__(self):
        for name, dtype in (
            ("ids", np.int32),
            ("targets", np.bool_),
            ("logprobs", np.float32),
            ("versions", np.int32),
        ):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        shapes = {self.ids.shape, self.targets.shape, self.logprobs.shape, self.versions.shape}
        if len(shapes) != 1 or self.ids.ndim != 1 or not len(self.ids):
            raise RowError(
                f"row of {self.execution}: ids, targets, logprobs and versions need one common length >= 1"
            )
        if self.ids.min() < 0:
            raise RowError(f"row of {self.execution}: negative token id")
        if self.targets[0]:
            raise RowError(f"row of {self.execution}: the first token has no context and cannot be a target")
        if not np.isfinite(self.logprobs[self.targets]).all():
            raise RowError(f"row of {self.execution}: a target without a finite behaviour log-prob")
        if (self.versions[self.targets] < 0).any():
            raise RowError(f"row of {self.execution}: a target without the weight version that sampled it")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def target_count(self) -> int:
        return int(self.targets.sum())


@dataclass(frozen=True, slots=True, eq=False)
class TrainingExecution:
    """One admitted execution: its reward's advantage and all its rows.

    An execution without any target (L_i = 0) gives no gradient and has no ratio; it still counts in |E|,
    because its reward is valid and stood in the group's baseline.
    """

    id: str
    advantage: float
    """A_i, one per execution (never per trajectory)."""
    rows: tuple[TrainingRow, ...] = ()

    def __post_init__(self):
        if not np.isfinite(self.advantage):
            raise RowError(f"execution {self.id}: advantage {self.advantage} is not finite")
        if any(row.execution != self.id for row in self.rows):
            raise RowError(f"execution {self.id}: holds a row of another execution")

    @property
    def target_count(self) -> int:
        """L_i."""
        return sum(row.target_count for row in self.rows)

    @property
    def token_count(self) -> int:
        """Tokens a forward pass over its rows costs."""
        return sum(len(row) for row in self.rows)

    @classmethod
    def from_trajectories(cls, id: str, advantage: float, trajectories) -> TrainingExecution:
        """From objects with `ids`, `targets`, `logprobs`, `versions` (gyre_trajtree.Trajectory)."""
        return cls(
            id,
            float(advantage),
            tuple(TrainingRow(id, t.ids, t.targets, t.logprobs, t.versions) for t in trajectories),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MicroStep:
    """The unit of work that a cell claims: whole executions, each with at least one target."""

    id: int
    executions: tuple[TrainingExecution, ...]

    def __post_init__(self):
        ids = [execution.id for execution in self.executions]
        if not ids or len(set(ids)) != len(ids):
            raise RowError(f"micro-step {self.id}: needs one or more executions, each once")
        for execution in self.executions:
            if not execution.target_count:
                raise RowError(f"micro-step {self.id}: execution {execution.id} has no target")

    @property
    def rows(self) -> list[TrainingRow]:
        return [row for execution in self.executions for row in execution.rows]

    @property
    def token_count(self) -> int:
        return sum(execution.token_count for execution in self.executions)

    @property
    def target_count(self) -> int:
        return sum(execution.target_count for execution in self.executions)
