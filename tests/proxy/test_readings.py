"""A growing conversation is read once: what was read before is taken over, and nothing else changes."""

import copy
import json
import random

import orjson
import pytest
from gyre_proxy import dialects
from gyre_proxy.bodies import request_body
from gyre_proxy.dialects.checks import BadField
from gyre_proxy.dialects.readings import MOVING, Readings
from gyre_proxy.errors import BadRequest
from trace_replay import scenarios

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


def read(protocol, body, readings=None):
    """The request of a body, an object or bytes, as it is read with the memory of an execution."""
    dialect = dialects.BY_PATH[protocol]
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return dialect.parse(request_body({}, raw, readings, dialect.Reader))


def known(protocol, readings, body):
    """Items of the body that need not be read again."""
    found = readings.resume(dialects.BY_PATH[protocol].Reader, orjson.dumps(body))
    return found.known if found else 0


def meant(protocol, body, readings=None):
    """The request, or why it is none."""
    try:
        return read(protocol, body, readings)
    except BadField as error:
        return str(error)


@pytest.mark.parametrize("protocol", TEXT)
def test_a_growing_conversation_means_the_same_read_at_once_or_by_and_by(protocol):
    readings = Readings()
    for body in bodies(protocol):
        assert read(protocol, body, readings) == read(protocol, body)
    assert known(protocol, readings, {**body, TEXT[protocol]: body[TEXT[protocol]] + ["more"]}) == (
        len(body[TEXT[protocol]]) - MOVING
    )


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("protocol", TEXT)
def test_fields_may_stand_before_the_list_or_behind_it(protocol, order):
    readings = Readings()
    for number, body in enumerate(bodies(protocol)):
        body = dict(list(body.items())[::order]) | {"model": f"m{number}" if order == -1 else "m"}
        assert read(protocol, body, readings) == read(protocol, body)
    assert known(protocol, readings, body)


WRITINGS = (
    lambda body: json.dumps(body).encode(),
    lambda body: json.dumps(body, indent=2).encode(),
    lambda body: json.dumps(body, ensure_ascii=False).encode(),
)


@pytest.mark.parametrize("text", ['"]}', "\\", '\\"', '"messages": [', "[{,", "ä\u2028😀", '{"a": [1, "]"]}'])
@pytest.mark.parametrize("write", WRITINGS)
@pytest.mark.parametrize("protocol", TEXT)
def test_texts_that_look_like_json_and_blanks_between_values_change_nothing(protocol, write, text):
    readings = Readings()
    for body in bodies(protocol):
        said = orjson.loads(orjson.dumps(body[TEXT[protocol]]).replace(b'"go"', orjson.dumps(text)))
        raw = write({"metadata": {"user_id": text}, **body, TEXT[protocol]: said})
        assert read(protocol, raw, readings) == read(protocol, raw)
    assert readings.resume(dialects.BY_PATH[protocol].Reader, raw).known


def test_two_protocols_that_send_the_same_items_do_not_share_what_was_read():
    """Messages and Chat Completions name their list alike, and plain messages are the same in both."""
    said = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": f"m{n}"} for n in range(2 * MOVING + 1)
    ]
    readings = Readings()
    for protocol in ("messages", "chat/completions") * 2:
        assert read(protocol, {"messages": said}, readings) == read(protocol, {"messages": said})


@pytest.mark.parametrize("one, other", [(True, 1), (1, 1.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})])
def test_what_only_python_takes_for_equal_is_read_anew(one, other):
    readings = Readings()
    (body,) = bodies("messages")[-1:]
    for value in (one, other):
        changed = copy.deepcopy(body)
        changed["messages"][1]["content"][1]["input"] = {"x": value}
        assert repr(read("messages", changed, readings)) == repr(read("messages", changed))


