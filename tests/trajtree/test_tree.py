import weakref

import numpy as np
import pytest
from gyre_trajtree import Call, Tree, TreeError, dead_tips
from hypothesis import given
from hypothesis import strategies as st

few = st.integers(0, 2)  # a tiny alphabet, so that prefixes collide often
tokens = st.lists(few, max_size=3)
steps = st.lists(st.tuples(st.integers(-1, 20), tokens, tokens), min_size=1, max_size=14)


def record(recorder, steps, fresh=False, stretch=1):
    """Calls that extend an earlier call (or none, -1) by new tokens and sample an output.

    `fresh` makes every sampled token one of its own, so that a prompt extends one path only. `stretch` repeats each token.
    """
    for i, (target, new, out) in enumerate(steps):
        parent = f"c{target % i}" if target >= 0 and i else None
        new = new or ([] if parent and recorder.seen[parent][0] else [0])
        out = recorder.fresh(len(out)) if fresh else out
        recorder.call(f"c{i}", parent, stretched(new, stretch), stretched(out, stretch))
    return recorder.tree()


def stretched(tokens, times):
    return [token for token in tokens for _ in range(times)]


def path_of(recorder, name):
    prompt, output = recorder.seen[name]
    return prompt + output


def longest_by_definition(recorder, names, prompt):
    """Index of the latest of the longest paths that the prompt begins with and that end in an answer."""
    fitting = [
        (len(path_of(recorder, name)), i)
        for i, name in enumerate(names)
        if recorder.seen[name][1] and path_of(recorder, name) == prompt[: len(path_of(recorder, name))]
    ]
    return max(fitting)[1] if fitting else None


@given(steps, st.booleans())
def test_a_path_is_exactly_what_the_model_saw_and_sampled(new_recorder, steps, whole_prompts):
    recorder = new_recorder(whole_prompts)
    tree = record(recorder, steps)
    for node in tree.nodes:
        prompt, output = recorder.seen[node.id]
        assert tree.path_tokens(node).tolist() == prompt + output
        assert node.output_start == len(prompt) and node.end == len(prompt) + len(output)
        assert (
            sum(len(step.call.input_ids) + len(step.call.output_ids) for step in tree.path(node)) == node.end
        )
        assert node.root is tree.path(node)[0]


@given(steps)
def test_a_whole_prompt_attaches_to_the_latest_of_the_longest_paths_that_it_extends(new_recorder, steps):
    recorder = new_recorder(whole_prompts=True)
    tree = record(recorder, steps)
    names = [node.id for node in tree.nodes]
    for node in tree.nodes:
        expected = longest_by_definition(recorder, names[: node.index], recorder.seen[node.id][0])
        assert (node.parent.index if node.parent else None) == expected


@given(
    steps,
    st.booleans(),
    st.lists(st.lists(few, max_size=12), max_size=6),
    st.integers(0, 13),
    st.sampled_from([1, 1, 200]),
)
def test_any_prompt_finds_its_longest_prefix_however_the_tree_was_built(
    new_recorder, steps, whole_prompts, prompts, early, stretch
):
    """Searches between the appends too: each one must see all calls so far and disturb none that follow."""
    recorder = new_recorder(whole_prompts)
    record(recorder, steps, stretch=stretch)
    prompts = [stretched(prompt, stretch) for prompt in prompts]
    tree = Tree("x")
    for number, call in enumerate(recorder.calls):
        tree.add(call)
        if number in (early, len(recorder.calls) - 1):
            names = [node.id for node in tree.nodes]
            for prompt in prompts + [path_of(recorder, name) for name in names]:
                found = tree.longest_prefix(np.array(prompt, np.int32))
                assert (found and found.index) == longest_by_definition(recorder, names, prompt)


@given(steps)
def test_a_tree_by_tokens_equals_the_tree_by_parents_where_tokens_tell(new_recorder, steps):
    """Each output is unique and none is empty, so that a prompt names the call it extends."""
    steps = [(target, new, out or [0]) for target, new, out in steps]
    by_parents, by_tokens = new_recorder(), new_recorder(whole_prompts=True)
    expected, found = record(by_parents, steps, fresh=True), record(by_tokens, steps, fresh=True)
    assert [node.call.parent for node in found.nodes] == [node.call.parent for node in expected.nodes]
    for one, other in zip(found.nodes, expected.nodes, strict=True):
        assert (one.start, one.output_start, one.end) == (other.start, other.output_start, other.end)
        assert np.array_equal(one.call.input_ids, other.call.input_ids)


