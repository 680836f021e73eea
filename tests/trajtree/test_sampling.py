"""Draws against the rule of paper section 5.3, written out once more here token by token and with no shortcut."""

import math
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
from gyre_trajtree import (
    ROLES,
    RoleDecision,
    TrajtreeError,
    Tree,
    dead_tips,
    draw,
    execution_rng,
    sample_trajectories,
)
from hypothesis import given
from hypothesis import strategies as st
from trajtree_steps import as_roles, record, steps

J_MAX = [1, 2, 5, None]


class Reference:
    """The rule by its definition: sets of unmasked tokens, (call id, place in its output)."""

    def __init__(self, tree, roles, train_auxiliary=False):
        dead = dead_tips(tree)
        self.unmasked = frozenset(
            (node.id, i)
            for node in tree.nodes
            for i, logprob in enumerate(node.call.logprobs.tolist())
            if math.isfinite(logprob) and node.call.finish != "error" and node.id not in dead
        )
        self.paths = {}
        """{last live call: (role, calls of the path)}"""
        for leaf in tree.leaves():
            path = [node.id for node in tree.path(leaf)]
            if leaf.id in dead:
                path.pop()
                if not path or any(child.id not in dead for child in tree[path[-1]].children):
                    continue
            if train_auxiliary or roles[leaf.id].role != "auxiliary":
                self.paths.setdefault(path[-1], (roles[leaf.id].role, frozenset(path)))

    def choices(self, unmasked):
        """{last call: (probability, targets)} of the next draw; empty when nothing is left."""
        for role in ROLES:
            open_ = {
                end: frozenset(token for token in unmasked if token[0] in calls)
                for end, (of, calls) in self.paths.items()
                if of == role
            }
            total = sum(len(targets) for targets in open_.values())
            if total:
                return {end: (len(t) / total, t) for end, t in open_.items() if t}
        return {}

    def distribution(self, j_max, unmasked=None):
        """{sequence of last calls: probability}"""
        unmasked = self.unmasked if unmasked is None else unmasked
        choices = self.choices(unmasked) if j_max is None or j_max > 0 else {}
        if not choices:
            return {(): 1.0}
        left = None if j_max is None else j_max - 1
        return {
            (end, *rest): p * q
            for end, (p, targets) in choices.items()
            for rest, q in self.distribution(left, unmasked - targets).items()
        }


def targets_of(drawn):
    """{(call id, place in its output)} that train in one draw."""
    return frozenset(
        (node.id, int(i))
        for node, trains in zip(drawn.path, drawn.targets, strict=True)
        if trains
        for i in np.flatnonzero(node.trainable)
    )


@given(
    steps,
    st.data(),
    st.sampled_from([0, *J_MAX]),
    st.booleans(),
    st.integers(0, 9),
)
def test_every_draw_follows_the_rule(new_recorder, steps, data, j_max, auxiliary, seed):
    """Highest class with anything left, targets exactly what is unmasked then, masks that only grow, the right end."""
    tree = record(new_recorder(), steps)
    roles = {leaf.id: RoleDecision(data.draw(st.sampled_from(ROLES)), 1.0, ()) for leaf in tree.leaves()}
    rule = Reference(tree, roles, auxiliary)
    unmasked = rule.unmasked
    drawn = draw(tree, roles, j_max, execution_rng(seed, "x"), auxiliary)
    for each in drawn:
        choices = rule.choices(unmasked)
        end = each.path[-1]
        assert list(each.path) == tree.path(end)
        assert end.id in choices and each.role == rule.paths[end.id][0]
        assert targets_of(each) == choices[end.id][1]
        before = {last: len(t) for last, (_, t) in choices.items()}
        unmasked -= targets_of(each)
        after = {last: len(t) for last, (_, t) in rule.choices(unmasked).items() if last in before}
        assert all(after[last] <= before[last] for last in after) and end.id not in after
    assert len(drawn) == j_max or (not rule.choices(unmasked) and (j_max is None or len(drawn) < j_max))


@given(steps, st.sampled_from(J_MAX), st.integers(0, 9))
def test_targets_are_disjoint(new_recorder, steps, j_max, seed):
    tree = record(new_recorder(), steps)
    roles = {leaf.id: RoleDecision("main", 1.0, ()) for leaf in tree.leaves()}
    drawn = draw(tree, roles, j_max, execution_rng(seed, "x"))
    counts = Counter(token for each in drawn for token in targets_of(each))
    assert set(counts.values()) <= {1}
    if j_max is None:
        assert counts.keys() == Reference(tree, roles).unmasked