@pytest.mark.parametrize("protocol", TEXT)
def test_agents_that_speak_in_turns_and_changed_pasts_are_read_right(protocol):
    readings, chance = Readings(), random.Random(0)
    field, sent = TEXT[protocol], bodies(protocol)
    for _ in range(200):
        body = copy.deepcopy(chance.choice(sent))
        items = body[field]
        change = chance.randrange(5)
        if change == 0:
            items[chance.randrange(len(items))] = {"role": "user", "content": "other"}
        elif change == 1:
            del items[chance.randrange(len(items)) :]
        elif change == 2:
            body["tools"] = body["tools"][:1]
        assert meant(protocol, body, readings) == meant(protocol, body)


@pytest.mark.parametrize("place", ["before", "behind", "between"])
@pytest.mark.parametrize("again", ["list", "model", "tools"])
@pytest.mark.parametrize("protocol", TEXT)
def test_of_a_field_that_comes_twice_the_last_counts(protocol, again, place):
    """Also when the first was part of what is known, or the second is not there any more."""
    sent = [bodies(protocol)[n] for n in (5, 7, 9)]
    names = {"list": TEXT[protocol]}
    for twice in ([1], [0, 1], [0], [0, 1, 2]):
        readings = Readings()
        for number, body in enumerate(sent):
            fields = [orjson.dumps({name: value})[1:-1] for name, value in body.items()]
            if number in twice:
                name = names.get(again, again)
                value = {"list": body[TEXT[protocol]][:1], "model": "x", "tools": body["tools"][:1]}[again]
                where = {"before": 0, "between": 2, "behind": len(fields)}[place]
                fields.insert(where, orjson.dumps({name: value})[1:-1])
            raw = b"{" + b",".join(fields) + b"}"
            assert meant(protocol, raw, readings) == meant(protocol, raw), (twice, number)


@pytest.mark.parametrize("protocol", TEXT)
def test_any_bytes_behind_what_is_known_mean_what_they_mean_at_first(protocol):
    """Cut, doubled, swapped and foreign bytes: taken up or not, the request is the same, or the same error."""
    chance, dialect = random.Random(1), dialects.BY_PATH[protocol]
    early, late = (orjson.dumps(body) for body in (bodies(protocol)[8], bodies(protocol)[11]))
    taken_up = 0
    for _ in range(400):
        readings = Readings()
        for raw in (early, early):
            read(protocol, raw, readings)
        raw = bytearray(late)
        for _ in range(chance.randrange(1, 4)):
            at, to = sorted(chance.randrange(len(raw)) for _ in range(2))
            change = chance.randrange(4)
            if change == 0:
                raw[at : at + 1] = chance.choice(
                    [b"]", b"}", b"{", b"[", b",", b'"', b"\\", b" ", b"1", b"\xff"]
                )
            elif change == 1:
                del raw[at : min(to, at + chance.randrange(40))]
            elif change == 2:
                raw[at:at] = raw[at : min(to, at + chance.randrange(400))]
            else:
                raw += raw[at:to]
        raw, found = bytes(raw), []
        for memory in (readings, None):
            try:
                found.append(repr(read(protocol, raw, memory)))
            except BadRequest as error:
                found.append(str(error))
        taken_up += readings.resume(dialect.Reader, raw) is not None
        assert found[0] == found[1]
    assert taken_up > 3


@pytest.mark.parametrize("protocol", TEXT)
@pytest.mark.parametrize("tail", [b",]}", b", ]}", b"]}", b",,]}", b",null]}"])
def test_what_ends_behind_known_items_means_what_it_means_at_first(protocol, tail):
    readings, field = Readings(), TEXT[protocol]
    body = {name: value for name, value in bodies(protocol)[-1].items() if name != field}
    items = bodies(protocol)[-1][field]
    read(protocol, {**body, field: items}, readings)
    raw = orjson.dumps({**body, field: items[:-MOVING]})[:-2] + tail
    found = []
    for memory in (readings, None):
        try:
            found.append(repr(read(protocol, raw, memory)))
        except BadRequest as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("marked", [(-1,), (-2, -1), (-3, -1)])
