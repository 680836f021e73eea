"""The official SDKs read what the dialects write: answers of every make, streamed and whole, and every error."""

import importlib
import json
from dataclasses import replace
from types import ModuleType

import anthropic
import openai
import orjson
import pytest
from gyre_proxy.conversation import Answer, ToolCall
from gyre_proxy.dialects import chat, messages, responses
from gyre_proxy.errors import BadRequest, ContextOverflow, ProxyError
from protocol_bodies import CHAT, MESSAGES, RESPONSES

CALLS = (ToolCall("c1", "shell", '{"cmd": "ls"}'), ToolCall("c2", "shell", "{}"))
ANSWERS = {
    "text": Answer("a", 0, "Hi\nthere ☃", "", (), "stop", 7, 5),
    "every line end": Answer(
        "a", 0, "a\u2028b\x85c\r\nd\x0be\x1cf\n\ndata: g", "h\u2029\n\nevent: i", (), "stop", 7, 5
    ),
    "thinking": Answer("a", 0, "Hi", "hm\n\nand so on", (), "stop", 7, 5),
    "thinking alone": Answer("a", 0, "", "hm", (), "stop", 7, 5),
    "one call": Answer("a", 0, "", "", CALLS[:1], "tool_calls", 7, 5),
    "all of it": Answer("a", 0, "I look.", "hm", CALLS, "tool_calls", 7, 5, reused_tokens=4),
    "nothing": Answer("a", 0, "", "", (), "stop", 7, 1),
    "cut": Answer("a", 0, "Hi the", "", (), "length", 7, 5),
    "stopped": Answer("a", 0, "Hi", "", (), "stop", 7, 5, stop_string="\n"),
}
every_answer = pytest.mark.parametrize("done", ANSWERS.values(), ids=ANSWERS)


