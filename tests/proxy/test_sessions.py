"""Which recorded call a request extends."""

import json

import numpy as np
import pytest
from gyre_proxy.conversation import Conversation, Message, ToolCall
from gyre_proxy.sessions import Node, Session
from hypothesis import given
from hypothesis import strategies as st

TOOLS = ({"type": "function", "function": {"name": "shell", "parameters": {"a": 1, "b": 2}}},)
USER = Message("user", "do it")
CALL = ToolCall("id1", "shell", '{"cmd": "ls -la", "timeout": 1e4}')


def record(session, messages, text="", calls=(), reasoning="", tools=TOOLS, failed=False):
    """Commit one answer; the node's token is its number."""
    match = session.match(Conversation(tuple(messages), tools))
    number = session.calls
    node = Node(
        id=f"call{number}",
        parent=match.node,
        ids=np.array([number], np.int32),
        json=b"%d" % number,
        length=(match.node.length if match.node else 0) + 1,
        call_ids=tuple(call.id for call in calls),
        reasoning=reasoning,
    )
    answer = Message("assistant", text, tool_calls=tuple(calls))
    session.remember(node.id, match.digest, session.context(match, answer), node, calls, failed)
    return node


def found(session, *messages, tools=TOOLS):
    return session.match(Conversation(messages, tools)).node


def answered(text="", *calls, reasoning=""):
    return Message("assistant", text, reasoning, calls)


def result(text, call_id="id1"):
    return Message("tool", text, call_id=call_id)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"cmd":"ls -la","timeout":10000}',
        '{"timeout": 10000.0, "cmd": "ls -la"}',
        '{"cmd": "ls \\u002dla", "timeout": 1e4, "replace_all": false}',
        "{}",
    ],
)
def test_reserialised_arguments_attach_by_call_id(arguments):
    session = Session("e")
    node = record(session, [USER], "Look.", [CALL])
    echoed = answered("Look.", ToolCall("id1", "shell", arguments))
    match = session.match(Conversation((USER, echoed, result("x")), TOOLS))
    assert match.node is node
    assert match.messages[1].tool_calls == (CALL,) and match.known == 2


def test_a_renamed_tool_attaches_by_call_id():
    session = Session("e")
    node = record(session, [USER], "", [CALL])
    assert found(session, USER, answered("", ToolCall("id1", "invalid", "{}")), result("x")) is node


def test_foreign_call_ids_are_taken_as_given():
    session = Session("e")
    record(session, [USER], "", [CALL])
    other = ToolCall("foreign", "shell", '{"cmd": "rm"}')
    match = session.match(Conversation((USER, answered("", other), result("x", "foreign")), TOOLS))
    assert match.node is None and match.messages[1].tool_calls == (other,)


def test_a_call_id_of_another_execution_means_nothing():
    one, other = Session("a"), Session("b")
    record(one, [USER], "", [CALL])
    record(other, [USER], "", [ToolCall("id2", CALL.name, CALL.arguments)])
    assert found(other, USER, answered("", ToolCall("id1", "shell", "{}"))) is None


def test_thinking_dropped_by_the_harness_does_not_matter():
    session = Session("e")
    node = record(session, [USER], "Hi", reasoning="long thought")
    assert found(session, USER, answered("Hi"), USER) is node
    assert found(session, USER, answered("Hi", reasoning="long thought "), USER) is node


def test_white_space_at_the_ends_of_an_answer_does_not_matter():
    session = Session("e")
    node = record(session, [USER], "  Hi \n\n")
    assert found(session, USER, answered("Hi"), USER) is node


def test_an_edited_answer_is_a_new_branch():
    session = Session("e")
    record(session, [USER], "Text and call", [CALL])
    assert found(session, USER, answered("", CALL), result("x")) is None


def test_results_in_another_order_attach():
    session = Session("e")
    calls = [CALL, ToolCall("id2", "shell", "{}")]
    record(session, [USER], "", calls)
    head = [USER, answered("", *calls)]
    node = record(session, [*head, result("a"), result("b", "id2")], "Done")
    assert found(session, *head, result("b", "id2"), result("a"), answered("Done"), USER) is node


