from collections import Counter

import numpy as np
import pytest
from gyre_trajtree import (
    REASONS,
    ROLES,
    AccountError,
    Call,
    Ledger,
    RoleDecision,
    Tree,
    account,
    draw,
    execution_rng,
    flat_row,
    sample_trajectories,
)
from hypothesis import given
from hypothesis import strategies as st
from trajtree_steps import as_roles, record, steps


@given(
    steps,
    st.data(),
    st.sampled_from([0, 1, 2, 5, None]),
    st.booleans(),
    st.integers(0, 9),
)
def test_sampled_tokens_are_trained_or_excluded_with_a_reason(
    new_recorder, steps, data, j_max, auxiliary, seed
):
    recorder = new_recorder()
    tree = record(recorder, steps)
    roles = {leaf.id: RoleDecision(data.draw(st.sampled_from(ROLES)), 1.0, ()) for leaf in tree.leaves()}
    drawn = draw(tree, roles, j_max, execution_rng(seed, "x"), auxiliary)
    rows = [flat_row("x", each) for each in drawn]
    tokens = account(tree, rows, roles)
    trained = Counter(
        token for row in rows for token in row.ids[row.targets].tolist()
    )  # outputs are fresh: each token names its place
    assert set(trained.values()) <= {1}
    assert tokens["trained"] == trained.total()
    assert tokens["sampled"] == sum(len(call.output_ids) for call in recorder.calls)
    assert tokens["sampled"] == tokens["trained"] + sum(tokens["excluded"].values())
    assert all(count > 0 for count in tokens["excluded"].values())
    assert tokens["excluded"].keys() <= REASONS.keys()
    assert tokens == account(tree, drawn, roles)  # draws and the rows made of them agree
    if j_max is None:
        assert "over-j-max" not in tokens["excluded"]
    if auxiliary and j_max is None:
        assert "auxiliary" not in tokens["excluded"]


@given(
    steps,
    st.integers(0, 9),
    st.sampled_from(
        ["twice", "prompt", "untrainable", "token", "moved", "longer", "other execution", "unknown leaf"]
    ),
    st.data(),
)
def test_a_tampered_trajectory_is_caught(new_recorder, steps, seed, harm, data):
    recorder = new_recorder()
    tree = record(recorder, steps)
    recorder.call("certain", new=[3, 4], out=recorder.fresh(2))
    tree.add(recorder.calls[-1])
    rows = sample_trajectories(tree, {n.id: RoleDecision("main", 1.0, ()) for n in tree.leaves()}, None,
                               execution_rng(seed, "x"))  # fmt: skip
    row = data.draw(st.sampled_from(rows))
    if harm == "twice":
        rows.append(row)
    elif harm == "prompt":
        row.targets[0] = True
    elif harm == "untrainable":
        outside = np.flatnonzero(~row.targets)
        row.targets[data.draw(st.sampled_from(outside.tolist()))] = True
    elif harm == "token":
        row.ids[data.draw(st.integers(0, len(row.ids) - 1))] += 1
    elif harm == "moved":  # a sampled turn under a cleaner context
        row.ids, row.targets = row.ids[1:], row.targets[1:]
    elif harm == "longer":
        more = data.draw(st.integers(1, 3)) + tree[row.leaf].end - len(row.ids)
        row.ids, row.targets = np.pad(row.ids, (0, more)), np.pad(row.targets, (0, more))
    elif harm == "other execution":
        row.execution = "y"
    else:
        row.leaf = "nowhere"
    with pytest.raises(AccountError):
        account(tree, rows)


def test_a_draw_of_another_tree_or_twice_the_same_is_caught(new_recorder):
    trees = []
    for _ in range(2):
        recorder = new_recorder()
        recorder.call("a")
        trees.append(recorder.tree())
    roles = as_roles(a="main")
    (drawn,) = draw(trees[0], roles, 1, execution_rng(0, "x"))
    with pytest.raises(AccountError, match="no call of execution"):
        account(trees[1], [drawn], roles)
    with pytest.raises(AccountError, match="twice"):
        account(trees[0], [drawn, drawn], roles)