def transport(sdk: ModuleType, status: int, body: bytes, kind: str) -> object:
    """A client's transport that answers every request with the body."""
    http = importlib.import_module(sdk.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
    answer = http.Response(status, content=body, headers={"content-type": kind})
    return sdk.DefaultHttpxClient(transport=http.MockTransport(lambda request: answer))


def client(sdk: ModuleType, body: bytes, status: int = 200, kind: str = "application/json") -> object:
    make = anthropic.Anthropic if sdk is anthropic else openai.OpenAI
    inner = transport(sdk, status, body, kind)
    return make(base_url="http://proxy/v1", api_key="k", http_client=inner, max_retries=0)


def stream(dialect: ModuleType, body: dict, done: Answer) -> bytes:
    """The answer as a stream of small pieces, with signs of life between them."""
    request = dialect.parse({**body, "stream": True})
    writer = dialect.Stream(request, done.id, done.created, done.prompt_tokens, done.reused_tokens)
    out = writer.start() + writer.keepalive()
    for kind, text in (("reasoning", done.reasoning), ("text", done.text)):
        for i in range(0, len(text), 3):
            out += writer.delta(kind, text[i : i + 3]) + writer.keepalive()
    return out + writer.finish(done)


def events(data: bytes) -> list[dict]:
    blocks = [block for block in data.decode().split("\n\n") if block]
    return [
        json.loads(line.removeprefix("data: "))
        for block in blocks
        for line in block.split("\n")
        if line.startswith("data: ") and line != "data: [DONE]"
    ]


# --- Messages


@every_answer
def test_the_messages_sdk_reads_the_same_whole_and_streamed(done):
    whole = client(anthropic, orjson.dumps(messages.answer(messages.parse(MESSAGES), done)))
    given = {"model": "m", "max_tokens": 9, "messages": MESSAGES["messages"]}
    one = whole.messages.create(**given)
    two_client = client(anthropic, stream(messages, MESSAGES, done), kind="text/event-stream")
    with two_client.messages.stream(**given) as events:
        two = events.get_final_message()
    assert one.model_dump(exclude={"content"}) == two.model_dump(exclude={"content"})
    plain = [b.model_dump(exclude={"parsed_output", "citations"}) for b in one.content]
    assert plain == [b.model_dump(exclude={"parsed_output", "citations"}) for b in two.content]
    assert "".join(b.text for b in two.content if b.type == "text") == done.text
    assert "".join(b.thinking for b in two.content if b.type == "thinking") == done.reasoning
    called = [(b.id, b.name, b.input) for b in two.content if b.type == "tool_use"]
    assert called == [(call.id, call.name, json.loads(call.arguments)) for call in done.tool_calls]
    usage = two.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == 7
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (
        done.reused_tokens,
        done.completion_tokens,
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [("text", "end_turn"), ("one call", "tool_use"), ("cut", "max_tokens"), ("stopped", "stop_sequence")],
)
def test_messages_say_why_they_end(name, reason):
    body = messages.answer(messages.parse(MESSAGES), ANSWERS[name])
    assert body["stop_reason"] == reason
    assert body["stop_sequence"] == ("\n" if reason == "stop_sequence" else None)


def test_messages_blocks_come_in_order_each_opened_and_closed_once():
    seen = events(stream(messages, MESSAGES, ANSWERS["all of it"]))
    assert [e["type"] for e in seen][0] == "message_start"
    assert [e["type"] for e in seen][-2:] == ["message_delta", "message_stop"]
    assert {"type": "ping"} in seen
    blocks = [e for e in seen if e["type"].startswith("content_block")]
    assert [e["index"] for e in blocks] == sorted(e["index"] for e in blocks)
    for index, last in (
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
        (3, "input_json_delta"),
    ):
        own = [e for e in blocks if e["index"] == index]
        assert [own[0]["type"], own[-1]["type"]] == ["content_block_start", "content_block_stop"]
        assert own[-2]["delta"]["type"] == last
    start = seen[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] == 3


# --- Chat Completions


def test_the_chat_sdk_reads_an_answer_that_was_cut():
    """Piece by piece: its helper for whole answers raises an error for those."""
    sdk = client(openai, stream(chat, CHAT, ANSWERS["cut"]), kind="text/event-stream")
    chunks = list(sdk.chat.completions.create(model="m", messages=CHAT["messages"], stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hi the"
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("done", [d for d in ANSWERS.values() if d.finish != "length"])
def test_the_chat_sdk_reads_the_same_whole_and_streamed(done):
    body = {**CHAT, "stream_options": {"include_usage": True}}
    whole = client(openai, orjson.dumps(chat.answer(chat.parse(body), done)))
    given = {"model": "m", "messages": CHAT["messages"]}
    one = whole.chat.completions.create(**given)
    two_client = client(openai, stream(chat, body, done), kind="text/event-stream")
    options = {"stream_options": {"include_usage": True}}
    with two_client.chat.completions.stream(**given, **options) as events:
        two = events.get_final_completion()
    first, second = one.choices[0].message, two.choices[0].message
    assert (first.content or "") == (second.content or "") == done.text
    extra = [(m.model_extra or {}).get("reasoning_content") or "" for m in (first, second)]
    assert extra == [done.reasoning] * 2
    called = [(c.id, c.type, c.function.name, c.function.arguments) for c in second.tool_calls or ()]
    assert called == [(c.id, c.type, c.function.name, c.function.arguments) for c in first.tool_calls or ()]
    assert called == [(c.id, "function", c.name, c.arguments) for c in done.tool_calls]
    assert one.choices[0].finish_reason == two.choices[0].finish_reason == done.finish
    assert one.usage == two.usage and one.usage.total_tokens == 7 + done.completion_tokens
    assert one.usage.prompt_tokens_details.cached_tokens == done.reused_tokens
    assert one.id == two.id


def test_chat_chunks_are_a_role_then_deltas_then_the_reason_then_usage():
    data = stream(chat, {**CHAT, "stream_options": {"include_usage": True}}, ANSWERS["all of it"])
    assert data.endswith(b"data: [DONE]\n\n")
    seen = events(data)
    assert seen[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert seen[-1]["choices"] == [] and seen[-1]["usage"]["prompt_tokens"] == 7
    assert seen[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert len({chunk["id"] for chunk in seen}) == 1
    deltas = [
        c["choices"][0]["delta"]["tool_calls"][0]
        for c in seen[:-2]
        if "tool_calls" in c["choices"][0]["delta"]
    ]
    assert [d["index"] for d in deltas] == [0, 0, 1, 1]
    assert [set(d) for d in deltas] == [{"index", "id", "type", "function"}, {"index", "function"}] * 2
    assert deltas[0]["function"] == {"name": "shell", "arguments": ""}


def test_chat_streams_without_the_wish_have_no_usage():
    seen = events(stream(chat, CHAT, ANSWERS["text"]))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in seen)


# --- Responses


@every_answer
def test_the_responses_sdk_reads_the_same_whole_and_streamed(done):
    whole = client(openai, orjson.dumps(responses.answer(responses.parse(RESPONSES), done)))
    one = whole.responses.create(model="m", input="hi")
    two_client = client(openai, stream(responses, RESPONSES, done), kind="text/event-stream")
    seen = list(two_client.responses.create(model="m", input="hi", stream=True))
    assert seen[-1].response.to_dict() == one.to_dict()
    again = client(openai, stream(responses, RESPONSES, done), kind="text/event-stream")
    with again.responses.stream(model="m", input="hi") as events:
        two = events.get_final_response()
    assert two.output_text == one.output_text == done.text
    thoughts = [s.text for item in two.output if item.type == "reasoning" for s in item.summary]
    assert "".join(thoughts) == done.reasoning
    called = [(i.call_id, i.name, i.arguments) for i in two.output if i.type == "function_call"]
    assert called == [(call.id, call.name, call.arguments) for call in done.tool_calls]
    usage = one.usage
    assert (usage.input_tokens, usage.output_tokens) == (7, done.completion_tokens)
    assert usage.input_tokens_details.cached_tokens == done.reused_tokens
    assert one.status == "completed"


def test_responses_events_are_numbered_and_every_item_is_whole():
    seen = events(stream(responses, RESPONSES, ANSWERS["all of it"]))
    assert [e["sequence_number"] for e in seen] == list(range(len(seen)))
    assert [e["type"] for e in seen[:2]] == ["response.created", "response.in_progress"]
    assert seen[-1]["type"] == "response.completed"
    items = [e["item"] for e in seen if e["type"] == "response.output_item.done"]
    assert seen[-1]["response"]["output"] == items
    added = [e for e in seen if e["type"] == "response.output_item.added"]
    assert [e["output_index"] for e in added] == [0, 1, 2, 3]
    assert [e["item"]["id"] for e in added] == [item["id"] for item in items]
    assert len({item["id"] for item in items}) == 4
    names = [e["type"] for e in seen if e["type"] != "response.in_progress"]
    assert [names.count(f"response.{n}") for n in ("content_part.added", "content_part.done")] == [1, 1]
    assert names.count("response.reasoning_summary_part.done") == 1
    assert names.count("response.function_call_arguments.done") == 2


def test_a_response_cut_by_its_clients_limit_is_incomplete():
    body = {**RESPONSES, "max_output_tokens": 5}
    seen = events(stream(responses, body, ANSWERS["cut"]))
    assert seen[-1]["type"] == "response.incomplete"
    response = seen[-1]["response"]
    assert response == responses.answer(responses.parse(body), ANSWERS["cut"])
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert [e["item"] for e in seen if e["type"] == "response.output_item.done"] == response["output"]


def test_a_response_that_only_fails_is_a_stream_the_sdk_reads():
    failed = responses.failed_stream(responses.parse(RESPONSES), ContextOverflow(9, 8), "a", 0)
    sdk = client(openai, failed, kind="text/event-stream")
    seen = list(sdk.responses.create(model="m", input="hi", stream=True))
    assert [e.type for e in seen] == ["response.created", "response.failed"]
    assert seen[-1].response.error.code == "context_length_exceeded"
    assert [e.sequence_number for e in seen] == [0, 1]


# --- what a model may write


@pytest.mark.parametrize("arguments", ['{"n": 123456789012345678901234567890}', '{"n": 1' + "0" * 400 + "}"])
def test_arguments_reach_the_client_as_the_model_wrote_them(arguments):
    done = replace(ANSWERS["one call"], tool_calls=(ToolCall("c1", "shell", arguments),))
    body = orjson.dumps(messages.answer(messages.parse(MESSAGES), done))
    assert json.loads(body)["content"][0]["input"] == json.loads(arguments)
    custom = responses.parse({"input": "x", "tools": [{"type": "custom", "name": "shell"}]})
    assert responses.answer(custom, done)["output"][0]["input"] == arguments
    search = responses.parse({"input": "x", "tools": [{"type": "tool_search", "execution": "client"}]})
    found = replace(done, tool_calls=(ToolCall("c1", "tool_search", arguments),))
    (item,) = json.loads(orjson.dumps(responses.answer(search, found)))["output"]
    assert item["arguments"] == json.loads(arguments)


# --- errors


def failure(status: int) -> ProxyError:
    error = ProxyError("what to do")
    error.status = status
    return error


ANTHROPIC_ERRORS = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    403: ("PermissionDeniedError", "permission_error"),
    404: ("NotFoundError", "not_found_error"),
    408: ("RequestTimeoutError", "timeout_error"),
    410: ("APIStatusError", "not_found_error"),
    413: ("ContentTooLargeError", "request_too_large"),
    422: ("UnprocessableEntityError", "invalid_request_error"),
    429: ("RateLimitError", "rate_limit_error"),
    500: ("InternalServerError", "api_error"),
    503: ("ServiceUnavailableError", "overloaded_error"),
    504: ("GatewayTimeoutError", "timeout_error"),
    529: ("OverloadedError", "overloaded_error"),
}


@pytest.mark.parametrize(("status", "name", "kind"), [(s, *v) for s, v in ANTHROPIC_ERRORS.items()])
def test_the_messages_sdk_knows_every_error(status, name, kind):
    sdk = client(anthropic, orjson.dumps(messages.error(failure(status))), status)
    with pytest.raises(anthropic.APIStatusError) as caught:
        sdk.messages.create(model="m", max_tokens=5, messages=MESSAGES["messages"])
    assert type(caught.value).__name__ == name and caught.value.status_code == status
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "what to do"}}


OPENAI_ERRORS = {
    400: (openai.BadRequestError, "invalid_request_error", None),
    401: (openai.AuthenticationError, "authentication_error", "invalid_api_key"),
    403: (openai.PermissionDeniedError, "permission_error", None),
    404: (openai.NotFoundError, "not_found_error", None),
    408: (openai.APIStatusError, "timeout_error", None),
    410: (openai.APIStatusError, "not_found_error", None),
    413: (openai.APIStatusError, "invalid_request_error", None),
    422: (openai.UnprocessableEntityError, "invalid_request_error", None),
    429: (openai.RateLimitError, "rate_limit_error", "rate_limit_exceeded"),
    500: (openai.InternalServerError, "server_error", None),
    503: (openai.InternalServerError, "server_error", None),
}


@pytest.mark.parametrize("dialect", [chat, responses])
@pytest.mark.parametrize(("status", "name", "kind", "code"), [(s, *v) for s, v in OPENAI_ERRORS.items()])
def test_the_openai_sdk_knows_every_error(dialect, status, name, kind, code):
    sdk = client(openai, orjson.dumps(dialect.error(failure(status))), status)
    with pytest.raises(openai.APIStatusError) as caught:
        if dialect is chat:
            sdk.chat.completions.create(model="m", messages=CHAT["messages"])
        else:
            sdk.responses.create(model="m", input="hi")
    error = caught.value
    assert type(error) is name and (error.type, error.code, error.param) == (kind, code, None)
    assert error.body["message"] == "what to do"


@pytest.mark.parametrize("dialect", [chat, responses])
def test_an_overlong_prompt_has_its_code(dialect):
    error = dialect.error(ContextOverflow(9, 8))["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in error["message"]
    assert "prompt is too long: 9 tokens > 8 maximum" in error["message"]


def test_an_overlong_prompt_reads_as_the_messages_protocol_says():
    error = messages.error(ContextOverflow(9, 8))["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}


@pytest.mark.parametrize("dialect", [chat, responses])
def test_the_field_at_fault_is_the_param(dialect):
    with pytest.raises(BadRequest) as caught:
        dialect.parse({"messages": [], "input": [], "stream": "x"})
    assert dialect.error(caught.value)["error"]["param"] == "stream"
