import weakref
from collections import Counter

import gyre_trajtree.samples as samples_module
import numpy as np
import pytest
from gyre_cli.admission import Admission, History
from gyre_trajtree import (
    Assessment,
    Execution,
    Ledger,
    RewardError,
    RunLogIndex,
    TrajtreeError,
    Tree,
    executions,
    infer_roles,
    sample_run,
)
from hypothesis import given
from hypothesis import strategies as st
from sampled_runs import call, hand_written_run, opened, random_runs, recorded, write_log


def samples_of(records, **settings):
    ledger = Ledger()
    return list(sample_run(recorded(records), ledger=ledger, **settings)), ledger


def test_the_account_of_a_run_is_that_worked_out_by_hand(tmp_path):
    ledger = Ledger()
    with RunLogIndex(write_log(tmp_path / "run.jsonl", hand_written_run())) as index:
        samples = list(sample_run(index, ledger=ledger))
    assert [(s.execution, s.leaf, s.role) for s in samples] == [
        ("x1", "x1-b", "main"),
        ("y1", "y1-a", "main"),
        ("y2", "y2-a", "main"),
    ]
    assert (ledger.sampled, ledger.trained) == (3 + 5 + 2 + 4 + 6 + 3 + 2, 5 + 2 + 2)
    assert ledger.excluded == {"auxiliary": 5, "late": 4, "unresolved": 6, "no-logprob": 1}
    assert ledger.roles == {"main": 3}


def test_a_sample_carries_its_execution_and_its_row():
    first = samples_of(hand_written_run())[0][0]
    assert (first.group, first.task, first.harness) == ("g1", "task-g1", "by-hand")
    row = first.trajectory
    assert row.ids.tolist() == [1, 2, 3, 11, 12, 13, 4, 5, 14, 15]
    assert row.targets.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2
    assert row.versions.tolist() == [-1] * 3 + [3] * 3 + [-1] * 2 + [4] * 2
    np.testing.assert_array_equal(row.logprobs[row.targets], np.float32([-0.1, -0.2, -0.3, -0.4, -0.5]))


def test_a_placeholder_counts_in_the_baseline_and_an_unresolved_execution_does_not():
    samples, _ = samples_of(hand_written_run())
    found = {s.execution: (s.reward, s.advantage) for s in samples}
    assert found == {"x1": (1.0, 0.5), "y1": (0.5, 0.25), "y2": (0.0, -0.25)}


def test_advantages_may_be_divided_by_the_deviation_of_the_group():
    samples, _ = samples_of(hand_written_run(), normalise="mean_std")
    assert {s.execution: s.advantage for s in samples} == {"x1": 1.0, "y1": 1.0, "y2": -1.0}


def test_auxiliary_leaves_train_when_asked():
    samples, ledger = samples_of(hand_written_run(), train_auxiliary=True)
    assert [s.leaf for s in samples][:2] == ["x1-b", "x1-title"]
    assert ledger.trained == 5 + 5 + 2 + 2 and "auxiliary" not in ledger.excluded


def test_an_auxiliary_leaf_that_could_train_is_left_out_for_the_limit():
    _, ledger = samples_of(hand_written_run(), train_auxiliary=True, j_max=1)
    assert ledger.excluded == {"over-j-max": 5, "late": 4, "unresolved": 6, "no-logprob": 1}


def test_no_trajectory_is_drawn_at_a_limit_of_zero():
    samples, ledger = samples_of(hand_written_run(), j_max=0)
    assert not samples and ledger.trained == 0 and ledger.excluded["over-j-max"] == 9


def test_without_any_assessment_every_execution_gives_samples():
    records = [each for each in hand_written_run() if not isinstance(each, Assessment)]
    samples, ledger = samples_of(records)
    assert [s.execution for s in samples] == ["x1", "x2", "y1", "y2"]
    assert {(s.reward, s.advantage) for s in samples} == {(None, None)}
    assert ledger.trained == 5 + 6 + 2 + 2


def test_an_execution_that_was_never_assessed_is_left_out_when_others_were():
    samples, ledger = samples_of([*hand_written_run(), opened("z", "g2"), call("z-a", "z", [1], [51])])
    assert "z" not in {s.execution for s in samples}
    assert ledger.excluded["unassessed"] == 1


def test_rewards_may_be_left_aside():
    samples, ledger = samples_of(hand_written_run(), require_reward=False)
    assert {s.execution: s.advantage for s in samples} == {"x1": 0.5, "x2": None, "y1": 0.25, "y2": -0.25}
    assert "unresolved" not in ledger.excluded


def test_rewards_may_be_required_of_a_log_without_assessments():
    records = [each for each in hand_written_run() if not isinstance(each, Assessment)]
    samples, ledger = samples_of(records, require_reward=True)
    assert not samples and ledger.excluded["unassessed"] == 15


def test_an_execution_without_a_group_has_no_advantage():
    samples, _ = samples_of([call("z-a", "z", [1], [51]), Assessment("z", "valid", 1.0)])
    assert [(s.group, s.reward, s.advantage) for s in samples] == [(None, 1.0, None)]


@pytest.mark.parametrize("require_reward", [None, False])
def test_a_placeholder_has_no_target_even_where_calls_were_recorded(require_reward):
    records = [
        opened("p", "g"),
        call("p-a", "p", [1], [61, 62]),
        Assessment("p", "placeholder"),
        opened("q", "g"),
        call("q-a", "q", [1], [63]),
        Assessment("q", "valid", 1.0),
    ]
    samples, ledger = samples_of(records, require_reward=require_reward)
    assert [(s.execution, s.advantage) for s in samples] == [("q", 0.5)]
    assert ledger.trained == 1 and ledger.excluded == {"placeholder": 2}