@pytest.mark.parametrize("shared", [255, 256, 257, 2000, 5000])
def test_paths_that_differ_at_any_depth_branch_there(new_recorder, shared):
    recorder = new_recorder(whole_prompts=True)
    recorder.call("a", new=range(shared), out=[1])
    recorder.call("b", "a", new=range(3000), out=[2])
    recorder.call("c", "b", new=[3], out=[4])
    long = path_of(recorder, "c")
    tree = recorder.tree()
    for cut in (shared - 1, shared, shared + 1, shared + 2000, len(long) - 1, len(long)):
        prompt = long[:cut] + [7_000_000] * 300
        found = tree.longest_prefix(np.array(prompt, np.int32))
        assert (found and found.index) == longest_by_definition(recorder, ["a", "b", "c"], prompt)


@given(steps)
def test_recorded_parents_are_kept_and_every_call_is_one_node(new_recorder, steps):
    recorder = new_recorder()
    tree = record(recorder, steps)
    assert [node.id for node in tree.nodes] == [call.id for call in recorder.calls]
    for node, call in zip(tree.nodes, recorder.calls, strict=True):
        assert call.parent in (None, node.call.parent)  # without a recorded parent, tokens alone decide
    assert {leaf.id for leaf in tree.leaves()} == {n.id for n in tree.nodes} - {
        n.call.parent for n in tree.nodes
    }
    assert [
        node for root in tree.roots for node in sorted(tree.below(root), key=lambda n: n.index)
    ] == sorted(tree.nodes, key=lambda n: (n.root.index, n.index))


@given(steps)
def test_searching_never_writes_into_a_call(new_recorder, steps):
    recorder = new_recorder()
    tree = record(recorder, steps)
    before = [node.call.input_ids.tolist() + node.call.output_ids.tolist() for node in tree.nodes]
    tree.longest_prefix(np.array([9], np.int32))
    recorder.call("more", f"c{len(steps) - 1}", new=[1, 1], out=[2, 2])
    tree.add(recorder.calls[-1])
    tree.longest_prefix(np.array([9], np.int32))
    assert before == [n.call.input_ids.tolist() + n.call.output_ids.tolist() for n in tree.nodes[:-1]]


def test_a_tree_holds_each_token_once(new_recorder):
    """A long conversation whose every record repeats the whole prompt still costs only its new tokens."""
    recorder = new_recorder(whole_prompts=True)
    recorder.call("c0")
    for i in range(1, 50):
        recorder.call(f"c{i}", f"c{i - 1}")
    tree = recorder.tree()
    assert len(tree.roots) == len(tree.leaves()) == 1
    assert sum(node.call.input_ids.size + node.call.output_ids.size for node in tree.nodes) == 50 * 7
    assert all(
        node.call.input_ids.base is None for node in tree.nodes[1:]
    )  # no view that keeps a prompt alive


def test_equal_outputs_of_two_calls_stay_two_nodes_and_the_latest_is_extended(new_recorder):
    recorder = new_recorder(whole_prompts=True)
    recorder.call("a", new=[1], out=[2])
    recorder.call("b", new=[1], out=[2])
    recorder.call("c", "a", new=[3], out=[4])
    tree = recorder.tree()
    assert [root.id for root in tree.roots] == ["a", "b"]
    assert tree["c"].parent is tree["b"]


def test_the_latest_of_equal_paths_is_found_below_a_branch_too(new_recorder):
    recorder = new_recorder(whole_prompts=True)
    recorder.call("a", new=[1], out=[2])
    recorder.call("b", "a", new=[3, 3], out=[4])
    recorder.call("c", "a", new=[5], out=[6])
    recorder.call("d", new=[1], out=[2])
    tree = recorder.tree()
    assert [tree.longest_prefix(np.array([1, 2, last], np.int32)).id for last in (3, 5, 9)] == ["d", "d", "d"]


def test_a_prompt_never_extends_a_call_that_sampled_nothing(new_recorder):
    recorder = new_recorder(whole_prompts=True)
    recorder.call("failed", new=[1, 2], out=[], finish="error")
    recorder.call("again", new=[1, 2], out=[3])
    assert recorder.tree()["again"].parent is None


def test_a_changed_history_branches_at_the_last_unchanged_call(new_recorder):
    recorder = new_recorder(whole_prompts=True)
    recorder.call("a")
    recorder.call("b", "a")
    recorder.call("c", "b")
    recorder.call("edited", "a", new=[5, 5])
    tree = recorder.tree()
    assert tree["edited"].parent is tree["a"]
    assert [leaf.id for leaf in tree.leaves()] == ["c", "edited"]


@pytest.mark.parametrize(
    "calls, said",
    [
        ([], "at least one call"),
        ([Call("a", "x", [1], [2]), Call("b", "y", [1], [2])], "belongs to execution y"),
        ([Call("a", "x", [1], [2]), Call("a", "x", [1], [2])], "recorded twice"),
        ([Call("a", "x", [1], [2], parent="z")], "names parent z"),
    ],
)
def test_calls_that_form_no_tree_are_refused(calls, said):
    with pytest.raises(TreeError, match=said):
        Tree.from_calls(calls)


