import json

import pytest
from gyre_trajtree import (
    Assessment,
    Call,
    Event,
    Execution,
    RunLogWriter,
    Tree,
    executions,
    inspect,
    read_run_log,
    tree_digest,
)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, packed=True) as log:
        log.append(Execution("x", "opened", group="g"))
        log.append(Execution("y", "opened", group="g"))
        log.append(Call("a", "x", [1, 2, 3], [4, 5], logprobs=[-1.0, -2.0]))
        log.append(Call("n", "y", [1], [2], logprobs=[-1.0]))
        log.append(Call("b", "x", [6], [7], parent="a", logprobs=[-1.0]))
        log.append(Call("c", "x", [8], [9], parent="a", logprobs=[None]))
        log.append(Event("step", 1.0))
        log.append(Assessment("x", "valid", 0.5))
        log.append(Assessment("x", "valid", 0.1, designated=False))
        log.append(Assessment("y", "unresolved"))
        log.append(Execution("x", "closed", termination="completed"))
        log.append(Execution("z", "opened"))
    return path


def test_executions_collect_their_own_records(run):
    found = executions(read_run_log(run))
    assert list(found) == ["x", "y", "z"]
    assert [call.id for call in found["x"].calls] == ["a", "b", "c"]
    assert found["x"].closed and not found["y"].closed
    assert (found["x"].reward, found["y"].reward, found["z"].reward) == (0.5, None, None)


def test_a_later_designated_assessment_replaces_an_earlier_one():
    found = executions([Assessment("x", "unresolved"), Assessment("x", "valid", 0.25, attempt=1)])
    assert found["x"].reward == 0.25


def test_a_summary_counts_unique_and_expanded_tokens(run):
    summary = inspect(read_run_log(run))
    assert summary["executions"][0] == {
        "id": "x",
        "calls": 3,
        "leaves": 2,
        "unique_tokens": 9,
        "expanded_tokens": 14,
        "roles": {"main": 2},
        "reward": 0.5,
    }
    assert summary["executions"][2]["calls"] == 0
    assert summary["totals"] == {
        "executions": 3,
        "calls": 4,
        "leaves": 3,
        "unique_tokens": 11,
        "expanded_tokens": 16,
        "roles": {"main": 3},
        "rewarded": 1,
        "mean_reward": 0.5,
    }
    assert json.loads(json.dumps(summary)) == summary


def test_one_execution_can_be_asked_for(run):
    assert [row["id"] for row in inspect(read_run_log(run), execution="y")["executions"]] == ["y"]


def test_one_log_replays_into_identical_trees(run):
    digests = [tree_digest(Tree.from_calls(executions(read_run_log(run))["x"].calls)) for _ in range(2)]
    assert digests[0] == digests[1]


def test_recorded_parents_and_bare_prompts_replay_into_the_same_tree(new_recorder):
    digests = set()
    for whole_prompts in (False, True):
        recorder = new_recorder(whole_prompts)
        recorder.call("a")
        recorder.call("b", "a")
        recorder.call("c", "a")
        recorder.call("d")
        digests.add(tree_digest(recorder.tree()))
    assert len(digests) == 1


@pytest.mark.parametrize(
    "change",
    [{"output_ids": [3]}, {"input_ids": [9]}, {"logprobs": [-2.0]}, {"versions": [[1, 0, 1]]}, {"id": "b"}],
)
def test_any_change_changes_the_digest(change):
    call = {"id": "a", "execution": "x", "input_ids": [1], "output_ids": [2], "logprobs": [-1.0]}
    before, after = (tree_digest(Tree.from_calls([Call(**fields)])) for fields in (call, call | change))
    assert before != after
