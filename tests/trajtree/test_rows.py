from collections import Counter

import numpy as np
import pytest
from gyre_trajtree import (
    ROLES,
    Call,
    Draw,
    RoleDecision,
    TrajtreeError,
    Tree,
    account,
    draw,
    execution_rng,
    flat_row,
    sample_trajectories,
    shared_rows,
)
from hypothesis import given
from hypothesis import strategies as st

few = st.integers(0, 2)
step = st.fixed_dictionaries(
    {
        "target": st.integers(-1, 20),
        "new": st.lists(few, max_size=4),
        "out": st.lists(few, max_size=4),
        "missing": st.booleans(),
        "finish": st.sampled_from(["stop", "stop", "stop", "abort", "error"]),
    }
)
steps = st.lists(step, min_size=1, max_size=14)


def record(recorder, steps):
    """Calls whose tokens are often equal, so that only structure keeps them apart; log-probs are all different."""
    number = 0
    for i, s in enumerate(steps):
        parent = f"c{s['target'] % i}" if s["target"] >= 0 and i else None
        logprobs = [-(number + j + 1.0) for j in range(len(s["out"]))]
        number += len(s["out"])
        if s["missing"] and logprobs:
            logprobs[-1] = None
        recorder.call(
            f"c{i}",
            parent,
            s["new"] or ([] if parent and recorder.seen[parent][0] else [0]),
            s["out"],
            logprobs,
            finish=s["finish"],
            versions=[[i, 0, len(s["out"]) // 2], [i + 100, len(s["out"]) // 2, len(s["out"])]],
        )
    return recorder.tree()


def drawn_from(tree, data, j_max, seed):
    roles = {leaf.id: RoleDecision(data.draw(st.sampled_from(ROLES)), 1.0, ()) for leaf in tree.leaves()}
    return draw(tree, roles, j_max, execution_rng(seed, "x"), train_auxiliary=True)


def assert_same(row, other):
    assert (row.execution, row.leaf, row.role) == (other.execution, other.leaf, other.role)
    for name in ("ids", "targets", "logprobs", "versions"):
        one, two = getattr(row, name), getattr(other, name)
        assert one.dtype == two.dtype and one.tobytes() == two.tobytes(), name


def signal(ids, contexts, targets, logprobs, versions):
    """What training learns from a row: {(context, token, log-prob, version): times}."""
    return Counter(
        (tuple(contexts[t]), int(ids[t]), float(logprobs[t]), int(versions[t]))
        for t in np.flatnonzero(targets)
    )


@given(steps, st.data(), st.sampled_from([1, 2, 5, None]), st.integers(0, 9))
def test_a_flat_row_is_what_the_model_saw_up_to_its_last_target(new_recorder, steps, data, j_max, seed):
    recorder = new_recorder()
    tree = record(recorder, steps)
    for drawn in drawn_from(tree, data, j_max, seed):
        row = flat_row("x", drawn)
        prompt, output = recorder.seen[row.leaf]
        assert row.ids.tolist() == (prompt + output)[: len(row.ids)]
        assert row.targets[-1] and not row.targets[0]
        assert [len(getattr(row, n)) for n in ("targets", "logprobs", "versions")] == [len(row.ids)] * 3
        sampled = {}
        for node in drawn.path:
            for i, (logprob, version) in enumerate(
                zip(node.call.logprobs.tolist(), node.call.token_versions().tolist(), strict=True)
            ):
                sampled[node.output_start + i] = (logprob, version)
        for place in range(len(row.ids)):
            logprob, version = sampled.get(place, (np.nan, -1))
            assert row.logprobs[place] == logprob or np.isnan(row.logprobs[place]) and np.isnan(logprob)
            assert row.versions[place] == version


@given(steps, st.data(), st.sampled_from([1, 2, 5, None]), st.integers(0, 9), st.none() | st.integers(1, 40))
def test_shared_rows_are_the_same_training_signal_as_flat_rows(
    new_recorder, steps, data, j_max, seed, budget
):
    tree = record(new_recorder(), steps)
    draws = drawn_from(tree, data, j_max, seed)
    flats = {row.leaf: row for row in (flat_row("x", drawn) for drawn in draws)}
    rows = shared_rows(tree, draws, budget)
    assert Counter(path.leaf for row in rows for path in row.paths) == Counter(flats.keys())
    for row in rows:
        for number, path in enumerate(row.paths):
            flat = flats[path.leaf]
            assert_same(row.trajectory(number), flat)
            at = row.indices(number)
            assert path.length == len(at) == len(flat.ids)
            assert path.target_count == np.count_nonzero(flat.targets)
            assert row.positions[at].tolist() == list(range(len(at)))
            assert row.predecessors[at].tolist() == [-1, *at[:-1].tolist()]
        mask = row.attention_mask()
        for token in range(
            len(row)
        ):  # every token sees its own path and nothing else, whatever the model's depth
            seen = np.flatnonzero(mask[token])
            chain = [token]
            while row.predecessors[chain[-1]] >= 0:
                chain.append(int(row.predecessors[chain[-1]]))
            assert seen.tolist() == chain[::-1]
    expected = Counter()
    for flat in flats.values():
        contexts = [flat.ids[:t].tolist() for t in range(len(flat.ids))]
        expected += signal(flat.ids, contexts, flat.targets, flat.logprobs, flat.versions)
    found = Counter()
    for row in rows:
        mask = row.attention_mask()
        contexts = [row.ids[mask[before]].tolist() if before >= 0 else [] for before in row.predecessors]
        found += signal(row.ids, contexts, row.targets, row.logprobs, row.versions)
    assert found == expected and set(found.values()) <= {1}  # log-probs are all different: each target once
    trained = sum(row.target_count for row in rows)
    assert trained == account(tree, draws)["trained"] == sum(p.target_count for r in rows for p in r.paths)


@given(steps, st.data(), st.sampled_from([2, 5, None]), st.integers(0, 9), st.integers(1, 40))
def test_rows_keep_the_budget_and_a_longer_path_is_alone_and_reported(
    new_recorder, steps, data, j_max, seed, budget
):
    tree = record(new_recorder(), steps)
    for row in shared_rows(tree, drawn_from(tree, data, j_max, seed), budget):
        assert row.oversize == (len(row) > budget)
        assert not row.oversize or len(row.paths) == 1


@given(steps, st.data(), st.integers(0, 9))
def test_a_whole_execution_holds_each_stretch_once(new_recorder, steps, data, seed):
    """As many tokens as distinct places: a sampled one belongs to its call, a prompt's to the path it continues."""
    tree = record(new_recorder(), steps)
    draws = drawn_from(tree, data, None, seed)
    numbers = {}
    places = set()
    for drawn in draws:
        row = flat_row("x", drawn)
        place = None
        for node in drawn.path:
            place = numbers.setdefault((place, "after", node.parent and node.parent.id), len(numbers))
            for i in range(node.start, min(node.end, len(row.ids))):
                key = ("read", int(row.ids[i])) if i < node.output_start else ("sampled", node.id)
                place = numbers.setdefault((place, *key), len(numbers))
                places.add(place)
    assert sum(len(row) for row in shared_rows(tree, draws)) == len(places)


@given(steps, st.data(), st.sampled_from([1, 5, None]), st.integers(0, 9), st.none() | st.integers(1, 40))
def test_segments_are_a_depth_first_forest_and_tile_the_row(new_recorder, steps, data, j_max, seed, budget):
    tree = record(new_recorder(), steps)
    for row in shared_rows(tree, drawn_from(tree, data, j_max, seed), budget):
        ends = [*row.segment_starts[1:].tolist(), len(row)]
        assert row.segment_starts[0] == 0 and all(np.diff([*row.segment_starts.tolist(), len(row)]) > 0)
        for s, (start, parent) in enumerate(zip(row.segment_starts, row.segment_parents, strict=True)):
            assert parent < s
            assert row.predecessors[start] == (ends[parent] - 1 if parent >= 0 else -1)
            assert row.predecessors[start + 1 : ends[s]].tolist() == list(range(start, ends[s] - 1))
            assert len(set(row.visible_until[start : ends[s]].tolist())) == 1
            assert row.visible_until[start] in ends
            assert (row.segment_owners[s] >= 0) == bool(row.targets[start : ends[s]].any())
        assert len(row.segment_calls) == len(row.segment_owners) == len(ends)
        for column, dtype in (
            ("ids", np.int32),
            ("targets", np.bool_),
            ("logprobs", np.float32),
            ("versions", np.int32),
            ("positions", np.int32),
            ("predecessors", np.int32),
            ("visible_until", np.int32),
        ):
            assert getattr(row, column).dtype == dtype and getattr(row, column).shape == (len(row),)


def main(*names):
    return {name: RoleDecision("main", 1.0, ()) for name in names}


def test_two_answers_to_one_prompt_are_read_at_the_same_token(recorder, rng):
    """Where a segment begins, the prediction is not read at the token before it in the row."""
    recorder.call("a", new=[1, 2], out=[3, 4])
    recorder.call("b", new=[1, 2], out=[5])
    tree = recorder.tree()
    (row,) = shared_rows(tree, draw(tree, main("a", "b"), None, rng))
    assert row.ids.tolist() == [1, 2, 3, 4, 5]
    assert row.positions.tolist() == [0, 1, 2, 3, 2]
    assert row.predecessors.tolist() == [-1, 0, 1, 2, 1]
    assert row.visible_until.tolist() == [5, 5, 4, 4, 5]
    assert row.targets.tolist() == [False, False, True, True, True]
    assert row.segment_calls == ("a", "a", "b")
    assert row.segment_parents.tolist() == [-1, 0, 0]


def test_contexts_with_one_system_prompt_share_it(recorder, rng):
    """A root that goes on after a compaction repeats the system prompt; the row does not."""
    system = recorder.fresh(100)
    recorder.call("a", new=[*system, 1], out=[7])
    recorder.call("b", new=[*system, 2, 3], out=[8])
    tree = recorder.tree()
    assert [root.id for root in tree.roots] == ["a", "b"]
    (row,) = shared_rows(tree, draw(tree, main("a", "b"), None, rng))
    assert len(row) == 100 + 2 + 3 and row.target_count == 2


def test_equal_outputs_of_two_calls_stay_two_actions(recorder, rng):
    recorder.call("a", new=[1], out=[2])
    recorder.call("b", new=[1], out=[2])
    tree = recorder.tree()
    (row,) = shared_rows(tree, draw(tree, main("a", "b"), None, rng))
    assert row.ids.tolist() == [1, 2, 2] and row.targets.tolist() == [False, True, True]


def test_a_small_budget_repeats_context_but_no_target(recorder, rng):
    recorder.call("a", new=[1, 2, 3], out=[4, 5])
    for name in "bcd":
        recorder.call(name, "a", new=recorder.fresh(2), out=recorder.fresh(3))
    tree = recorder.tree()
    draws = draw(tree, main("b", "c", "d"), None, rng)
    assert [len(row) for row in shared_rows(tree, draws)] == [20]
    rows = shared_rows(tree, draws, 15)
    assert sorted(len(row) for row in rows) == [10, 15]
    assert sum(row.target_count for row in rows) == 11
    assert [int(row.targets[3:5].sum()) for row in rows].count(2) == 1
    alone = shared_rows(tree, draws, 9)
    assert [row.oversize for row in alone] == [True] * 3 and [len(row.paths) for row in alone] == [1] * 3


def test_branches_of_one_subtree_go_together_before_strangers(recorder, rng):
    """Two contexts with two branches each: a budget for half of it keeps each context's prefix in one row."""
    for root in "ab":
        recorder.call(root, new=recorder.fresh(50), out=recorder.fresh(2))
        for leaf in "12":
            recorder.call(root + leaf, root, new=recorder.fresh(4), out=recorder.fresh(2))
    tree = recorder.tree()
    draws = draw(tree, main("a1", "a2", "b1", "b2"), None, rng)
    rows = shared_rows(tree, draws, 70)
    assert sorted("".join(sorted(path.leaf for path in row.paths)) for row in rows) == ["a1a2", "b1b2"]
    assert [len(row) for row in rows] == [64, 64]


def test_a_path_that_shares_nothing_goes_where_it_leaves_the_least_room(recorder, rng):
    for name, length in (("a", 60), ("b", 50), ("c", 45), ("d", 5)):
        recorder.call(name, new=recorder.fresh(length - 1), out=recorder.fresh(1))
    tree = recorder.tree()
    rows = shared_rows(tree, draw(tree, main("a", "b", "c", "d"), None, rng), 100)
    assert sorted("".join(sorted(path.leaf for path in row.paths)) for row in rows) == ["a", "bcd"]


def test_a_thousand_calls_deep_and_wide(rng):
    calls = [
        Call(
            f"c{i}", "x", [i], [i, i + 1], parent=f"c{min(i, 700) - 1}" if i else None, logprobs=[-1.0, -1.0]
        )
        for i in range(1300)
    ]
    tree = Tree.from_calls(calls)
    draws = draw(tree, main(*(leaf.id for leaf in tree.leaves())), None, rng)
    assert len(draws) == 600
    (row,) = shared_rows(tree, draws)
    assert len(row) == 3 * 1300 and row.target_count == 2 * 1300 and len(row.segment_calls) == 1300


def test_no_draws_make_no_rows_and_misuse_is_refused(recorder, rng):
    recorder.call("a")
    tree = recorder.tree()
    assert shared_rows(tree, []) == [] and shared_rows(tree, [], 5) == []
    assert sample_trajectories(tree, main("a"), 0, rng) == []
    with pytest.raises(TrajtreeError, match="budget"):
        shared_rows(tree, [], 0)
    recorder.call("failed", finish="error")
    failed = tree.add(recorder.calls[-1])
    for node, trains in ((tree["a"], False), (failed, True)):
        with pytest.raises(TrajtreeError, match="no target"):
            flat_row("x", Draw("main", (node,), (trains,)))


def test_injected_assistant_text_is_context_only(recorder, rng):
    recorder.call("a", new=[1], out=[2])
    recorder.call("b", "a", new=[3, 4], out=[5], versions=[[9, 0, 1]])
    tree = recorder.tree()
    (row,) = sample_trajectories(tree, main("b"), 5, rng)
    assert row.ids.tolist() == [1, 2, 3, 4, 5]
    assert row.targets.tolist() == [False, True, False, False, True]
    assert np.isnan(row.logprobs).tolist() == [True, False, True, True, False]
    assert row.versions.tolist() == [-1, -1, -1, -1, 9]
