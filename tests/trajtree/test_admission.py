import numpy as np
import pytest
from gyre_trajtree import (
    AccountError,
    Assessment,
    Call,
    Execution,
    Ledger,
    TrajtreeError,
    Tree,
    account,
    dead_tips,
    draw,
    execution_rng,
    executions,
    export,
    infer_roles,
    pack,
    sample_run,
    sample_trajectories,
)
from gyre_trajtree.admission import admit, refusal_of
from gyre_trajtree.roles import RoleDecision

TASK = "Build the inventory service described in spec.md and make its tests pass."


def call(name, prompt, output, **fields):
    return Call(name, "x", prompt, output, logprobs=[-0.1] * len(output), **fields)


def recorded(*records):
    (found,) = executions(records).values()
    return found


def two_conversations(prompt):
    """Without the task nothing tells which of two agents is the main one."""
    first = {"system": "S1", "tools": "T1", "first_user": "Warm up.", "opening": "Warm up."}
    second = {"system": "S2", "tools": "T2", "first_user": TASK, "opening": TASK}
    return recorded(
        Execution("x", "opened", prompt=prompt),
        call("warm", [1], [2], evidence=first),
        call("work", [3], [4], evidence=second),
    )


def test_the_recorded_task_prompt_decides_as_it_does_in_training():
    assert [d.path[-1].id for d in admit(two_conversations(TASK), j_max=1).draws] == ["work"]
    assert [d.path[-1].id for d in admit(two_conversations(None), j_max=1).draws] == ["warm"]
    given = admit(two_conversations(None), j_max=1, task_prompt=TASK)
    assert [d.path[-1].id for d in given.draws] == ["work"]


def test_every_token_of_an_execution_is_in_its_ledger():
    run = recorded(
        call("a", [1], [2, 3]),
        call("a", [1], [4]),
        Execution("x", "closed"),
        call("late", [1], [5, 6, 7]),
        Assessment("x", "valid", score=1.0),
    )
    found = admit(run, refusal=refusal_of(run, require_reward=True))
    assert (found.ledger.sampled, found.ledger.trained) == (6, 2)
    assert found.ledger.excluded == {"rejected": 1, "late": 3}
    found.ledger.check()


@pytest.mark.parametrize(
    ("status", "require_reward", "refusal"),
    [("valid", True, None), ("placeholder", False, "placeholder"), ("unresolved", True, "unresolved"),
     ("unresolved", False, None), (None, True, "unassessed"), (None, False, None)],
)  # fmt: skip
def test_why_an_execution_trains_nothing(status, require_reward, refusal):
    records = [call("a", [1], [2])]
    if status:
        records.append(Assessment("x", status, score=1.0 if status == "valid" else None))
    assert refusal_of(recorded(*records), require_reward) == refusal


def test_an_execution_without_calls_is_admitted_empty():
    found = admit(recorded(Execution("x", "opened")))
    assert not found.draws and found.ledger == Ledger()


def test_a_call_of_another_execution_never_names_the_tree():
    foreign = Call("f", "other", [1], [2])
    rejected = []
    tree = Tree.from_calls([foreign, call("a", [1], [2])], rejected, "x")
    assert [node.id for node in tree.nodes] == ["a"] and [each.call.id for each in rejected] == ["f"]


def test_an_aborted_attempt_is_given_up_only_for_one_that_answered():
    aborted = call("a", [1], [2], finish="abort")
    refused = call("e", [1], [], finish="error")
    answered = call("b", [1], [3])
    assert dead_tips(Tree.from_calls([aborted, refused])) == {}
    assert dead_tips(Tree.from_calls([aborted, refused, answered])) == {"a": "aborted"}


@pytest.mark.parametrize("target", ["a", "b"])
def test_only_an_earlier_call_can_be_repeated(target):
    tree = Tree.from_calls([call("a", [1], [2], attempt_of=target), call("b", [1], [3])])
    assert dead_tips(tree) == {}


def test_a_trajectory_with_other_log_probs_or_versions_is_caught():
    tree = Tree.from_calls([call("a", [1], [2, 3], versions=[[4, 0, 2]])])
    for name, value in (("logprobs", np.float32(-9)), ("versions", 5)):
        (row,) = sample_trajectories(tree, infer_roles(tree), 5, execution_rng(0, "x"))
        getattr(row, name)[1] = value
        with pytest.raises(AccountError, match="log-probs or versions"):
            account(tree, [row])


def test_bad_arguments_get_one_line(tmp_path):
    tree = Tree.from_calls([call("a", [1], [2])])
    with pytest.raises(TrajtreeError, match="seed"):
        execution_rng(-1, "x")
    with pytest.raises(TrajtreeError, match="unknown role"):
        draw(tree, {"a": RoleDecision("Main", 1.0, ())}, 5, execution_rng(0, "x"))
    with pytest.raises(TrajtreeError, match="twice"):
        sample_run(iter([recorded(call("a", [1], [2]))]))
    with pytest.raises(TrajtreeError, match="whole numbers"):
        pack([2.5], 3)
    samples = list(sample_run([recorded(call("a", [1], [2]))]))
    with pytest.raises(AccountError, match="twice"):
        export(samples * 2, "jsonl", tmp_path / "samples.jsonl")
    assert not list(tmp_path.iterdir())


def test_sizes_may_be_numpy_integers_of_any_kind():
    assert pack(np.array([5, 3, 0, 20], np.uint32), 10) == pack([5, 3, 0, 20], 10)


def test_a_call_does_not_change_with_the_arrays_it_was_made_of():
    ids, logprobs = np.array([1, 2], np.int32), np.array([-0.5], np.float32)
    made = Call("a", "x", ids, [3], logprobs=logprobs)
    ids[0], logprobs[0] = -9, np.inf
    assert made.input_ids.tolist() == [1, 2] and made.logprobs.tolist() == [-0.5]