def test_marks_that_move_on_leave_the_rest_known(marked):
    readings, said = Readings(), []
    for turn in range(8):
        said.append({"role": "user", "content": [{"type": "text", "text": f"u{turn}"}]})
        sent = copy.deepcopy(said)
        for at in marked:
            if -at <= len(sent):
                sent[at]["content"][0]["cache_control"] = {"type": "ephemeral"}
        body = {"model": "m", "max_tokens": 9, "messages": sent}
        taken_up = known("messages", readings, body)
        assert read("messages", body, readings) == read("messages", body)
        said.append({"role": "assistant", "content": [{"type": "text", "text": f"a{turn}"}]})
    assert taken_up >= len(sent) - 5


def test_a_list_of_very_many_values_is_not_worth_noting(monkeypatch):
    monkeypatch.setattr("gyre_proxy.dialects.readings._TOKENS", 100)
    readings = Readings()
    for body in bodies("messages"):
        assert read("messages", body, readings) == read("messages", body)


@pytest.mark.parametrize("protocol", TEXT)
def test_a_bad_item_behind_known_ones_is_named_by_its_place(protocol):
    readings, field = Readings(), TEXT[protocol]
    for body in bodies(protocol):
        read(protocol, body, readings)
    body[field][-1] = {"role": "user", "content": 5}
    with pytest.raises(BadField) as fresh:
        read(protocol, body)
    with pytest.raises(BadField) as resumed:
        read(protocol, body, readings)
    assert str(resumed.value) == str(fresh.value) and resumed.value.param == fresh.value.param
    assert f"{field}[{len(body[field]) - 1}]" in str(resumed.value)


def test_a_begun_answer_is_never_part_of_what_is_known():
    """The known items may reach as far as the message that begins the answer."""
    readings = Readings()
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"m{n}"} for n in range(13)]
    read("messages", {"model": "m", "max_tokens": 9, "messages": turns}, readings)
    for end in range(2, 13, 2):
        body = {"model": "m", "max_tokens": 9, "messages": turns[:end]}
        assert read("messages", body, readings) == read("messages", body)


def test_a_bad_begun_answer_behind_known_items_is_named_by_its_place():
    readings = Readings()
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"m{n}"} for n in range(20)]
    for end in (17, 19):
        read("messages", {"model": "m", "max_tokens": 9, "messages": turns[:end]}, readings)
    body = {"model": "m", "max_tokens": 9, "messages": [*turns[:19], {"role": "assistant", "content": "x "}]}
    assert known("messages", readings, body)
    with pytest.raises(BadField, match=r"messages\[19\].content"):
        read("messages", body, readings)


@pytest.mark.parametrize("depth", [150, 250, 300, 900, 1100])
@pytest.mark.parametrize("protocol", TEXT)
@pytest.mark.parametrize("where", ["items", "tools"])
def test_what_nests_too_deep_is_refused_like_at_first(protocol, depth, where):
    readings, body = Readings(), bodies(protocol)[-1]
    read(protocol, body, readings)
    tag = '"deep"'
    if where == "items":
        body[TEXT[protocol]].append({"role": "user", "content": [{"type": "text", "text": "deep"}]})
    else:
        body["tools"] = [*body["tools"], "deep"]
    raw = orjson.dumps(body).replace(tag.encode(), b"[" * depth + b"]" * depth)
    found = []
    for memory in (readings, None):
        with pytest.raises(BadRequest) as refused:
            read(protocol, raw, memory)
        found.append(str(refused.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("field, value", [("tools", 5), ("model", 5), ("tool_choice", "sometimes")])
def test_fields_beside_the_known_items_are_checked_every_time(field, value):
    readings = Readings()
    for body in bodies("chat/completions"):
        read("chat/completions", body, readings)
    with pytest.raises(BadField, match=field):
        read("chat/completions", body | {field: value}, readings)


def test_recorded_requests_of_harnesses_mean_the_same():
    compared, taken_up = 0, 0
    for steps in scenarios().values():
        readings = Readings()
        for _, request, _ in steps:
            body = request["body"]
            protocol = next((p for p in TEXT if f"/v1/{p}" in request["path"]), None)
            if protocol is None:
                continue
            try:
                fresh = read(protocol, body)
            except BadField:
                continue
            taken_up += known(protocol, readings, body) > 0
            assert read(protocol, body, readings) == fresh
            compared += 1
    assert compared > 300 and taken_up > 50
