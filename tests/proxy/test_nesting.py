"""JSON that nests deep: refused in the words of the protocol, or shown as text where the model wrote it."""

import json

import pytest
from gyre_proxy.nesting import DEPTH, too_deep
from gyre_proxy.parsers import TOOL_PARSERS, AnswerFormat, parse

USER = {"role": "user", "content": "look"}
ROOM = DEPTH - 8
"""Levels that fit inside any field of a request."""


def nest(levels):
    value = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def bodies(levels):
    """(path, body) for every field of three protocols in which a harness may nest."""
    value, text = nest(levels), json.dumps(nest(levels))
    use = {"type": "tool_use", "id": "t", "name": "f", "input": value}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": text}}
    answered = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "x"},
    ]
    items = [
        {"type": "function_call", "name": "f", "call_id": "t", "arguments": text},
        {"type": "function_call_output", "call_id": "t", "output": "x"},
    ]
    spec = {"name": "f", "parameters": value}
    return [
        ("messages", {"messages": [USER], "tools": [{"name": "f", "input_schema": value}]}),
        ("messages", {"messages": [USER, {"role": "assistant", "content": [use]}, result]}),
        ("chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": spec}]}),
        ("chat/completions", {"messages": [USER, *answered]}),
        ("responses", {"input": "look", "tools": [{"type": "function", **spec}]}),
        ("responses", {"input": [USER, *items]}),
    ]


@pytest.mark.parametrize("levels", [DEPTH + 1, 300, 600, 900])
@pytest.mark.parametrize("place", range(6))
def test_what_nests_too_deep_is_refused_in_each_protocol(scene, levels, place):
    proxy, engine = scene(["Hello."])
    path, body = bodies(levels)[place]
    answer = proxy.post(path, body)
    assert answer.status_code == 400 and engine.requests == []
    assert "nest" in answer.json()["error"]["message"]
    assert (answer.json().get("type") == "error") == (path == "messages")


@pytest.mark.parametrize("place", range(6))
def test_what_nests_less_deep_is_served(scene, place):
    proxy, _ = scene(["Hello."])
    path, body = bodies(ROOM)[place]
    assert proxy.post(path, body).status_code == 200


def test_depth_counts_levels_of_both_kinds():
    assert not too_deep(nest(DEPTH)) and too_deep(nest(DEPTH + 1)) and too_deep([nest(DEPTH)])
    assert not too_deep("text") and not too_deep([1] * 10**5)


def test_a_call_of_the_model_that_nests_too_deep_is_malformed():
    def calls(levels):
        block = json.dumps({"name": "f", "arguments": nest(levels)})
        return parse(f"<tool_call>{block}</tool_call>", AnswerFormat(tools=TOOL_PARSERS["hermes"]), {}).calls

    assert calls(DEPTH) and not calls(DEPTH + 1)
