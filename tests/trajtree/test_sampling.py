from collections import Counter

import numpy as np
import pytest
from gyre_trajtree import ROLES, AccountError, RoleDecision, account, sample_trajectories
from hypothesis import given
from hypothesis import strategies as st

step = st.fixed_dictionaries(
    {
        "target": st.integers(-1, 20),
        "logprobs": st.lists(st.sampled_from([-0.5, -1.0, None]), max_size=4),
        "finish": st.sampled_from(["stop", "stop", "length", "abort", "error"]),
        "new": st.sampled_from([[1], [2], []]),
        "retries": st.booleans(),
    }
)


def as_roles(**given):
    return {leaf.replace("_", "-"): RoleDecision(role, 1.0, ()) for leaf, role in given.items()}


def record(recorder, steps):
    for i, s in enumerate(steps):
        earlier = f"c{s['target'] % i}" if s["target"] >= 0 and i else None
        parent = recorder.calls[int(earlier[1:])].parent if earlier and s["retries"] else earlier
        recorder.call(
            f"c{i}",
            parent,
            s["new"],
            recorder.fresh(len(s["logprobs"])),
            s["logprobs"],
            finish=s["finish"],
            attempt_of=earlier if s["retries"] else None,
            versions=[[5, 0, len(s["logprobs"])]],
        )
    return recorder.tree()


@given(st.lists(step, min_size=1, max_size=12), st.data(), st.integers(0, 6), st.booleans())
def test_targets_are_disjoint_sampled_tokens_and_every_token_is_accounted_for(
    new_recorder, steps, data, j_max, auxiliary
):
    recorder = new_recorder()
    tree = record(recorder, steps)
    roles = {leaf.id: RoleDecision(data.draw(st.sampled_from(ROLES)), 1.0, ()) for leaf in tree.leaves()}
    drawn = sample_trajectories(tree, roles, j_max, np.random.default_rng(0), auxiliary)
    assert len(drawn) <= j_max
    trained = Counter()
    for trajectory in drawn:
        prompt, output = recorder.seen[trajectory.leaf]
        length = len(trajectory.ids)
        assert trajectory.ids.tolist() == (prompt + output)[:length]
        assert trajectory.targets[-1]  # cut after the last target
        assert len(trajectory.targets) == len(trajectory.logprobs) == len(trajectory.versions) == length
        assert np.isfinite(trajectory.logprobs[trajectory.targets]).all()
        assert (trajectory.versions[trajectory.targets] == 5).all()
        trained.update(trajectory.ids[trajectory.targets].tolist())  # fresh tokens: each names its position
    assert set(trained.values()) <= {1}
    balance = account(tree, drawn, roles)
    assert balance["trained"] == trained.total()
    assert balance["sampled"] == sum(len(call.output_ids) for call in recorder.calls)
    assert balance["sampled"] == balance["trained"] + sum(balance["excluded"].values())
    assert all(count > 0 for count in balance["excluded"].values())
    priorities = [ROLES.index(trajectory.role) for trajectory in drawn]
    assert priorities == sorted(priorities)
    if j_max > len(drawn):
        assert "over-j-max" not in balance["excluded"]


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


def test_classes_are_drawn_by_priority_and_a_shared_prefix_trains_once(recorder, rng):
    tree, roles = compacted_run(recorder)
    drawn = sample_trajectories(tree, roles, 5, rng)
    assert [t.role for t in drawn] == ["main", "main", "main-summary", "sub-agent"]
    by_leaf = {t.leaf: t for t in drawn}
    assert {leaf: int(t.targets.sum()) for leaf, t in by_leaf.items()} == {
        "b": 9,
        "rest": 6,
        "summary": 3,
        "sub": 7,
    }
    assert by_leaf["summary"].ids[:9].tolist() == by_leaf["b"].ids[:9].tolist()  # the prefix stays as context
    assert account(tree, drawn, roles) == {"sampled": 27, "trained": 25, "excluded": {"auxiliary": 2}}


def test_auxiliary_calls_train_last_and_only_when_asked_for(recorder, rng):
    tree, roles = compacted_run(recorder)
    drawn = sample_trajectories(tree, roles, 9, rng, train_auxiliary=True)
    assert [t.leaf for t in drawn][-1] == "title"
    assert account(tree, drawn, roles)["excluded"] == {}


def test_what_j_max_leaves_out_is_excluded_with_that_reason(recorder, rng):
    tree, roles = compacted_run(recorder)
    drawn = sample_trajectories(tree, roles, 2, rng)
    assert account(tree, drawn, roles)["excluded"] == {"auxiliary": 2, "over-j-max": 10}
    assert account(tree, [], roles, unselected="unresolved")["excluded"] == {"auxiliary": 2, "unresolved": 25}


