"""Requests of three protocols become one conversation; what is not supported is refused by name."""

import json

import pytest
from gyre_proxy.conversation import Answer, Message, ToolCall
from gyre_proxy.dialects import BY_PATH, chat, messages, responses
from gyre_proxy.errors import BadRequest, ContextOverflow, EngineUnavailable, Unauthorised
from hypothesis import given
from hypothesis import strategies as st

PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}}
SPEC = {"name": "shell", "description": "Run it.", "parameters": PARAMETERS}

MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [{"name": "shell", "description": "Run it.", "input_schema": PARAMETERS}],
    "messages": [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "shell", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a b", "is_error": False},
                {"type": "text", "text": "go on"},
            ],
        },
    ],
}
CHAT = {
    "model": "m",
    "tools": [{"type": "function", "function": SPEC}],
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "shell", "arguments": '{"cmd":"ls"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "a b"}]},
        {"role": "user", "content": "go on"},
    ],
}
RESPONSES = {
    "model": "m",
    "instructions": "Be brief.",
    "tools": [{"type": "function", "strict": False, **SPEC}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "call_id": "t1", "name": "shell", "arguments": '{"cmd":"ls"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "a b"},
        {"type": "message", "role": "user", "content": "go on"},
    ],
}


def test_three_protocols_give_one_conversation():
    parsed = [
        m.parse(b).conversation for m, b in ((messages, MESSAGES), (chat, CHAT), (responses, RESPONSES))
    ]
    assert parsed[0] == parsed[1] == parsed[2]
    assert parsed[0].tools == ({"type": "function", "function": SPEC},)
    assert [m.role for m in parsed[0].messages] == ["system", "user", "assistant", "tool", "user"]


def test_cache_marks_and_content_shape_make_no_difference():
    def body(content):
        return {"model": "m", "messages": [{"role": "user", "content": content}]}

    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    assert messages.parse(body(marked)).conversation == messages.parse(body("hi")).conversation


def test_the_billing_block_of_claude_code_is_not_shown_to_the_model():
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cc_is_subagent=true;"}
    body = {**MESSAGES, "system": [billing, *MESSAGES["system"]]}
    assert messages.parse(body).conversation == messages.parse(MESSAGES).conversation


def test_text_after_a_tool_call_is_the_same_turn_as_text_before_it():
    content = MESSAGES["messages"][1]["content"]
    moved = [*content[:1], content[2], content[1]]
    body = json.loads(json.dumps(MESSAGES))
    body["messages"][1]["content"] = moved
    assert messages.parse(body).conversation == messages.parse(MESSAGES).conversation


def test_system_messages_stay_where_they_are():
    body = {**MESSAGES, "messages": [*MESSAGES["messages"], {"role": "system", "content": "note"}]}
    assert messages.parse(body).conversation.messages[-1] == Message("system", "note")


def test_a_deferred_tool_is_shown_where_it_was_loaded():
    deferred = {"name": "late", "input_schema": PARAMETERS, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "late"}
    loaded = {"type": "tool_result", "tool_use_id": "t1", "content": [reference]}
    body = {
        **MESSAGES,
        "tools": [*MESSAGES["tools"], deferred],
        "messages": [*MESSAGES["messages"][:2], {"role": "user", "content": [loaded]}],
    }
    conversation = messages.parse(body).conversation
    assert conversation.tools == messages.parse(MESSAGES).conversation.tools
    assert json.loads(conversation.messages[-1].text)["function"]["name"] == "late"


def test_namespaced_and_custom_tools_come_back_as_the_client_named_them():
    agents = [{"type": "function", "name": "spawn", "parameters": PARAMETERS}]
    tools = [
        {"type": "namespace", "name": "agents", "tools": agents},
        {"type": "custom", "name": "patch", "description": "free text"},
        {"type": "web_search"},
    ]
    request = responses.parse({**RESPONSES, "tools": tools})
    assert [t["function"]["name"] for t in request.conversation.tools] == ["spawn", "patch"]
    calls = (ToolCall("c1", "spawn", '{"cmd": "x"}'), ToolCall("c2", "patch", '{"input": "*** Begin"}'))
    answer = responses.answer(request, Answer("a", 0, "", "", calls, "tool_calls", 1, 1))
    spawn, patch = answer["output"]
    assert (spawn["type"], spawn["name"], spawn["namespace"]) == ("function_call", "spawn", "agents")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