def test_what_cannot_join_is_set_aside_with_its_reason_and_the_rest_is_built():
    good = [Call("a", "x", [1], [2]), Call("b", "x", [3], [4], parent="a")]
    bad = [
        Call("a", "x", [5], [6]),
        Call("c", "y", [1], [2]),
        Call("loop", "x", [1], [2], parent="pool"),
        Call("pool", "x", [1], [2], parent="loop"),
        Call("self", "x", [1], [2], parent="self"),
    ]
    rejected = []
    tree = Tree.from_calls([good[0], *bad, good[1]], rejected)
    assert [node.id for node in tree.nodes] == ["a", "b"]
    assert [each.call for each in rejected] == bad
    for each, said in zip(
        rejected, ("twice", "execution y", "parent pool", "parent loop", "itself"), strict=True
    ):
        assert said in each.reason and "\n" not in each.reason


def test_a_tree_of_rejected_calls_only_is_empty():
    rejected = []
    tree = Tree.from_calls([Call("a", "x", [1], [2], parent="z")], rejected)
    assert len(tree) == 0 and tree.leaves() == [] and len(rejected) == 1


def test_a_refused_call_leaves_the_tree_as_it_was(recorder):
    recorder.call("a")
    tree = recorder.tree()
    for call in (Call("a", "x", [1], [2]), Call("b", "x", [1], [2], parent="z")):
        with pytest.raises(TreeError):
            tree.add(call)
    assert [node.id for node in tree.nodes] == ["a"] and tree["a"].children == []


def test_calls_are_taken_one_at_a_time():
    """Whole prompts of a long conversation need not all be in memory."""
    alive = []

    def calls():
        for i in range(3):
            call = Call(f"c{i}", "x", list(range(3 * i + 2)), [3 * i + 2])
            alive.append(weakref.ref(call.input_ids))
            yield call
            del call

    tree = Tree.from_calls(calls())
    assert [node.end for node in tree.nodes] == [3, 6, 9]
    assert [ref() is None for ref in alive] == [False, True, True]  # the root's whole prompt is new


def test_the_first_token_of_all_is_no_target(recorder):
    recorder.call("empty", new=[], out=[])
    recorder.call("a", "empty", new=[], out=[5, 6])
    assert recorder.tree()["a"].trainable.tolist() == [False, True]


def test_only_tokens_with_a_logprob_of_calls_without_error_are_trainable(recorder):
    recorder.call("a", out=[1, 2, 3], logprobs=[-1.0, None, 0.0])
    recorder.call("b", out=[1, 2], finish="error")
    tree = recorder.tree()
    assert tree["a"].trainable.tolist() == [True, False, True] and tree["a"].trainable_count == 2
    assert tree["b"].trainable.tolist() == [False, False] and tree["b"].trainable_count == 0


def test_attempts_that_the_harness_repeated_are_dead_tips(recorder):
    recorder.call("a")
    recorder.call("cut", "a", new=[7], finish="abort")
    recorder.call("lost", "a", new=[8])
    recorder.call("again", "a", new=[7])
    recorder.call("found", "a", new=[8], attempt_of="lost")
    recorder.call("last", "again", finish="abort")
    assert dead_tips(recorder.tree()) == {"cut": "aborted", "lost": "retried"}


def test_another_prompt_of_equal_length_answers_no_aborted_request(recorder):
    recorder.call("cut", new=[7, 8], finish="abort")
    recorder.call("other", new=[8, 7])
    recorder.call("below", "other", new=[7, 8])
    assert dead_tips(recorder.tree()) == {}


def test_a_broken_answer_that_the_harness_asks_on_from_by_its_text_is_a_dead_tip(recorder):
    """Claude Code repeats what it had of the answer and says that it was cut off: the request begins like the first."""
    recorder.call("a")
    recorder.call("cut", "a", new=[7], finish="abort")
    recorder.call("again", "a", new=[7, 20, 21])
    recorder.call("late", "a", new=[9], finish="abort")
    recorder.call("before", "a", new=[9, 22], finish="abort")
    assert dead_tips(recorder.tree()) == {"cut": "aborted"}


def test_an_aborted_attempt_may_be_recorded_after_its_retry(recorder):
    recorder.call("a")
    recorder.call("again", "a", new=[7], attempt_of="cut")
    recorder.call("cut", "a", new=[7], finish="abort")
    assert dead_tips(recorder.tree()) == {"cut": "aborted"}


def test_an_attempt_that_the_harness_went_on_from_is_no_dead_tip(recorder):
    recorder.call("a")
    recorder.call("b", attempt_of="a")
    recorder.call("c", "a")
    assert dead_tips(recorder.tree()) == {}


def test_path_tokens_are_int32(recorder):
    recorder.call("a")
    tree = recorder.tree()
    assert tree.path_tokens(tree["a"]).dtype == np.int32
