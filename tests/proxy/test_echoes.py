"""An answer that comes back in the next request means what it meant when it left."""

import json
from types import ModuleType

import orjson
import pytest
from gyre_proxy.conversation import Answer, Message, ToolCall
from gyre_proxy.dialects import chat, messages, responses
from hypothesis import given
from hypothesis import strategies as st
from protocol_bodies import PARAMETERS, user

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=4).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
NAMES = ("plain", "patch", "tool_search", "spawn", "crm__spawn")


def offered() -> dict[ModuleType, dict]:
    """For each protocol a body that offers the tools in its own way."""
    functions = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
    spaces = [
        {"type": "namespace", "name": space, "tools": [{"type": "function", "name": "spawn"}]}
        for space in ("agents", "crm")
    ]
    return {
        messages: {
            "messages": [user("go")],
            "tools": [{"name": name, "input_schema": PARAMETERS} for name in NAMES],
        },
        chat: {
            "messages": [user("go")],
            "tools": [{"type": "function", "function": function} for function in functions],
        },
        responses: {
            "input": [user("go")],
            "tools": [
                {"type": "function", **functions[0]},
                {"type": "custom", "name": "patch"},
                {"type": "tool_search", "execution": "client"},
                *spaces,
            ],
        },
    }


BODIES = offered()


def echoed(dialect: ModuleType, body: dict, done: Answer) -> list[Message]:
    """What the next request of a client says that repeats the answer as it got it."""
    answer = orjson.loads(orjson.dumps(dialect.answer(dialect.parse(body), done)))
    if dialect is responses:
        said = {"input": [*body["input"], *answer["output"], user("next")]}
    elif dialect is chat:
        said = {"messages": [*body["messages"], answer["choices"][0]["message"], user("next")]}
    else:
        turn = {"role": "assistant", "content": answer["content"]}
        said = {"messages": [*body["messages"], turn, user("next")]}
    conversation = dialect.parse({**body, **said}).conversation
    return list(conversation.messages[1:-1])


@pytest.mark.parametrize("dialect", BODIES)
@given(text=TEXTS, reasoning=TEXTS, calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=3))
def test_an_answer_comes_back_as_it_was(dialect, text, reasoning, calls):
    made = tuple(ToolCall(f"c{i}", name, arguments) for i, (name, arguments) in enumerate(calls))
    if dialect is responses:  # a custom tool takes one text
        made = tuple(
            ToolCall(call.id, call.name, json.dumps({"input": call.arguments}))
            if call.name == "patch"
            else call
            for call in made
        )
    done = Answer("a", 0, text, reasoning, made, "tool_calls" if made else "stop", 7, 5)
    seen = echoed(dialect, BODIES[dialect], done)
    if not (text or made):
        assert len(seen) <= 1  # an answer without a word may leave no trace
        return
    (turn,) = seen
    assert (turn.role, turn.text, turn.reasoning) == ("assistant", text, reasoning)
    assert [(c.id, c.name, c.parsed()) for c in turn.tool_calls] == [(c.id, c.name, c.parsed()) for c in made]


@given(arguments=ARGUMENTS)
def test_a_custom_call_without_its_one_text_shows_its_arguments(arguments):
    done = Answer("a", 0, "", "", (ToolCall("c", "patch", arguments),), "tool_calls", 7, 5)
    (item,) = responses.answer(responses.parse(BODIES[responses]), done)["output"]
    given_text = json.loads(arguments).get("input")
    assert item["input"] == (given_text if isinstance(given_text, str) else arguments)
