"""JSON that nests deep: refused in the words of the protocol, or shown as text where the model wrote it."""

import json

import pytest
from gyre_proxy.nesting import DEPTH, RECORDED_DEPTH, too_deep
from gyre_proxy.parsers import TOOL_PARSERS, AnswerFormat, parse

USER = {"role": "user", "content": "look"}


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
    search = {"type": "tool_search_call", "call_id": "s", "arguments": value}
    shaped = {"type": "json_schema", "name": "n", "schema": value}
    return [
        ("messages", {"messages": [USER], "tools": [{"name": "f", "input_schema": value}]}),
        ("messages", {"messages": [USER, {"role": "assistant", "content": [use]}, result]}),
        ("chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": spec}]}),
        ("chat/completions", {"messages": [USER, *answered]}),
        ("responses", {"input": "look", "tools": [{"type": "function", **spec}]}),
        ("responses", {"input": [USER, *items]}),
        (
            "messages",
            {"messages": [USER], "tools": [{"name": "f", "input_schema": {}, "input_examples": [value]}]},
        ),
        (
            "messages",
            {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": value}}},
        ),
        ("messages", {"messages": [USER], "diagnostics": value}),
        ("responses", {"input": "look", "text": {"format": shaped}}),
        (
            "responses",
            {
                "input": "look",
                "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **spec}]}],
            },
        ),
        ("responses", {"input": [USER, search]}),
        ("responses", {"input": "look", "client_metadata": value}),
    ]


PLACES = range(len(bodies(1)))


@pytest.mark.parametrize("levels", [DEPTH + 1, 300, 600, 900])
@pytest.mark.parametrize("place", PLACES)
def test_what_nests_too_deep_is_refused_in_each_protocol(scene, levels, place):
    proxy, engine = scene(["Hello."])
    path, body = bodies(levels)[place]
    answer = proxy.post(path, body)
    assert answer.status_code == 400 and engine.requests == []
    assert "nest" in answer.json()["error"]["message"]
    assert (answer.json().get("type") == "error") == (path == "messages")


def recorded_bodies(levels):
    """(path, body) for every field that the run log repeats."""
    binding = {"type": "adaptive", "block_binding": nest(levels)}
    return [
        ("messages", {"messages": [USER], "thinking": binding}),
        ("chat/completions", {"messages": [USER], "chat_template_kwargs": nest(levels)}),
    ]


@pytest.mark.parametrize("place", [0, 1])
def test_what_the_run_log_repeats_may_nest_less_deep(scene, place):
    proxy, _ = scene(["Hello."])
    path, body = recorded_bodies(RECORDED_DEPTH)[place]
    assert proxy.post(path, body).status_code == 200 and len(proxy.calls()) == 1
    path, body = recorded_bodies(RECORDED_DEPTH + 1)[place]
    answer = proxy.post(path, body)
    assert answer.status_code == 400 and "nests deeper" in answer.text


@pytest.mark.parametrize("place", PLACES)
def test_what_nests_less_deep_is_served(scene, place):
    proxy, _ = scene(["Hello."])
    path, body = bodies(DEPTH - 1)[place]
    assert proxy.post(path, body).status_code == 200


def test_depth_counts_levels_of_both_kinds():
    assert not too_deep(nest(DEPTH)) and too_deep(nest(DEPTH + 1)) and too_deep([nest(DEPTH)])
    assert not too_deep("text") and not too_deep([1] * 10**5)


def test_a_call_of_the_model_that_nests_too_deep_is_malformed():
    def calls(levels):
        block = json.dumps({"name": "f", "arguments": nest(levels)})
        return parse(f"<tool_call>{block}</tool_call>", AnswerFormat(tools=TOOL_PARSERS["hermes"]), {}).calls

    assert calls(DEPTH) and not calls(DEPTH + 1)
