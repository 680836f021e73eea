import itertools

import pytest
from gyre_trajtree import Assessment, Call, Event, Execution, RecordedExecution, executions


def test_a_call_after_closing_is_kept_apart():
    recorded = executions(
        [
            Call("a", "x", [1], [2]),
            Execution("x", "closed", termination="timeout"),
            Call("b", "x", [3], [4], parent="a"),
            Call("c", "y", [1], [2]),
        ]
    )
    assert [call.id for call in recorded["x"].calls] == ["a"]
    assert [call.id for call in recorded["x"].late] == ["b"]
    assert recorded["x"].closed and not recorded["y"].closed
    assert [call.id for call in recorded["y"].calls] == ["c"] and not recorded["y"].late


def test_an_execution_that_is_opened_again_takes_calls_again():
    states = [Execution("x", state) for state in ("opened", "closed", "opened")]
    recorded = executions([*states, Call("a", "x", [1], [2])])["x"]
    assert not recorded.closed and [call.id for call in recorded.calls] == ["a"] and not recorded.late


def test_records_taken_in_one_by_one_are_those_taken_in_at_once():
    records = [
        Execution("x", "opened", group="g"),
        Call("a", "x", [1], [2]),
        Execution("x", "closed"),
        Call("b", "x", [1], [2]),
        Assessment("x", "valid", 1.0),
    ]
    grown = RecordedExecution("x")
    for record in records:
        grown.add(record)
    assert grown == executions(records)["x"]


def test_group_task_and_harness_come_from_the_state_that_names_them():
    recorded = executions(
        [
            Execution("x", "opened", group="g", task="t", harness="h"),
            Execution("x", "closed"),
            Call("a", "y", [1], [2]),
            Event("step"),
        ]
    )
    assert (recorded["x"].group, recorded["x"].task, recorded["x"].harness) == ("g", "t", "h")
    assert (recorded["y"].group, recorded["y"].task, recorded["y"].harness) == (None, None, None)
    assert list(recorded) == ["x", "y"]


UNRESOLVED = Assessment("x", "unresolved", detail="the evaluator crashed")
PLACEHOLDER = Assessment("x", "placeholder", detail="no image")
ZERO, HALF = Assessment("x", "valid", 0.0), Assessment("x", "valid", 0.5)
UNMARKED = Assessment("x", "valid", 0.9, designated=False)


@pytest.mark.parametrize(
    "assessments, reward, assessed",
    [
        ([], None, False),
        ([UNMARKED], None, False),
        ([UNRESOLVED], None, True),
        ([ZERO], 0.0, True),
        ([PLACEHOLDER], 0.0, True),
        ([UNRESOLVED, HALF], 0.5, True),
        ([HALF, UNRESOLVED], 0.5, True),
        ([ZERO, UNRESOLVED], 0.0, True),
        ([UNRESOLVED, PLACEHOLDER], 0.0, True),
        ([PLACEHOLDER, UNRESOLVED], 0.0, True),
        ([PLACEHOLDER, HALF], 0.5, True),
        ([HALF, PLACEHOLDER], 0.5, True),
        ([ZERO, HALF], 0.5, True),
        ([HALF, ZERO], 0.0, True),
        ([HALF, UNMARKED], 0.5, True),
        ([UNMARKED, UNRESOLVED], None, True),
    ],
)
def test_the_designated_assessment_supplies_one_reward(assessments, reward, assessed):
    """Section 5.2: an evaluator's failure leaves it unresolved, which a retry may resolve and never takes back."""
    recorded = executions([Execution("x", "opened"), *assessments])["x"]
    assert (recorded.reward, recorded.assessed) == (reward, assessed)
    assert (recorded.designated is None) == (not assessed)


def test_a_failed_evaluation_changes_no_reward_wherever_it_stands():
    scored = [ZERO, UNMARKED, HALF]
    for place in range(len(scored) + 1):
        recorded = executions([*scored[:place], UNRESOLVED, *scored[place:]])["x"]
        assert recorded.reward == 0.5 and recorded.designated is HALF


def test_valid_takes_precedence_over_placeholder_over_unresolved_in_any_order():
    for order in itertools.permutations([HALF, PLACEHOLDER, UNRESOLVED]):
        assert executions(order)["x"].designated is HALF
    for order in itertools.permutations([PLACEHOLDER, UNRESOLVED]):
        assert executions(order)["x"].designated is PLACEHOLDER
