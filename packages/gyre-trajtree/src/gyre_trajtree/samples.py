"""Owns the training samples of a recorded run: what training draws from its log (paper sections 5.1 to 5.3).

Invariants: memory holds the tokens of one execution, and at most `GARBAGE_TOKENS` of those before it; once the
iterator has ended, the ledger holds every sampled token of the log, as trained or as excluded with a reason; equal
seeds give the samples that training drew.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gyre_trajtree.admission import Admitted, admit, refusal_of
from gyre_trajtree.advantages import group_advantages
from gyre_trajtree.conservation import Ledger
from gyre_trajtree.errors import TrajtreeError
from gyre_trajtree.executions import RecordedExecution
from gyre_trajtree.rows import Trajectory, flat_row

GARBAGE_TOKENS = 1 << 23
"""Tokens of finished trees after which they are collected (about 100 MiB). The nodes of a tree refer to each other in
circles, and the collector counts objects, not bytes, so by itself it would let trees of many tokens pile up.
"""


@dataclass(slots=True, eq=False)
class Sample:
    """One admitted trajectory with what its execution says of it."""

    trajectory: Trajectory
    group: str | None
    """Rollout group; None for an execution that belongs to none."""
    task: str | None
    harness: str | None
    reward: float | None
    """Of the whole execution; None only where the log's rewards were not asked for."""
    advantage: float | None
    """Of the execution within its group; None without a reward or without a group."""

    @property
    def execution(self) -> str:
        return self.trajectory.execution

    @property
    def leaf(self) -> str:
        """Call id of the path's last node."""
        return self.trajectory.leaf

    @property
    def role(self) -> str:
        return self.trajectory.role


@dataclass(slots=True, frozen=True)
class _Outcome:
    """What the other members of a group need to know of an execution."""

    group: str | None
    reward: float | None
    assessed: bool


def sample_run(
    index: Iterable[RecordedExecution],
    j_max: int | None = 5,
    seed: int = 0,
    normalise: str = "mean",
    train_auxiliary: bool = False,
    require_reward: bool | None = None,
    ledger: Ledger | None = None,
    prompts: Callable[[str], str | None] | None = None,
) -> Iterator[Sample]:
    """The samples of all executions of a log, in the order of their first appearance, each one's by role priority.

    `index` is a `RunLogIndex`, whose rewards are read before this returns and whose calls are read as samples are taken,
    or anything else that gives the same executions twice. `j_max` (None: all trajectories), `seed` and
    `train_auxiliary` as for `draw` and `execution_rng`; `normalise` as for `group_advantages`. `require_reward` leaves
    out executions without a valid reward; None means that it does if the log assesses any execution. `prompts` gives
    the task prompt of an execution by its id where the log does not record it. `ledger` takes the accounts, and is
    complete when the iterator has ended.

    A failure placeholder counts in its group's baseline and gives no sample. Raises RewardError for an unknown
    `normalise`, TrajtreeError for a negative `j_max`, AccountError when a token would be lost or trained twice.
    """
    if iter(index) is index:
        raise TrajtreeError(
            "sample_run reads the executions twice; pass a RunLogIndex or a list, no iterator"
        )
    outcomes = _outcomes(index)
    if require_reward is None:
        require_reward = any(outcome.assessed for outcome in outcomes.values())
    advantages = _advantages(outcomes, normalise)

    def admitted(recorded: RecordedExecution) -> Admitted:
        refusal = refusal_of(recorded, require_reward)
        prompt = prompts(recorded.id) if prompts and recorded.calls else None
        return admit(recorded, j_max, seed, refusal, train_auxiliary, prompt)

    return _samples(index, advantages, admitted, Ledger() if ledger is None else ledger)


def _samples(
    index: Iterable[RecordedExecution],
    advantages: dict[str, float | None],
    admitted: Callable[[RecordedExecution], Admitted],
    ledger: Ledger,
) -> Iterator[Sample]:
    garbage = 0
    for recorded in index:
        yield from _samples_of(admitted(recorded), advantages[recorded.id], ledger)
        garbage += sum(len(call.input_ids) + len(call.output_ids) for call in recorded.calls)
        del recorded
        if garbage >= GARBAGE_TOKENS:
            gc.collect()
            garbage = 0
    ledger.check()


def _samples_of(found: Admitted, advantage: float | None, ledger: Ledger) -> Iterator[Sample]:
    ledger.merge(found.ledger)
    recorded = found.recorded
    for drawn in found.draws:
        row = flat_row(recorded.id, drawn)
        yield Sample(row, recorded.group, recorded.task, recorded.harness, recorded.reward, advantage)


def _outcomes(index: Iterable[RecordedExecution]) -> dict[str, _Outcome]:
    found = {}
    for recorded in index.outlines() if hasattr(index, "outlines") else index:
        found[recorded.id] = _Outcome(recorded.group, recorded.reward, recorded.assessed)
        del recorded  # its tokens go before the next execution is read
    return found


def _advantages(outcomes: dict[str, _Outcome], normalise: str) -> dict[str, float | None]:
    """Advantage of each execution among the executions of its group, in the order of their first appearance."""
    groups: dict[str, list[str]] = {}
    for execution, outcome in outcomes.items():
        if outcome.group is not None:
            groups.setdefault(outcome.group, []).append(execution)
    advantages: dict[str, float | None] = dict.fromkeys(outcomes)
    for members in groups.values():
        rewards = [outcomes[member].reward for member in members]
        advantages.update(zip(members, group_advantages(rewards, normalise), strict=True))
    return advantages
