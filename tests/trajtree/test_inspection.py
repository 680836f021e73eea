import json
from collections import Counter

import pytest
from gyre_trajtree import (
    Assessment,
    Call,
    Event,
    Execution,
    Ledger,
    RunLogIndex,
    RunLogWriter,
    Tree,
    executions,
    inspect,
    read_run_log,
    sample_run,
    summarise,
    tree_digest,
)
from hypothesis import given
from hypothesis import strategies as st
from trajtree_shapes import executions_of_any_shape


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


def summary_of(path, **options):
    with RunLogIndex(path) as index:
        return summarise(inspect(recorded, **options) for recorded in index)


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
    summary = summary_of(run)
    assert summary["executions"][0] == {
        "id": "x",
        "group": "g",
        "task": None,
        "harness": None,
        "state": "closed",
        "termination": "completed",
        "calls": 3,
        "leaves": 2,
        "roots": 1,
        "dead_tips": 0,
        "late_calls": 0,
        "rejected_calls": 0,
        "unique_tokens": 9,
        "expanded_tokens": 14,
        "saving": 1 - 9 / 14,
        "sampled_tokens": 4,
        "trained_tokens": 3,
        "excluded_tokens": {"no-logprob": 1},
        "trajectories": 1,
        "roles": {"main": 2},
        "branches": {"start": 1, "edit": 1},
        "assessment": "valid",
        "reward": 0.5,
    }
    assert summary["executions"][2]["calls"] == 0
    totals = summary["totals"]
    assert {key: totals[key] for key in ("executions", "calls", "leaves", "rewarded", "mean_reward")} == {
        "executions": 3, "calls": 4, "leaves": 3, "rewarded": 1, "mean_reward": 0.5,
    }  # fmt: skip
    assert (totals["unique_tokens"], totals["expanded_tokens"], totals["saving"]) == (11, 16, 1 - 11 / 16)
    assert totals["roles"] == {"main": 3}
    assert json.loads(json.dumps(summary)) == summary


def test_an_unresolved_execution_trains_nothing(run):
    row = summary_of(run)["executions"][1]
    assert (row["assessment"], row["reward"]) == ("unresolved", None)
    assert (row["trajectories"], row["trained_tokens"], row["excluded_tokens"]) == (0, 0, {"unresolved": 1})


@pytest.mark.parametrize(
    ("require_reward", "excluded"), [(True, {"unassessed": 1}), (False, {})], ids=["needed", "not needed"]
)
def test_an_unassessed_execution_trains_only_where_no_reward_is_needed(require_reward, excluded):
    recorded = executions([Call("a", "x", [1], [2], logprobs=[-1.0])])["x"]
    row = inspect(recorded, require_reward=require_reward).summary()
    assert row["excluded_tokens"] == excluded and row["trained_tokens"] == 1 - len(excluded)


@pytest.mark.parametrize("j_max", [1, 2, None])
def test_an_inspection_shows_what_sampling_trains(run, j_max):
    with RunLogWriter(run) as log:
        log.append(Call("p", "p", [1], [2, 3], logprobs=[-1.0, -1.0]))
        log.append(Assessment("p", "placeholder"))
        log.append(Call("late", "x", [1], [2], logprobs=[-1.0]))
        log.append(Call("b", "y", [1], [2], parent="nowhere", logprobs=[-1.0]))
        log.append(Call("u", "u", [1], [2], logprobs=[-1.0]))
    ledger = Ledger()
    with RunLogIndex(run) as index:
        samples = list(sample_run(index, j_max=j_max, seed=3, ledger=ledger))
    totals = summary_of(run, j_max=j_max, seed=3, require_reward=True)["totals"]
    assert totals["sampled_tokens"] == ledger.sampled and totals["trained_tokens"] == ledger.trained
    assert totals["excluded_tokens"] == dict(ledger.excluded)
    assert totals["trajectories"] == len(samples)
    assert set(ledger.excluded) >= {
        "late",
        "rejected",
        "unresolved",
        "unassessed",
        "placeholder",
        "no-logprob",
    }


def test_calls_that_join_no_tree_are_counted_apart():
    recorded = executions(
        [
            Call("a", "x", [1], [2], logprobs=[-1.0]),
            Call("a", "x", [1], [2, 3], logprobs=[-1.0, -1.0]),
            Execution("x", "closed"),
            Call("b", "x", [4], [5, 6, 7], logprobs=[-1.0] * 3),
        ]
    )["x"]
    row = inspect(recorded).summary()
    assert (row["calls"], row["rejected_calls"], row["late_calls"]) == (1, 1, 1)
    assert (row["sampled_tokens"], row["excluded_tokens"]) == (6, {"late": 3, "rejected": 2})


@given(executions_of_any_shape(), st.sampled_from([0, 1, 2, 5, None]), st.integers(0, 3))
def test_the_fates_of_calls_are_the_account(recorded, j_max, seed):
    found = inspect(recorded, j_max=j_max, seed=seed)
    fates = Counter()
    for node in found.tree.nodes:
        fates[found.fates[node.index]] += node.trainable_count
    assert fates["trained"] == found.ledger.trained == sum(map(found.trained, found.tree.nodes))
    provenance = {"error", "no-logprob", "no-context"}
    assert {reason: count for reason, count in fates.items() if count and reason != "trained"} == {
        reason: count for reason, count in found.ledger.excluded.items() if count and reason not in provenance
    }


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