def compacted_run(recorder):
    """Main, its summary of a shared prefix, what continues from it, a sub-agent and a title."""
    recorder.call("title", out=recorder.fresh(2))
    recorder.call("a", out=recorder.fresh(5))
    recorder.call("b", "a", out=recorder.fresh(4))
    recorder.call("summary", "a", out=recorder.fresh(3))
    recorder.call("rest", out=recorder.fresh(6))
    recorder.call("sub", out=recorder.fresh(7))
    roles = as_roles(title="auxiliary", b="main", summary="main-summary", rest="main", sub="sub-agent")
    return recorder.tree(), roles


def test_what_j_max_and_roles_leave_out_is_named(recorder, rng):
    tree, roles = compacted_run(recorder)
    assert account(tree, draw(tree, roles, 5, rng), roles) == {
        "sampled": 27,
        "trained": 25,
        "excluded": {"auxiliary": 2},
    }
    assert account(tree, draw(tree, roles, 2, rng), roles)["excluded"] == {"auxiliary": 2, "over-j-max": 10}
    assert account(tree, [], roles, unselected="unresolved")["excluded"] == {"auxiliary": 2, "unresolved": 25}
    assert account(tree, draw(tree, roles, None, rng, train_auxiliary=True), roles)["excluded"] == {}


def test_failed_retried_and_logprobless_tokens_are_named(recorder, rng):
    recorder.call("a", out=[1, 2], logprobs=[-1.0, None])
    recorder.call("cut", "a", new=[9], out=[3], finish="abort")
    recorder.call("again", "a", new=[9], out=[4], attempt_of="cut")
    recorder.call("failed", "again", out=[5, 6], finish="error")
    recorder.call("whole", "again", new=[8], out=[7, 7, 7])
    recorder.call("repeat", "again", new=[8], out=[7], attempt_of="whole")
    tree, roles = recorder.tree(), as_roles(cut="main", failed="main", whole="main", repeat="main")
    assert account(tree, draw(tree, roles, 5, rng), roles) == {
        "sampled": 10,
        "trained": 3,
        "excluded": {"aborted": 1, "error": 2, "no-logprob": 1, "retried": 3},
    }


def test_a_token_that_nothing_precedes_is_named():
    calls = [
        Call("empty", "x", [], []),
        Call("a", "x", [], [5, 6, 7], parent="empty", logprobs=[-1, -1, None]),
    ]
    tree = Tree.from_calls(calls)
    (row,) = sample_trajectories(tree, as_roles(a="main"), 1, execution_rng(0, "x"))
    assert row.targets.tolist() == [False, True]
    assert account(tree, [row])["excluded"] == {"no-context": 1, "no-logprob": 1}


def test_an_empty_tree_has_an_empty_account():
    assert account(Tree("x"), []) == {"sampled": 0, "trained": 0, "excluded": {}}


def test_a_ledger_sums_executions_and_calls_outside_their_trees(recorder, rng):
    tree, roles = compacted_run(recorder)
    ledger = Ledger()
    ledger.add(account(tree, draw(tree, roles, 2, rng), roles))
    ledger.add(account(tree, [], roles, unselected="unresolved"))
    ledger.exclude([Call("z", "x", [1], [2, 3])], "late")
    ledger.exclude([], "rejected")
    ledger.check()
    assert (ledger.sampled, ledger.trained) == (56, 15)
    assert ledger.excluded == {"auxiliary": 4, "over-j-max": 10, "unresolved": 25, "late": 2}


def test_a_ledger_that_lost_a_token_or_does_not_know_the_reason_is_refused():
    with pytest.raises(AccountError, match="3 sampled tokens, but 1 trained and 1 excluded"):
        Ledger(sampled=3, trained=1, excluded=Counter(late=1)).check()
    with pytest.raises(AccountError, match="lost"):
        Ledger(sampled=2, trained=1, excluded=Counter(lost=1)).check()


def test_every_reason_has_a_meaning_of_one_line():
    assert all(meaning and "\n" not in meaning for meaning in REASONS.values())
