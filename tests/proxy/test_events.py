"""Answers, event streams and errors as the three protocols write them."""

import json

import pytest
from gyre_proxy.conversation import Answer, ToolCall
from gyre_proxy.dialects import chat, messages, responses
from gyre_proxy.errors import BadRequest, ContextOverflow, EngineUnavailable, Unauthorised
from protocol_bodies import CHAT, MESSAGES, RESPONSES


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
