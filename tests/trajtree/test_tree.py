import numpy as np
import pytest
from gyre_trajtree import Call, Tree, TreeError, dead_tips
from hypothesis import given
from hypothesis import strategies as st

few = st.integers(0, 2)  # a tiny alphabet, so that prefixes collide often
steps = st.lists(
    st.tuples(st.integers(-1, 20), st.lists(few, max_size=3), st.lists(few, max_size=3)),
    min_size=1,
    max_size=12,
)


def record(recorder, steps):
    """Calls that extend an earlier call (or none, -1) by new tokens and sample an output."""
    for i, (target, new, out) in enumerate(steps):
        parent = f"c{target % i}" if target >= 0 and i else None
        recorder.call(f"c{i}", parent, new, out)
    return recorder.tree()


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


@given(steps)
def test_a_whole_prompt_attaches_to_the_longest_path_that_it_extends(new_recorder, steps):
    recorder = new_recorder(whole_prompts=True)
    tree = record(recorder, steps)
    for node in tree.nodes:
        prompt, _ = recorder.seen[node.id]
        fitting = [
            len(sum(recorder.seen[other.id], []))
            for other in tree.nodes[: node.index]
            if recorder.seen[other.id][1] and sum(recorder.seen[other.id], []) == prompt[: other.end]
        ]
        assert (node.parent.end if node.parent else None) == max(fitting, default=None)


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


def test_only_finite_logprobs_of_calls_without_error_are_trainable(recorder):
    recorder.call("a", out=[1, 2, 3, 4], logprobs=[-1.0, None, float("-inf"), 0.0])
    recorder.call("b", out=[1, 2], finish="error")
    tree = recorder.tree()
    assert tree["a"].trainable.tolist() == [True, False, False, True]
    assert tree["b"].trainable.tolist() == [False, False]


def test_attempts_that_the_harness_repeated_are_dead_tips(recorder):
    recorder.call("a")
    recorder.call("cut", "a", new=[7], finish="abort")
    recorder.call("lost", "a", new=[8])
    recorder.call("again", "a", new=[7])
    recorder.call("found", "a", new=[8], attempt_of="lost")
    recorder.call("last", "again", finish="abort")
    assert dead_tips(recorder.tree()) == {"cut": "aborted", "lost": "retried"}


def test_an_attempt_that_the_harness_went_on_from_is_no_dead_tip(recorder):
    recorder.call("a")
    recorder.call("b", attempt_of="a")
    recorder.call("c", "a")
    assert dead_tips(recorder.tree()) == {}


def test_path_tokens_are_int32(recorder):
    recorder.call("a")
    tree = recorder.tree()
    assert tree.path_tokens(tree["a"]).dtype == np.int32
