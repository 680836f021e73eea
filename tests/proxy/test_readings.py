"""A growing conversation is read once: what was read before is taken over, and nothing else changes."""

import copy
import random

import orjson
import pytest
from gyre_proxy import dialects
from gyre_proxy.dialects import chat_request, messages_request, responses_request
from gyre_proxy.dialects.checks import BadField
from gyre_proxy.dialects.readings import MOVING, Readings
from trace_replay import scenarios

READERS = (messages_request._Reader, chat_request._Reader, responses_request._Reader)
TEXT = {"messages": "messages", "chat/completions": "messages", "responses": "input"}


def bodies(protocol: str, turns: int = 12) -> list[dict]:
    """The requests of one agent, each longer than the one before."""
    tool = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    if protocol == "messages":
        tools = [
            {"name": "sh", "input_schema": tool},
            {"name": "late", "input_schema": tool, "defer_loading": True},
        ]
        call = {"type": "tool_use", "id": "c{}", "name": "sh", "input": {"cmd": "ls {}"}}
        reference = [{"type": "tool_reference", "tool_name": "late"}]
        turn = [
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "t{}", "signature": "s"}, call],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c{}", "content": reference}],
            },
        ]
        first = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
    elif protocol == "chat/completions":
        tools = [{"type": "function", "function": {"name": "sh", "parameters": tool}}]
        call = {"id": "c{}", "type": "function", "function": {"name": "sh", "arguments": '{"cmd": "{}"}'}}
        turn = [
            {"role": "assistant", "content": "x{}", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c{}", "content": "r{}"},
        ]
        first = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    else:
        tools = [{"type": "function", "name": "sh", "parameters": tool}, {"type": "custom", "name": "patch"}]
        turn = [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t{}"}]},
            {"type": "function_call", "call_id": "c{}", "name": "sh", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c{}", "output": "r{}"},
            {
                "type": "additional_tools",
                "tools": [{"type": "function", "name": "late{}", "parameters": tool}],
            },
        ]
        first = [{"role": "developer", "content": "s"}, {"role": "user", "content": "go"}]
    out, items = [], first
    for n in range(turns):
        out.append({"model": "m", "max_tokens": 9, "tools": tools, TEXT[protocol]: items})
        if protocol != "messages":
            del out[-1]["max_tokens"]
        items = items + [_filled(item, n) for item in turn]
    return out


def _filled(value, n):
    if isinstance(value, str):
        return value.replace("{}", str(n)) if value != "{}" else value
    if isinstance(value, list):
        return [_filled(inner, n) for inner in value]
    return {key: _filled(inner, n) for key, inner in value.items()} if isinstance(value, dict) else value


def known(readings, field, body):
    """Items of the body that need not be read again."""
    tools, text = orjson.dumps(body.get("tools")), orjson.dumps(body[field])
    return max(readings.resume(reader, tools, text)[1] for reader in READERS)


def meant(parse, body, readings=None):
    """The request, or why it is none."""
    try:
        return parse(body, readings)
    except BadField as error:
        return str(error)


@pytest.mark.parametrize("protocol", TEXT)
def test_a_growing_conversation_means_the_same_read_at_once_or_by_and_by(protocol):
    readings, parse = Readings(), dialects.BY_PATH[protocol].parse
    for body in bodies(protocol):
        assert parse(copy.deepcopy(body), readings) == parse(body)
    assert known(readings, TEXT[protocol], body) == len(body[TEXT[protocol]]) - MOVING


def test_two_protocols_that_send_the_same_items_do_not_share_what_was_read():
    """Messages and Chat Completions name their list alike, and plain messages are the same in both."""
    said = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": f"m{n}"} for n in range(2 * MOVING + 1)
    ]
    readings, parsers = (
        Readings(),
        [dialects.BY_PATH[path].parse for path in ("messages", "chat/completions")],
    )
    for parse in parsers * 2:
        assert parse({"messages": said}, readings) == parse({"messages": said})


@pytest.mark.parametrize("one, other", [(True, 1), (1, 1.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})])
def test_what_only_python_takes_for_equal_is_read_anew(one, other):
    readings, parse = Readings(), dialects.BY_PATH["messages"].parse
    (body,) = bodies("messages")[-1:]
    for value in (one, other):
        changed = copy.deepcopy(body)
        changed["messages"][1]["content"][1]["input"] = {"x": value}
        assert repr(parse(changed, readings)) == repr(parse(copy.deepcopy(changed)))


