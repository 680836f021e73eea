"""Admission from a run log: advantages, unresolved members, placeholders, and a ledger that loses no token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gyre_cli.admission import Admission, History
from gyre_trajtree import Assessment, Call, Execution, RunLogWriter


@pytest.fixture
def writer(tmp_path):
    with RunLogWriter(tmp_path / "run.jsonl") as writer:
        yield writer


def admission(tmp_path, j_max=5, seed=0) -> Admission:
    return Admission(History(tmp_path / "run.jsonl"), j_max, "mean", seed)


def record(writer, execution, score, calls=2, status="valid"):
    """An execution of `calls` turns, each with 3 prompt and 2 sampled tokens."""
    writer.append(Execution(execution, "opened"))
    parent = None
    for turn in range(calls):
        call = f"{execution}/{turn}"
        writer.append(
            Call(
                call,
                execution,
                [1, 2, 3],
                [4, 5],
                parent=parent,
                logprobs=[-0.5, -0.25],
                versions=[[0, 0, 2]],
            )
        )
        parent = call
    writer.append(Execution(execution, "closed", termination="completed"))
    writer.append(Assessment(execution, status, score if status == "valid" else None))


def test_a_group_gets_advantages_and_rows(tmp_path, writer):
    for member, score in enumerate((1.0, 0.0)):
        record(writer, f"g00000-{member}", score)
    group = admission(tmp_path).admit(["g00000-0", "g00000-1"])
    assert [execution.advantage for execution in group.executions] == [0.5, -0.5]
    assert group.rewards == [1.0, 0.0] and group.trained_tokens == 8 and group.trajectories == 2
    (row,) = group.executions[0].rows
    assert row.ids.tolist() == [1, 2, 3, 4, 5] * 2
    assert np.flatnonzero(row.targets).tolist() == [3, 4, 8, 9]


def test_an_unresolved_member_is_no_zero(tmp_path, writer):
    record(writer, "g00000-0", 1.0)
    record(writer, "g00000-1", 0.5)
    record(writer, "g00000-2", None, status="unresolved")
    admitting = admission(tmp_path)
    group = admitting.admit([f"g00000-{member}" for member in range(3)])
    assert [execution.advantage for execution in group.executions] == [0.25, -0.25]
    ledger = admitting.close()
    assert (ledger.sampled, ledger.trained, dict(ledger.excluded)) == (12, 8, {"unresolved": 4})


def test_a_placeholder_counts_in_the_baseline_and_trains_nothing(tmp_path, writer):
    record(writer, "g00000-0", 1.0)
    writer.append(Execution("g00000-1", "opened"))
    writer.append(Execution("g00000-1", "closed", termination="failed", error="no disk image"))
    writer.append(Assessment("g00000-1", "placeholder", 0.0))
    group = admission(tmp_path).admit(["g00000-0", "g00000-1"])
    assert [(e.advantage, len(e.rows)) for e in group.executions] == [(0.5, 1), (-0.5, 0)]


def test_every_sampled_token_is_in_the_ledger(tmp_path, writer):
    record(writer, "g00000-0", 1.0)
    record(writer, "g00000-1", 0.0)
    record(writer, "g00001-0", 1.0, calls=3)
    admitting = admission(tmp_path)
    admitting.admit(["g00000-0", "g00000-1"])
    ledger = admitting.close()
    assert ledger.sampled == 14 == ledger.trained + ledger.excluded.total()
    assert dict(ledger.excluded) == {"not-consumed": 6}


def test_draws_depend_on_seed_and_execution_not_on_the_order_of_admission(tmp_path, writer):
    members = [f"g0000{group}-{member}" for group in range(3) for member in range(2)]
    for execution in members:
        writer.append(Execution(execution, "opened"))
        for root in range(4):
            writer.append(
                Call(
                    f"{execution}/{root}",
                    execution,
                    [root, 2],
                    [5] * (root + 1),
                    logprobs=[-1.0] * (root + 1),
                    versions=[[0, 0, root + 1]],
                )
            )
        writer.append(Assessment(execution, "valid", float(execution.endswith("0"))))

    def drawn(order, seed):
        admitting = admission(tmp_path, j_max=1, seed=seed)
        groups = {group: admitting.admit(members[2 * group : 2 * group + 2]) for group in order}
        return [[row.ids.tolist() for e in groups[g].executions for row in e.rows] for g in sorted(groups)]

    assert drawn([0, 1, 2], 0) == drawn([2, 0, 1], 0)
    assert any(drawn([0, 1, 2], 0) != drawn([0, 1, 2], seed) for seed in range(1, 6))


def test_a_reward_that_is_no_number_cannot_enter(tmp_path, writer):
    from gyre_trajtree import RecordError

    with pytest.raises(RecordError):
        Assessment("g00000-0", "valid", math.nan)