def test_the_deepest_node_wins_and_a_changed_message_branches_above_it():
    session = Session("e")
    first = record(session, [USER], "one")
    path = [USER, answered("one"), Message("user", "more")]
    second = record(session, path, "two")
    assert second.parent is first
    assert found(session, *path, answered("two"), USER) is second
    assert found(session, *path[:2], Message("user", "cleared"), answered("two"), USER) is first


@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "other"}},)])
def test_other_tools_are_another_branch(tools):
    session = Session("e")
    record(session, [USER], "one")
    assert found(session, USER, answered("one"), USER, tools=tools) is None


def test_the_order_of_keys_in_a_tool_is_no_difference():
    session = Session("e")
    node = record(session, [USER], "one")
    same = ({"function": {"parameters": {"b": 2, "a": 1}, "name": "shell"}, "type": "function"},)
    assert found(session, USER, answered("one"), USER, tools=same) is node


def test_answers_of_equal_meaning_are_told_apart_by_call_id_then_thinking_then_age():
    session = Session("e")
    twin = ToolCall("id9", CALL.name, CALL.arguments)
    first, second = record(session, [USER], "", [CALL]), record(session, [USER], "", [twin])
    assert found(session, USER, answered("", CALL), result("x")) is first
    assert found(session, USER, answered("", twin), result("x", "id9")) is second
    thought = record(session, [USER], "same", reasoning="a")
    later = record(session, [USER], "same", reasoning="b")
    assert found(session, USER, answered("same", reasoning="a"), USER) is thought
    assert found(session, USER, answered("same"), USER) is later


def test_a_request_that_repeats_the_last_one_costs_its_new_messages():
    session, messages = Session("e"), (USER,)
    hashed = []
    meaning = Session._meaning
    for turn in range(50):
        record(session, messages, f"answer {turn}")
        messages = (*messages, answered(f"answer {turn}"), Message("user", f"more {turn}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Session, "_meaning", lambda self, message: hashed.append(message) or meaning(self, message)
        )
        for _ in range(2):
            record(session, messages, "next")
            messages = (*messages, answered("next"), USER)
    assert len(hashed) <= 12


def test_a_failed_attempt_is_remembered_until_one_succeeds():
    session = Session("e")
    digest = session.match(Conversation((USER,), TOOLS)).digest
    failed = record(session, [USER], "par", failed=True)
    assert session.failed_attempt(digest) == failed.id
    record(session, [USER], "whole")
    assert session.failed_attempt(digest) is None


ANSWER = st.tuples(st.sampled_from(["a", "b", ""]), st.booleans())


@given(st.lists(st.tuples(st.integers(0, 20), ANSWER), max_size=15))
def test_every_continuation_of_a_recorded_call_finds_it(plan):
    """Grow a random tree; any node's conversation plus a message extends exactly that node."""
    session, known = Session("e"), []
    for number, (pick, (text, with_call)) in enumerate(plan):
        base = known[pick % len(known)][0] if known and pick else ()
        messages = (*base, Message("user", f"question {number}"))
        call = ToolCall(f"id{number}", "shell", json.dumps({"n": number, "z": 1.0}))
        calls = (call,) if with_call else ()
        node = record(session, messages, text, calls)
        echoed = ToolCall(call.id, "shell", json.dumps({"z": 1, "n": number}))
        known.append(((*messages, answered(text, *((echoed,) if with_call else ()))), node))
    for messages, node in known[::-1] + known:
        request = Conversation((*messages, USER), TOOLS)
        match = session.match(request)
        assert match.node is node and match.known == len(messages)
        session._walks = []  # what the last request left behind changes nothing but the time
        anew = session.match(request)
        assert (anew.node, anew.messages, anew.digest) == (node, match.messages, match.digest)
        assert anew.running.digest() == match.running.digest()
        assert node.path_tokens().shape == (node.length,)