@pytest.mark.parametrize("protocol", TEXT)
def test_agents_that_speak_in_turns_and_changed_pasts_are_read_right(protocol):
    readings, parse, chance = Readings(), dialects.BY_PATH[protocol].parse, random.Random(0)
    field, known = TEXT[protocol], bodies(protocol)
    for _ in range(200):
        body = copy.deepcopy(chance.choice(known))
        items = body[field]
        change = chance.randrange(5)
        if change == 0:
            items[chance.randrange(len(items))] = {"role": "user", "content": "other"}
        elif change == 1:
            del items[chance.randrange(len(items)) :]
        elif change == 2:
            body["tools"] = body["tools"][:1]
        assert meant(parse, copy.deepcopy(body), readings) == meant(parse, body)


@pytest.mark.parametrize("protocol", TEXT)
def test_a_bad_item_behind_known_ones_is_named_by_its_place(protocol):
    readings, parse, field = Readings(), dialects.BY_PATH[protocol].parse, TEXT[protocol]
    for body in bodies(protocol):
        parse(copy.deepcopy(body), readings)
    body[field][-1] = {"role": "user", "content": 5}
    with pytest.raises(BadField) as fresh:
        parse(copy.deepcopy(body))
    with pytest.raises(BadField) as known:
        parse(body, readings)
    assert str(known.value) == str(fresh.value) and known.value.param == fresh.value.param
    assert f"{field}[{len(body[field]) - 1}]" in str(known.value)


def test_a_begun_answer_is_never_part_of_what_is_known():
    """The known items may reach as far as the message that begins the answer."""
    readings, parse = Readings(), dialects.BY_PATH["messages"].parse
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"m{n}"} for n in range(13)]
    parse({"model": "m", "max_tokens": 9, "messages": turns}, readings)
    for end in range(2, 13, 2):
        body = {"model": "m", "max_tokens": 9, "messages": turns[:end]}
        assert parse(copy.deepcopy(body), readings) == parse(body)


@pytest.mark.parametrize("depth", [150, 250, 300, 900])
@pytest.mark.parametrize("protocol", TEXT)
def test_what_nests_too_deep_is_refused_like_at_first(protocol, depth):
    readings, parse = Readings(), dialects.BY_PATH[protocol].parse
    body = bodies(protocol)[-1]
    parse(copy.deepcopy(body), readings)
    deep = []
    for _ in range(depth):
        deep = [deep]
    body[TEXT[protocol]].append({"role": "user", "content": [{"type": "text", "text": deep}]})
    assert meant(parse, body, readings) == meant(parse, body)


@pytest.mark.parametrize("field, value", [("tools", 5), ("model", 5), ("tool_choice", "sometimes")])
def test_fields_beside_the_known_items_are_checked_every_time(field, value):
    readings, parse = Readings(), dialects.BY_PATH["chat/completions"].parse
    for body in bodies("chat/completions"):
        parse(copy.deepcopy(body), readings)
    with pytest.raises(BadField, match=field):
        parse(body | {field: value}, readings)


def test_recorded_requests_of_harnesses_mean_the_same():
    compared, taken_over = 0, 0
    for steps in scenarios().values():
        readings = Readings()
        for _, request, _ in steps:
            body = request["body"]
            protocol = next((p for p in TEXT if f"/v1/{p}" in request["path"]), None)
            if protocol is None:
                continue
            parse, field = dialects.BY_PATH[protocol].parse, TEXT[protocol]
            try:
                fresh = parse(copy.deepcopy(body))
            except BadField:
                continue
            taken_over += known(readings, field, body) > 0
            assert parse(body, readings) == fresh
            compared += 1
    assert compared > 300 and taken_over > 50