UNSUPPORTED = [
    (messages, MESSAGES, {"mcp_servers": [{}]}, "mcp_servers"),
    (messages, MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
    (messages, MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (messages, MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "structured"),
    (messages, MESSAGES, {"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
    (messages, MESSAGES, {"messages": [{"role": "assistant", "content": "started"}]}, "started answer"),
    (messages, MESSAGES, {"stop_sequences": 5}, "stop_sequences"),
    (messages, MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (messages, MESSAGES, {"messages": "hi"}, "messages"),
    (messages, MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
    (chat, CHAT, {"n": 2}, "n > 1"),
    (chat, CHAT, {"logprobs": True}, "logprobs"),
    (chat, CHAT, {"logit_bias": {"1": 1}}, "logit_bias"),
    (chat, CHAT, {"tool_choice": "required"}, "required"),
    (chat, CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (chat, CHAT, {"seed": "x"}, "seed"),
    (chat, CHAT, {"stream": "yes"}, "stream"),
    (chat, CHAT, {"messages": []}, "at least one"),
    (chat, CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    (chat, CHAT, {"tools": [{"type": "custom"}]}, "custom"),
    (responses, RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (responses, RESPONSES, {"background": True}, "background"),
    (responses, RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    (responses, RESPONSES, {"truncation": "auto"}, "truncation"),
    (responses, RESPONSES, {"tools": [{"type": "mcp"}]}, "mcp"),
    (responses, RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "structured"),
]


@pytest.mark.parametrize(("dialect", "body", "change", "words"), UNSUPPORTED)
def test_unsupported_requests_are_refused_by_name(dialect, body, change, words):
    with pytest.raises(BadRequest, match=words):
        dialect.parse({**body, **change})


@pytest.mark.parametrize("field", ["previous_response_id", "background", "conversation", "prompt"])
def test_fields_that_ask_for_nothing_are_accepted(field):
    responses.parse({**RESPONSES, field: None})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(BY_PATH)), st.data())
def test_any_json_is_parsed_or_refused_in_one_line(path, data):
    body = {"messages": MESSAGES, "chat/completions": CHAT, "responses": RESPONSES}[path]
    field = data.draw(st.sampled_from(sorted(body)))
    damaged = json.loads(json.dumps(body))
    spot = damaged[field]
    while isinstance(spot, list | dict) and spot and data.draw(st.booleans()):
        parent = spot
        key = data.draw(st.sampled_from(sorted(spot))) if isinstance(spot, dict) else len(spot) - 1
        spot = parent[key]
        if data.draw(st.booleans()):
            parent[key] = data.draw(JSON)
            break
    else:
        damaged[field] = data.draw(JSON)
    try:
        BY_PATH[path].parse(damaged)
    except BadRequest as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("dialect", "failure", "expected"),
    [
        (
            messages,
            ContextOverflow(9, 8),
            ("invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"),
        ),
        (messages, Unauthorised("no"), ("authentication_error", "no")),
        (messages, EngineUnavailable("no"), ("overloaded_error", "no")),
        (chat, EngineUnavailable("no"), ("server_error", "no")),
        (chat, BadRequest("no"), ("invalid_request_error", "no")),
    ],
)
def test_failures_read_as_the_protocol_says(dialect, failure, expected):
    error = dialect.error(failure)["error"]
    assert (error["type"], error["message"]) == expected


@pytest.mark.parametrize("dialect", [chat, responses])
def test_an_overlong_prompt_has_its_code(dialect):
    error = dialect.error(ContextOverflow(9, 8))["error"]
    assert (
        error["code"] == "context_length_exceeded"
        and "maximum context length is 8 tokens" in error["message"]
    )


def events(data):
    """(event name, data) of a stream of server-sent events."""
    out = []
    for block in data.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if lines and lines["data"] != "[DONE]":
            out.append((lines.get("event"), json.loads(lines["data"])))
    return out


DONE = Answer("a", 0, "Hi\nthere", "hm", (ToolCall("c1", "f", '{"x": 1}'),), "tool_calls", 7, 5)


def streamed(dialect, body):
    writer = dialect.Stream(dialect.parse(body), "a", 0, 7)
    parts = [
        writer.start(),
        writer.delta("reasoning", "h"),
        writer.delta("reasoning", "m"),
        writer.keepalive(),
    ]
    parts += [writer.delta("text", "Hi\n"), writer.delta("text", "there"), writer.finish(DONE)]
    return events(b"".join(parts))


def test_messages_events_open_and_close_each_block_in_order():
    names = [(e, d.get("index")) for e, d in streamed(messages, MESSAGES) if e != "content_block_delta"]
    assert names == [
        ("message_start", None),
        ("content_block_start", 0),
        ("ping", None),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]


def test_messages_start_reports_whole_usage():
    _, start = streamed(messages, MESSAGES)[0]
    assert start["message"]["usage"]["input_tokens"] == 7
    assert set(start["message"]["usage"]) >= {"cache_creation_input_tokens", "cache_read_input_tokens"}


def test_chat_chunks_share_one_id_and_number_tool_calls():
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [d for _, d in streamed(chat, body)]
    assert {c["id"] for c in chunks} == {"chatcmpl-a"}
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert "".join(d.get("content") or "" for d in deltas) == DONE.text
    assert [d["tool_calls"][0]["index"] for d in deltas if "tool_calls" in d] == [0]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def test_responses_events_are_numbered_and_items_equal_the_final_output():
    data = streamed(responses, RESPONSES)
    assert [d["sequence_number"] for _, d in data] == list(range(len(data)))
    items = [d["item"] for e, d in data if e == "response.output_item.done"]
    assert data[-1][0] == "response.completed" and data[-1][1]["response"]["output"] == items
    added = [d["output_index"] for e, d in data if e == "response.output_item.added"]
    assert added == [0, 1, 2]


@pytest.mark.parametrize(("asked", "status"), [(None, "completed"), (5, "incomplete"), (50, "completed")])
def test_only_the_clients_own_limit_makes_a_response_incomplete(asked, status):
    request = responses.parse({**RESPONSES, "max_output_tokens": asked})
    cut = Answer("a", 0, "cut of", "", (), "length", 7, 5)
    assert responses.answer(request, cut)["status"] == status


def test_a_custom_call_without_text_input_shows_its_arguments():
    request = responses.parse({**RESPONSES, "tools": [{"type": "custom", "name": "f"}]})
    item = responses.answer(request, DONE)["output"][-1]
    assert item["type"] == "custom_tool_call" and item["input"] == '{"x": 1}'
