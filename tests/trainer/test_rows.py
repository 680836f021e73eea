import numpy as np
import pytest
from gyre_trainer.errors import RowError
from gyre_trainer.rows import MicroStep, TrainingExecution, TrainingRow


def row(execution="e", targets=(False, True), logprobs=(np.nan, -1.0), versions=(-1, 0), ids=(1, 2)):
    return TrainingRow(execution, np.array(ids), np.array(targets), np.array(logprobs), np.array(versions))


def test_a_row_holds_the_wire_dtypes():
    made = row()
    dtypes = [a.dtype for a in (made.ids, made.targets, made.logprobs, made.versions)]
    assert dtypes == [np.int32, np.bool_, np.float32, np.int32]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"targets": (True, True), "logprobs": (-1.0, -1.0), "versions": (0, 0)}, "no context"),
        ({"logprobs": (np.nan, np.nan)}, "finite behaviour log-prob"),
        ({"logprobs": (np.nan, -np.inf)}, "finite behaviour log-prob"),
        ({"versions": (-1, -1)}, "weight version"),
        ({"ids": (1, -2)}, "negative token id"),
        ({"ids": (1, 2, 3)}, "common length"),
        ({"ids": (), "targets": (), "logprobs": (), "versions": ()}, "common length"),
    ],
)
def test_a_row_that_could_not_be_trained_is_refused(fault, says):
    with pytest.raises(RowError, match=says):
        row(**fault)


def test_an_execution_refuses_a_foreign_row_and_an_advantage_that_is_no_number():
    with pytest.raises(RowError, match="another execution"):
        TrainingExecution("other", 1.0, (row("e"),))
    with pytest.raises(RowError, match="not finite"):
        TrainingExecution("e", float("nan"), (row("e"),))


def test_a_micro_step_holds_executions_with_targets_each_once():
    with pytest.raises(RowError, match="has no target"):
        MicroStep(0, (TrainingExecution("e", 1.0, ()),))
    twice = TrainingExecution("e", 1.0, (row(),))
    with pytest.raises(RowError, match="each once"):
        MicroStep(0, (twice, twice))


def test_trajectories_become_rows():
    class Trajectory:
        ids, targets = np.array([5, 6, 7]), np.array([False, False, True])
        logprobs, versions = np.array([np.nan, np.nan, -0.5]), np.array([-1, -1, 3])

    execution = TrainingExecution.from_trajectories("e", 0.25, [Trajectory, Trajectory])
    assert (execution.target_count, execution.token_count, execution.advantage) == (2, 6, 0.25)