def test_leaves_are_drawn_in_proportion_to_their_unmasked_tokens(recorder):
    recorder.call("big", out=recorder.fresh(6))
    recorder.call("small", out=recorder.fresh(2))
    tree, roles = recorder.tree(), as_roles(big="main", small="main")
    rng = np.random.default_rng(7)
    first = Counter(sample_trajectories(tree, roles, 1, rng)[0].leaf for _ in range(4000))
    assert 0.72 < first["big"] / 4000 < 0.78


def test_lowered_counts_reweight_the_next_draw(recorder):
    """After one leaf of a fork is drawn, the other weighs only its own tokens."""
    recorder.call("a", out=recorder.fresh(90))
    recorder.call("b", "a", out=recorder.fresh(5))
    recorder.call("c", "a", out=recorder.fresh(5))
    recorder.call("far", out=recorder.fresh(5))
    tree, roles = recorder.tree(), as_roles(b="main", c="main", far="main")
    rng = np.random.default_rng(7)
    seconds = Counter()
    for _ in range(4000):
        first, second = sample_trajectories(tree, roles, 2, rng)
        if first.leaf == "b":
            seconds[second.leaf] += 1
    assert 0.45 < seconds["far"] / seconds.total() < 0.55


def test_one_seed_draws_the_same(recorder):
    tree, roles = compacted_run(recorder)
    draws = [
        [t.leaf for t in sample_trajectories(tree, roles, 3, np.random.default_rng(11))] for _ in range(2)
    ]
    assert draws[0] == draws[1]


def test_failed_retried_and_logprobless_tokens_are_never_targets(recorder, rng):
    recorder.call("a", out=[1, 2], logprobs=[-1.0, None])
    recorder.call("cut", "a", new=[9], out=[3], finish="abort")
    recorder.call("again", "a", new=[9], out=[4], attempt_of="cut")
    recorder.call("failed", "again", out=[5, 6], finish="error")
    tree, roles = recorder.tree(), as_roles(cut="main", failed="main")
    (trajectory,) = sample_trajectories(tree, roles, 5, rng)
    assert trajectory.leaf == "failed"
    assert trajectory.ids[trajectory.targets].tolist() == [1, 4]
    assert trajectory.ids[-1] == 4
    assert account(tree, [trajectory], roles) == {
        "sampled": 6,
        "trained": 2,
        "excluded": {"aborted": 1, "error": 2, "no-logprob": 1},
    }


def test_a_path_whose_only_extension_was_abandoned_still_trains(recorder, rng):
    recorder.call("a", out=[1, 2])
    recorder.call("cut", "a", out=[3], finish="abort")
    recorder.call("moved", out=[4], attempt_of="cut")
    tree, roles = recorder.tree(), as_roles(cut="main", moved="main")
    drawn = sample_trajectories(tree, roles, 5, rng)
    assert {t.leaf for t in drawn} == {"a", "moved"}
    assert account(tree, drawn, roles)["excluded"] == {"aborted": 1}


def test_an_abort_that_ended_the_execution_is_trained(recorder, rng):
    recorder.call("a", out=[1, 2], finish="abort")
    tree = recorder.tree()
    (trajectory,) = sample_trajectories(tree, as_roles(a="main"), 5, rng)
    assert trajectory.targets.sum() == 2


def test_injected_assistant_text_is_context_only(recorder, rng):
    recorder.call("a", new=[1], out=[2])
    recorder.call("b", "a", new=[3, 4], out=[5], versions=[[9, 0, 1]])
    tree = recorder.tree()
    (trajectory,) = sample_trajectories(tree, as_roles(b="main"), 5, rng)
    assert trajectory.ids.tolist() == [1, 2, 3, 4, 5]
    assert trajectory.targets.tolist() == [False, True, False, False, True]
    assert np.isnan(trajectory.logprobs).tolist() == [True, False, True, True, False]
    assert trajectory.versions.tolist() == [-1, -1, -1, -1, 9]


def test_training_a_token_twice_is_caught(recorder, rng):
    tree, roles = compacted_run(recorder)
    drawn = sample_trajectories(tree, roles, 5, rng)
    with pytest.raises(AccountError, match="twice"):
        account(tree, [*drawn, drawn[0]], roles)


def test_training_a_prompt_token_is_caught(recorder, rng):
    tree, roles = compacted_run(recorder)
    drawn = sample_trajectories(tree, roles, 5, rng)
    drawn[0].targets[0] = True
    with pytest.raises(AccountError, match="outside"):
        account(tree, drawn, roles)
