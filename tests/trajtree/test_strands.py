"""Trees as people read them: one strand a leaf, each under what caused it, with the cause named."""

import pytest
from gyre_trajtree import RecordedExecution, inspect
from gyre_trajtree.strands import BRANCH_CAUSES
from hypothesis import given
from trajtree_shapes import executions_of_any_shape

TASK = "write the parser and test it well"
PART = "write the tests of the parser, all of them"


def strands(recorder):
    """{head: (cause, source, head of the strand above, calls)} of a recorder's calls."""
    found = inspect(RecordedExecution("x", calls=recorder.calls)).strands
    return {
        strand.head.id: (
            strand.cause,
            strand.source and strand.source.id,
            strand.above and strand.above.head.id,
            [node.id for node in strand.nodes],
        )
        for strand in found
    }


def own(text, tools="t", **more):
    return {"system": "s", "tools": tools, "first_user": text, "last_user": text, **more}


def test_a_chain_is_one_strand(recorder):
    recorder.call("a")
    recorder.call("b", "a")
    recorder.call("c", "b")
    assert strands(recorder) == {"a": ("start", None, None, ["a", "b", "c"])}


def test_the_longest_branch_goes_on_and_the_others_hang_on_it(recorder):
    recorder.call("a")
    recorder.call("left", "a")
    recorder.call("b", "a")
    recorder.call("c", "b")
    assert strands(recorder) == {
        "a": ("start", None, None, ["a", "b", "c"]),
        "left": ("edit", "a", "a", ["left"]),
    }


def test_an_equal_prompt_is_a_resample(recorder):
    recorder.call("a")
    recorder.call("b", "a", new=[1, 2])
    recorder.call("again", "a", new=[1, 2])
    assert strands(recorder)["again"] == ("resample", "a", "a", ["again"])


@pytest.mark.parametrize(("finish", "cause"), [("abort", "aborted"), ("stop", "retried")])
def test_an_abandoned_attempt_never_goes_on(recorder, finish, cause):
    recorder.call("a")
    recorder.call("lost", "a", new=[1, 2], finish=finish)
    recorder.call("b", "a", new=[1, 2], attempt_of="lost")
    assert strands(recorder) == {
        "a": ("start", None, None, ["a", "b"]),
        "lost": (cause, "a", "a", ["lost"]),
    }


def test_a_sub_agent_stands_under_the_call_that_delegated(recorder):
    recorder.call("a", evidence=own(TASK, spawns=[PART], tool_calls=1))
    recorder.call("s", evidence=own(PART) | {"system": "sub"})
    recorder.call("b", "a", evidence=own(TASK))
    assert strands(recorder) == {
        "a": ("start", None, None, ["a", "b"]),
        "s": ("delegation", "a", "a", ["s"]),
    }


def test_a_continuation_stands_beside_the_context_it_continues(recorder):
    summary = "the parser is done, its tests are still to be written"
    recorder.call("a", evidence=own(TASK, tool_calls=1))
    recorder.call("b", "a", evidence=own(TASK, tool_calls=1))
    recorder.call(
        "sum",
        "b",
        evidence=own(TASK) | {"text": summary, "tool_calls": 0, "last_user": "summarise"},
    )
    recorder.call("c", evidence=own(f"{TASK} so far: {summary}", tool_calls=1))
    found = strands(recorder)
    assert found["a"] == ("start", None, None, ["a", "b", "sum"])
    assert found["c"] == ("compaction", "sum", None, ["c"])


@given(executions_of_any_shape())
def test_every_call_is_in_one_strand_and_every_strand_ends_at_its_leaf(recorded):
    found = inspect(recorded)
    assert sorted(node.index for strand in found.strands for node in strand.nodes) == list(
        range(len(found.tree))
    )
    assert sorted(strand.leaf.index for strand in found.strands) == [
        leaf.index for leaf in found.tree.leaves()
    ]
    for strand in found.strands:
        assert strand.cause in BRANCH_CAUSES
        assert all(b.parent is a for a, b in zip(strand.nodes, strand.nodes[1:], strict=False))
        assert strand.above is None or strand.above.head.index < strand.head.index
        assert all(below.above is strand for below in strand.below)
        if strand.head.parent:
            assert strand.above and strand.head.parent in strand.above.nodes