def test_calls_that_join_no_tree_are_accounted_for_and_the_rest_trains():
    records = [
        call("a", "x", [1], [81]),
        call("b", "x", [2], [82, 83], parent="nobody"),
        call("c", "x", [3], [84], parent="b"),
        call("a", "x", [1], [85]),
    ]
    samples, ledger = samples_of(records)
    assert [s.leaf for s in samples] == ["a"]
    assert (ledger.trained, ledger.excluded) == (1, {"rejected": 4})


def test_an_execution_whose_calls_all_came_late_gives_no_sample():
    samples, ledger = samples_of([Execution("x", "closed"), call("a", "x", [1], [81])])
    assert not samples and ledger.excluded == {"late": 1}


def test_samples_of_a_finished_run_are_those_that_training_drew(tmp_path):
    records = []
    for number in range(4):
        name = f"g~{number}"
        records.append(opened(name, "g"))
        records.append(call(f"{name}-r", name, [1, 2], [100, 101, 102]))
        for branch in range(9):
            records.append(
                call(f"{name}-{branch}", name, [3 + branch], list(range(branch + 1)), parent=f"{name}-r")
            )
        records += [Execution(name, "closed"), Assessment(name, "valid", float(number))]
    path = write_log(tmp_path / "run.jsonl", records)
    trained = Admission(History(path), 3, "mean", seed=7)
    group = trained.admit([f"g~{number}" for number in range(4)])
    with RunLogIndex(path) as index:
        ledger = Ledger()
        samples = list(sample_run(index, j_max=3, seed=7, ledger=ledger))
    expected = [
        (execution.advantage, row.ids.tolist(), row.targets.tolist())
        for execution in group.executions
        for row in execution.rows
    ]
    found = [(s.advantage, s.trajectory.ids.tolist(), s.trajectory.targets.tolist()) for s in samples]
    assert found == expected and len(found) == 4 * 3
    assert ledger == trained.close()


def test_the_draws_of_an_execution_depend_on_its_id_and_the_seed_alone():
    run = [call("r", "x", [1], [100]), *(call(f"b{i}", "x", [i], [200 + i], parent="r") for i in range(20))]
    alone = [s.leaf for s in samples_of(run, j_max=2, seed=5)[0]]
    beside = [s.leaf for s in samples_of([call("a", "w", [1], [9]), *run], j_max=2, seed=5)[0][1:]]
    others = {tuple(s.leaf for s in samples_of(run, j_max=2, seed=seed)[0]) for seed in range(6, 16)}
    assert alone == beside and others != {tuple(alone)}


def test_a_task_prompt_is_asked_for_by_execution():
    asked = []
    samples_of(hand_written_run(), prompts=lambda execution: asked.append(execution))
    assert asked == ["x1", "x2", "y1", "y2"]


def test_wrong_settings_are_refused_before_or_at_the_first_sample():
    with pytest.raises(RewardError, match="normalise"):
        sample_run(recorded(hand_written_run()), normalise="rank")
    with pytest.raises(TrajtreeError, match="j_max"):
        next(sample_run(recorded(hand_written_run()), j_max=-1))


@given(random_runs(), st.sampled_from([0, 1, 2, None]), st.booleans(), st.sampled_from([None, True, False]))
def test_every_sampled_token_of_a_run_is_trained_once_or_excluded(records, j_max, auxiliary, require_reward):
    samples, ledger = samples_of(
        records, j_max=j_max, train_auxiliary=auxiliary, require_reward=require_reward
    )
    trained = Counter(token for s in samples for token in s.trajectory.ids[s.trajectory.targets].tolist())
    assert set(trained.values()) <= {1}
    assert trained.total() == ledger.trained
    assert ledger.sampled == sum(len(each.output_ids) for each in records if hasattr(each, "output_ids"))
    assert ledger.sampled == ledger.trained + ledger.excluded.total()
    assert ledger.roles.total() == len(samples)
    if j_max is not None:
        assert all(count <= j_max for count in Counter(s.execution for s in samples).values())


@given(random_runs())
def test_a_run_without_limit_trains_all_that_roles_and_rewards_allow(records):
    samples, _ = samples_of(records, j_max=None, require_reward=False)
    found = {token for s in samples for token in s.trajectory.ids[s.trajectory.targets].tolist()}
    for execution in executions(records).values():
        if not execution.calls or (execution.designated and execution.designated.status == "placeholder"):
            continue
        tree = Tree.from_calls(execution.calls)
        roles = infer_roles(tree)
        for leaf in tree.leaves():
            if roles[leaf.id].role != "auxiliary" and leaf.call.finish != "abort":
                path = tree.path(leaf)
                assert found >= {
                    token for node in path for token in node.call.output_ids[node.trainable].tolist()
                }


def test_memory_holds_one_execution_and_a_bounded_number_of_tokens_before_it(monkeypatch):
    monkeypatch.setattr(samples_module, "GARBAGE_TOKENS", 250)
    held = []

    class Index:
        """Builds each execution of 100 tokens anew, and looks how many are still held."""

        def __iter__(self):
            made = []
            for number in range(12):
                fresh = [call(f"c{number}", f"e{number}", [1] * 50, list(range(50)))]
                made.append(weakref.ref(fresh[0].input_ids))
                held.append(sum(each() is not None for each in made))
                execution = recorded(fresh)[0]
                del fresh
                yield execution
                del execution

    assert sum(len(sample.trajectory.ids) for sample in sample_run(Index())) == 12 * 100
    assert held[:12] == [1] * 12, "rewards are read from one execution after the other"
    assert max(held) <= 1 + 3