def lone_roots(recorder):
    for name, weight in (("a", 1), ("b", 2), ("c", 5)):
        recorder.call(name, out=recorder.fresh(weight))
    return as_roles(a="main", b="main", c="main")


def fork_and_far(recorder):
    """A long shared prefix: whichever leaf of the fork goes first takes it, and the other shrinks."""
    recorder.call("a", out=recorder.fresh(10))
    recorder.call("b", "a", out=recorder.fresh(3))
    recorder.call("c", "a", out=recorder.fresh(5))
    recorder.call("far", out=recorder.fresh(4))
    return as_roles(b="main", c="main", far="main")


def forks_in_forks(recorder):
    recorder.call("a", out=recorder.fresh(2))
    recorder.call("b", "a", out=recorder.fresh(6))
    recorder.call("c", "a", out=recorder.fresh(1))
    recorder.call("d", "b", out=recorder.fresh(3))
    recorder.call("e", "b", out=recorder.fresh(3))
    return as_roles(c="main", d="main", e="main")


def all_classes(recorder):
    recorder.call("main", out=recorder.fresh(4))
    recorder.call("main-2", "main", out=recorder.fresh(2))
    recorder.call("summary", "main", out=recorder.fresh(3))
    recorder.call("sub", out=recorder.fresh(2))
    recorder.call("sub-2", "sub", out=recorder.fresh(2))
    recorder.call("sub-3", "sub", out=recorder.fresh(6))
    recorder.call("recap", "sub", out=recorder.fresh(2))
    recorder.call("title", out=recorder.fresh(9))
    return as_roles(
        main_2="main",
        summary="main-summary",
        sub_2="sub-agent",
        sub_3="sub-agent",
        recap="sub-agent-summary",
        title="auxiliary",
    )


def lost_attempts(recorder):
    """Aborted and failed calls weigh nothing, nor do tokens without log-prob."""
    recorder.call("a", out=recorder.fresh(4), logprobs=[-1.0, None, -1.0, -1.0])
    recorder.call("cut", "a", new=[9], out=recorder.fresh(8), finish="abort")
    recorder.call("again", "a", new=[9], out=recorder.fresh(2), attempt_of="cut")
    recorder.call("b", out=recorder.fresh(3))
    recorder.call("lost", "b", out=recorder.fresh(8), finish="abort")
    recorder.call("moved", out=recorder.fresh(2), attempt_of="lost")
    recorder.call("broken", out=recorder.fresh(8), finish="error")
    return as_roles(cut="main", again="main", lost="main", moved="main", broken="main")


def chi_square(expected, counts, draws):
    """Pearson's statistic and its bound with a false alarm in a million runs; rare outcomes share one cell."""
    common = {outcome: p for outcome, p in expected.items() if p * draws >= 5}
    cells = [(p * draws, counts[outcome]) for outcome, p in common.items()]
    if rest := draws * (1 - sum(common.values())):
        cells.append((max(rest, 1e-9), draws - sum(counts[outcome] for outcome in common)))
    cells = [cell for cell in cells if cell[0] > 1e-6 or cell[1]]
    freedom = max(len(cells) - 1, 1)
    z = NormalDist().inv_cdf(1 - 1e-6)  # Wilson and Hilferty's quantile of the chi-square distribution
    bound = freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((count - mean) ** 2 / mean for mean, count in cells), bound


@pytest.mark.parametrize("j_max", J_MAX)
@pytest.mark.parametrize("shape", [lone_roots, fork_and_far, forks_in_forks, all_classes, lost_attempts])
def test_sequences_of_draws_have_exactly_the_enumerated_distribution(recorder, shape, j_max):
    roles = shape(recorder)
    tree = recorder.tree()
    expected = Reference(tree, roles, train_auxiliary=True).distribution(j_max)
    assert math.isclose(sum(expected.values()), 1.0)
    rng, draws = np.random.default_rng(20), 3000
    counts = Counter(
        tuple(each.path[-1].id for each in draw(tree, roles, j_max, rng, train_auxiliary=True))
        for _ in range(draws)
    )
    assert counts.keys() <= expected.keys()
    statistic, bound = chi_square(expected, counts, draws)
    assert statistic < bound
    if len(expected) > 1:  # the bound tells even odds from the right ones
        statistic, bound = chi_square(dict.fromkeys(expected, 1 / len(expected)), counts, draws)
        assert statistic > bound


