"""What the driver writes of an assessment, and what readers make of it."""

import pytest
from gyre_cli.record import RunRecord
from gyre_scheduler.evaluation import Assessment, Intermediate
from gyre_trajtree import executions, read_run_log


@pytest.fixture
def record(tmp_path):
    record = RunRecord(tmp_path, {})
    yield record
    record.close()


def assessed(record):
    return executions(read_run_log(record.path))["7-3"]


def test_an_assessment_is_recorded_with_the_state_it_is_of(record):
    record.assessed("7-3", Assessment("valid", 0.5, "half", 2, "sha256:b"))
    (found,) = assessed(record).assessments
    assert (found.status, found.score, found.detail, found.attempt) == ("valid", 0.5, "half", 2)
    assert found.artifact == "sha256:b" and found.designated and assessed(record).reward == 0.5


def test_earlier_states_keep_their_own_reference_and_give_no_reward(record):
    early = (
        Intermediate("valid", 1.0, "looked good", "git:a", "try-1"),
        Intermediate("unresolved", None, "no artifact", None, None),
    )
    record.assessed("7-3", Assessment("unresolved", None, "it crashed", 2, "sha256:b", early))
    first, second, last = assessed(record).assessments
    assert (first.score, first.artifact, first.designated) == (1.0, "git:a", False)
    assert first.extra == {"branch": "try-1"} and second.extra == {}
    assert (second.status, second.designated) == ("unresolved", False)
    assert (last.status, last.artifact, last.designated) == ("unresolved", "sha256:b", True)
    assert assessed(record).reward is None


def test_a_late_result_is_recorded_and_changes_nothing(record):
    record.assessed("7-3", Assessment("unresolved", None, "no answer", 1, "sha256:b"))
    record.assessed("7-3", Assessment("valid", 1.0, "came too late", 1, "sha256:b"), designated=False)
    assert len(assessed(record).assessments) == 2 and assessed(record).reward is None


def test_a_placeholder_is_a_reward_of_zero(record):
    record.assessed("7-3", Assessment("placeholder", 0.0, "no workspace", 0))
    assert assessed(record).designated.status == "placeholder" and assessed(record).reward == 0.0
