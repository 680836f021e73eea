"""Answers that must begin or end up in some way: prefill, forced tool calls, schemas, template arguments."""

import json
import threading

import httpx
import pytest
from gyre_proxy.dialects import chat
from proxy_stage import DEADLINE_S, wait_until

USER = {"role": "user", "content": "go"}
TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}
MESSAGES_TOOL = {"name": "shell", "input_schema": {"type": "object", "properties": {}}}


def prefilled(text, stream=False, **more):
    messages = [USER, {"role": "assistant", "content": text}]
    return {"model": "m", "max_tokens": 99, "messages": messages, "stream": stream, **more}


def events(answer: httpx.Response) -> list[dict]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def streamed_text(answer: httpx.Response) -> str:
    deltas = (e["delta"] for e in events(answer) if e["type"] == "content_block_delta")
    return "".join(delta.get("text", "") for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", ["The answer is", "1 <", "<", "a\nb"])
def test_a_started_answer_is_gone_on_with(scene, codec, begun, stream):
    """The client's words are input, masked; the client gets what follows them, and may repeat the whole."""
    proxy, engine = scene([" 42, of course.", "Yes."])
    answer = proxy.post("messages", prefilled(begun, stream))
    text = streamed_text(answer) if stream else answer.json()["content"][0]["text"]
    assert text == " 42, of course."
    (call,) = proxy.calls()
    assert codec.text(call.input_ids.tolist()).endswith("assistant\n" + begun)
    whole = {"role": "assistant", "content": begun + text}
    proxy.post("messages", {"model": "m", "max_tokens": 99, "messages": [USER, whole, USER]})
    first, second = proxy.calls()
    assert second.parent == first.id
    path = first.input_ids.tolist() + first.output_ids.tolist()
    assert engine.requests[1]["input_ids"][: len(path)] == path


def test_control_tokens_in_a_clients_words_are_plain_text(scene, codec):
    proxy, _ = scene(["x"])
    proxy.post("messages", prefilled("<|im_end|> <tool_call>"))
    (call,) = proxy.calls()
    marks = {codec._tokenizer.token_to_id(t) for t in ("<|im_end|>", "<tool_call>")}
    assert not marks & set(call.input_ids.tolist()[-call.extra["started"] :])


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_begins_where_the_name_ends(scene, codec, stream):
    proxy, engine = scene(['{"cmd": "ls"}}\n</tool_call>', "Done."])
    body = {"model": "m", "messages": [USER], "tools": [TOOL], "stream": stream}
    choice = {"type": "function", "function": {"name": "shell"}}
    answer = proxy.post("chat/completions", body | {"tool_choice": choice})
    if stream:
        deltas = [e["choices"][0]["delta"] for e in events(answer) if e["choices"]]
        head, *rest = (call for delta in deltas for call in delta.get("tool_calls", []))
        arguments = "".join(part["function"].get("arguments", "") for part in (head, *rest))
        function = {"name": head["function"]["name"], "arguments": arguments}
        called = {"id": head["id"], "type": "function", "function": function}
        assert not any(delta.get("content") for delta in deltas)
    else:
        (called,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == (
        "shell",
        {"cmd": "ls"},
    )
    (call,) = proxy.calls()
    assert codec.text(call.input_ids.tolist()).endswith('<tool_call>\n{"name": "shell", "arguments": ')
    message = {"role": "assistant", "content": None, "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": called["id"], "content": "a"}
    proxy.post("chat/completions", body | {"messages": [USER, message, result], "stream": False})
    assert proxy.calls()[1].parent == call.id


@pytest.mark.parametrize(
    "path, body",
    [
        (
            "messages",
            {"max_tokens": 99, "messages": [USER], "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}},
        ),
        ("chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}),
        (
            "responses",
            {"input": "go", "tools": [{"type": "function", "name": "shell"}], "tool_choice": "required"},
        ),
    ],
)
def test_any_tool_may_be_asked_for_in_every_protocol(scene, path, body):
    proxy, _ = scene(['shell", "arguments": {"cmd": "ls"}}\n</tool_call>'])
    answer = proxy.post(path, {"model": "m", **body})
    assert answer.status_code == 200, answer.text
    (call,) = proxy.calls()
    assert call.evidence["tool_calls"] == 1 and '"shell"' in answer.text


def test_what_is_forced_and_does_not_become_a_call_stays_text(scene):
    proxy, _ = scene(["no idea"])
    body = {"model": "m", "messages": [USER], "tools": [TOOL], "tool_choice": "required"}
    message = proxy.post("chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] == '<tool_call>\n{"name": "no idea' and "tool_calls" not in message


@pytest.mark.parametrize(
    "path, body",
    [
        ("chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}),
        ("responses", {"input": "go", "text": {"format": {"type": "json_object"}}}),
        (
            "messages",
            {
                "max_tokens": 99,
                "messages": [USER],
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
        ),
    ],
)
def test_a_schema_goes_to_the_engine_and_its_tokens_are_not_trained(scene, path, body):
    """Where the schema leaves no choice the log-prob is not the model's."""
    proxy, engine = scene(['{"a": 1}'])
    assert proxy.post(path, {"model": "m", **body}).status_code == 200
    assert json.loads(engine.requests[0]["sampling_params"]["json_schema"]) == {"type": "object"}
    (call,) = proxy.calls()
    assert call.sampling["json_schema"] and all(value != value for value in call.logprobs.tolist())


def test_template_arguments_make_a_context_of_their_own(scene, codec):
    proxy, engine = scene(["Hello."])
    body = {"model": "m", "messages": [USER]}
    asked = {"enable_thinking": False}
    message = proxy.post("chat/completions", body).json()["choices"][0]["message"]
    following = {"model": "m", "messages": [USER, message, USER]}
    proxy.post("chat/completions", following | {"chat_template_kwargs": asked})
    proxy.post("chat/completions", following)
    first, other, same = proxy.calls()
    assert other.parent is None and same.parent == first.id
    assert other.extra["template_arguments"] == asked
    messages = chat.parse(following).conversation.messages
    assert engine.requests[1]["input_ids"] == codec.for_arguments(asked).encode_prompt(messages)


def test_openings_and_arguments_survive_a_restart(stage, codec, tokenizer_dir, tmp_path):
    settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl"}
    script = [" 42.", '{"cmd": "ls"}}\n</tool_call>', "Hello."]
    engine = stage.engine(codec, script)
    proxy = stage.proxy(engines=(engine.url,), **settings)
    proxy.post("messages", prefilled("It is"))
    forced = {"model": "m", "messages": [USER], "tools": [TOOL]}
    choice = {"type": "function", "function": {"name": "shell"}}
    called = proxy.post("chat/completions", forced | {"tool_choice": choice}).json()["choices"][0]["message"]
    arguments = {"chat_template_kwargs": {"enable_thinking": False}}
    said = proxy.post("chat/completions", {"model": "m", "messages": [USER], **arguments}).json()
    stage.do(stage._stops.pop()())
    proxy = stage.proxy(engines=(engine.url,), **settings)
    whole = {"role": "assistant", "content": "It is 42."}
    proxy.post("messages", {"model": "m", "max_tokens": 9, "messages": [USER, whole, USER]})
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "a"}
    proxy.post("chat/completions", forced | {"messages": [USER, called, result]})
    message = said["choices"][0]["message"]
    proxy.post("chat/completions", {"model": "m", "messages": [USER, message, USER], **arguments})
    calls = proxy.calls()
    assert [call.parent for call in calls] == [None] * 3 + [call.id for call in calls[:3]]


def test_counting_counts_what_the_answer_begins_with(scene):
    proxy, engine = scene(["x"])
    counted = proxy.post("messages/count_tokens", prefilled("The answer is")).json()["input_tokens"]
    proxy.post("messages", prefilled("The answer is"))
    assert counted == len(engine.requests[0]["input_ids"])


def test_the_same_conversation_with_another_wish_is_no_retry(scene):
    proxy, engine = scene(["x"])
    engine.hold_after = 0
    bodies = [prefilled("a"), prefilled("b"), prefilled("a") | {"max_tokens": 5}]
    threads = [threading.Thread(target=proxy.post, args=("messages", body)) for body in bodies]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(engine.requests) == 3)
    engine.hold_after = None
    engine._released.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(proxy.calls()) == 3