def appendix_c(recorder):
    """Paper appendix C.4: 2 main, 1 main-summary, 6 sub-agent and 1 sub-agent-summary leaves."""
    recorder.call("main-prefix", out=recorder.fresh(40))
    recorder.call("main-1", "main-prefix", out=recorder.fresh(5))
    recorder.call("main-sum", "main-prefix", out=recorder.fresh(6))
    recorder.call("main-2", out=recorder.fresh(30))
    recorder.call("catalog-prefix", out=recorder.fresh(50))
    recorder.call("catalog-1", "catalog-prefix", out=recorder.fresh(4))
    recorder.call("catalog-sum", "catalog-prefix", out=recorder.fresh(6))
    recorder.call("catalog-2", out=recorder.fresh(20))
    for name, weight in (("fdw-1", 5), ("fdw-2", 20), ("dbt", 12), ("tests", 9)):
        recorder.call(name, out=recorder.fresh(weight))
    subs = dict.fromkeys(("catalog_1", "catalog_2", "fdw_1", "fdw_2", "dbt", "tests"), "sub-agent")
    return as_roles(
        main_1="main", main_2="main", main_sum="main-summary", catalog_sum="sub-agent-summary", **subs
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_papers_example_admits_both_mains_the_summary_and_one_sub_agent(recorder, seed):
    roles = appendix_c(recorder)
    assert Counter(decision.role for decision in roles.values()) == {
        "main": 2,
        "main-summary": 1,
        "sub-agent": 6,
        "sub-agent-summary": 1,
    }
    drawn = draw(recorder.tree(), roles, 4, np.random.default_rng(seed))
    assert [each.role for each in drawn] == ["main", "main", "main-summary", "sub-agent"]
    by_end = {each.path[-1].id: len(targets_of(each)) for each in drawn}
    assert by_end["main-1"] == 45 and by_end["main-2"] == 30
    assert by_end["main-sum"] == 6  # the shared prefix trained with main-1 and stays here as context


def test_all_trajectories_of_the_papers_example_train_every_token_once(recorder):
    roles = appendix_c(recorder)
    drawn = draw(recorder.tree(), roles, None, np.random.default_rng(0))
    assert len(drawn) == 10
    assert sum(len(targets_of(each)) for each in drawn) == sum(
        len(call.output_ids) for call in recorder.calls
    )


def test_auxiliary_calls_are_drawn_last_and_only_when_asked_for(recorder, rng):
    roles = all_classes(recorder)
    tree = recorder.tree()
    assert "title" not in {each.path[-1].id for each in draw(tree, roles, None, rng)}
    drawn = draw(tree, roles, None, rng, train_auxiliary=True)
    assert drawn[-1].path[-1].id == "title" and drawn[-1].role == "auxiliary"


def test_an_abandoned_attempt_is_never_drawn_and_what_was_before_it_still_trains(recorder, rng):
    roles = lost_attempts(recorder)
    drawn = draw(recorder.tree(), roles, None, rng)
    assert {each.path[-1].id: len(targets_of(each)) for each in drawn} == {"again": 5, "b": 3, "moved": 2}


def test_an_abort_that_ended_the_execution_is_trained(recorder, rng):
    recorder.call("a", out=[1, 2], finish="abort")
    (drawn,) = draw(recorder.tree(), as_roles(a="main"), 5, rng)
    assert len(targets_of(drawn)) == 2


def test_one_seed_and_execution_draw_the_same_and_others_do_not(recorder):
    roles = appendix_c(recorder)
    tree = recorder.tree()

    def ends(seed, execution):
        return [each.path[-1].id for each in draw(tree, roles, None, execution_rng(seed, execution))]

    assert ends(3, "x") == ends(3, "x")
    assert len({tuple(ends(seed, name)) for seed in range(3) for name in "xyz"}) > 3


def test_trajectories_are_the_flat_rows_of_the_draws(recorder):
    roles = appendix_c(recorder)
    tree = recorder.tree()
    drawn = draw(tree, roles, 5, np.random.default_rng(1))
    rows = sample_trajectories(tree, roles, 5, np.random.default_rng(1))
    assert [(row.leaf, row.role) for row in rows] == [(each.path[-1].id, each.role) for each in drawn]
    assert [int(row.targets.sum()) for row in rows] == [len(targets_of(each)) for each in drawn]


def test_misuse_is_refused(recorder, rng):
    recorder.call("a")
    tree = recorder.tree()
    with pytest.raises(TrajtreeError, match="j_max"):
        draw(tree, as_roles(a="main"), -1, rng)
    with pytest.raises(TrajtreeError, match="leaf a has no role"):
        draw(tree, {}, 1, rng)


def test_an_empty_tree_draws_nothing(rng):
    assert draw(Tree("x"), {}, None, rng) == []
