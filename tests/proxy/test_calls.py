"""One call through a running proxy: records, retries, disconnects, limits, failures."""

import json
import socket

import httpx
import numpy as np
import pytest
from gyre_trajtree import Tree
from proxy_stage import DEADLINE_S, wait_until
from proxy_tokenizer import TURN_COUNTING_TEMPLATE, build_tokenizer

USER = {"role": "user", "content": "look around"}
TOOLS = [
    {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}
]
CALL = '<tool_call>\n{"name": "shell", "arguments": {"cmd":  "ls",  "n": 1}}\n</tool_call>'


def chat(*messages, **more):
    return {"model": "m", "messages": list(messages), **more}


def read_stream(proxy, path, body, execution="e"):
    with httpx.stream(
        "POST", f"{proxy.url}/x/{execution}/v1/{path}", json=body, timeout=DEADLINE_S
    ) as answer:
        assert answer.status_code == 200
        yield from answer.iter_lines()


def test_the_record_is_written_before_the_answer_leaves(scene):
    proxy, _ = scene(["Hello."])
    answer = proxy.post("chat/completions", chat(USER, temperature=0.2), headers={"x-session-id": "s1"})
    (call,) = proxy.calls()
    assert answer.json()["id"] == f"chatcmpl-{call.id}"
    assert (call.execution, call.parent, call.finish, call.attempt_of) == ("e", None, "stop", None)
    start = len(call.input_ids)
    expected = [-(start + i) / 1000 for i in range(len(call.output_ids))]
    assert call.logprobs.tolist() == pytest.approx(expected)
    assert call.sampling["temperature"] == 1.0 and call.sampling["asked"] == {"temperature": 0.2}
    assert call.hints == {"session": "s1"}
    assert call.evidence["first_user"] == "look around" and call.evidence["text"] == "Hello."
    assert call.time["start"] <= call.time["end"]


def test_spawn_texts_of_delegating_calls_are_evidence(scene):
    task = '<tool_call>{"name": "task", "arguments": {"prompt": "short"}}</tool_call>'
    proxy, _ = scene([task])
    proxy.post("chat/completions", chat(USER, tools=TOOLS))
    (call,) = proxy.calls()
    assert call.evidence["spawns"] == ["short"] and call.evidence["tools"] is not None


def test_a_root_says_what_its_prompt_opens_with(scene):
    proxy, _ = scene(["Hello.", "Again."])
    messages = [
        {"role": "user", "content": "<system-reminder>" + "x " * 1100 + "</system-reminder>look around"},
        {"role": "assistant", "content": "A summary."},
        {"role": "user", "content": "go on"},
    ]
    first = proxy.post("chat/completions", chat(*messages)).json()["choices"][0]["message"]
    proxy.post("chat/completions", chat(*messages, first, {"role": "user", "content": "more"}))
    root, child = proxy.calls()
    assert root.evidence["first_user"] == "look around" and root.evidence["last_user"] == "go on"
    assert root.evidence["opening"] == "look around\nA summary.\ngo on"
    assert child.parent == root.id and child.evidence["last_user"] == "more"
    assert "opening" not in child.evidence and "first_user" not in child.evidence


def test_turns_repeated_outside_their_path_are_echoes(scene):
    proxy, _ = scene([CALL, "Done.", "Done."])
    message = proxy.post("chat/completions", chat(USER, tools=TOOLS)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a"}
    proxy.post("chat/completions", chat(USER, message, result, tools=TOOLS))
    other = {"role": "user", "content": "Earlier turns were removed."}
    proxy.post("chat/completions", chat(other, message, result, tools=TOOLS))
    first, extends, repeats = proxy.calls()
    assert first.evidence["tool_calls"] == 1 and extends.evidence["tool_calls"] == 0
    assert "echoes" not in extends.evidence
    assert repeats.parent is None and repeats.evidence["echoes"] == [first.id]


def test_a_copy_of_a_context_is_asked_all_that_users_say_behind_the_repeated_turns(scene):
    proxy, _ = scene([CALL, "Done."])
    message = proxy.post("chat/completions", chat(USER, tools=TOOLS)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a"}
    more = [
        {"role": "user", "content": "You are a copy. Directive: count the files."},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "Begin."},
    ]
    fewer_tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    proxy.post("chat/completions", chat(USER, message, result, *more, tools=fewer_tools))
    _, copy = proxy.calls()
    assert copy.parent is None
    assert copy.evidence["first_user"] == "look around"
    assert copy.evidence["last_user"] == "You are a copy. Directive: count the files. Begin."


@pytest.mark.parametrize("arguments", ['{"n":1,"cmd":"ls"}', '{"cmd": "ls", "n": 1.0, "extra": false}', "{}"])
def test_sampled_tokens_stay_whatever_the_harness_does_to_arguments(scene, arguments):
    proxy, engine = scene([CALL, "Done."])
    message = proxy.post("chat/completions", chat(USER, tools=TOOLS)).json()["choices"][0]["message"]
    message["tool_calls"][0]["function"]["arguments"] = arguments
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a"}
    proxy.post("chat/completions", chat(USER, message, result, tools=TOOLS))
    first, second = proxy.calls()
    sampled = first.input_ids.tolist() + first.output_ids.tolist()
    assert second.parent == first.id
    assert engine.requests[1]["input_ids"] == sampled + second.input_ids.tolist()


def test_the_log_alone_gives_the_tree_the_engine_saw(scene):
    proxy, engine = scene([CALL, "Done.", "Other."])
    first = proxy.post("chat/completions", chat(USER, tools=TOOLS)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "a"}
    proxy.post("chat/completions", chat(USER, first, result, tools=TOOLS))
    proxy.post("chat/completions", chat({"role": "user", "content": "compacted"}))
    tree = Tree.from_calls(proxy.calls())
    for call, request in zip(proxy.calls(), engine.requests, strict=True):
        seen = request["input_ids"] + call.output_ids.tolist()
        assert tree.path_tokens(tree[call.id]).tolist() == seen


def test_malformed_calls_come_back_as_text_and_the_next_turn_attaches(scene):
    bad = '<tool_call>\n{"name": "shell", "arguments": oops}\n</tool_call>'
    proxy, _ = scene([f"Try. {bad}", "Sorry."])
    answer = proxy.post("chat/completions", chat(USER, tools=TOOLS)).json()["choices"][0]
    assert answer["message"]["content"] == f"Try. {bad}" and answer["finish_reason"] == "stop"
    echo = {"role": "assistant", "content": answer["message"]["content"]}
    proxy.post("chat/completions", chat(USER, echo, {"role": "user", "content": "no"}, tools=TOOLS))
    first, second = proxy.calls()
    assert second.parent == first.id


def test_an_answer_cut_by_length_is_continued_with_the_turn_closed_once(scene, codec):
    proxy, engine = scene([("cut of", "length"), "more"])
    answer = proxy.post("chat/completions", chat(USER)).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    echo = {"role": "assistant", "content": "cut of"}
    proxy.post("chat/completions", chat(USER, echo, {"role": "user", "content": "go"}))
    first, second = proxy.calls()
    assert second.parent == first.id and second.input_ids[0] == codec.turn_end
    text = codec._tokenizer.decode(engine.requests[1]["input_ids"], skip_special_tokens=False)
    assert text.count("cut of<|im_end|>\n<|im_start|>user\ngo") == 1


def test_the_first_byte_leaves_before_the_engines_last(scene, stage):
    proxy, engine = scene(["The quick brown fox"])
    engine.hold_after = 3
    lines = read_stream(proxy, "chat/completions", chat(USER, stream=True))
    seen = []
    for line in lines:
        if line.startswith("data: {"):
            seen.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
        if "".join(seen):
            stage.do(engine.release())
    assert "".join(seen) == "The quick brown fox"


def test_silence_is_broken_by_signs_of_life(scene, stage):
    proxy, engine = scene(["late"], keepalive_s=0.02)
    engine.hold_after = 0
    chunks = []
    for line in read_stream(proxy, "messages", chat(USER, stream=True, max_tokens=9)):
        chunks.append(line)
        if chunks.count("event: ping") == 2:
            stage.do(engine.release())
    assert "event: message_start" in chunks[0] and "event: message_stop" in chunks


def test_the_same_request_in_flight_is_joined(scene, stage):
    proxy, engine = scene(["one answer"], keepalive_s=0.02)
    engine.hold_after = 0
    clients = [read_stream(proxy, "chat/completions", chat(USER, stream=True)) for _ in range(2)]
    # A sign of life tells that the client's call is under way.
    heads = [[next(client)] for client in clients]
    stage.do(engine.release())
    for head, client in zip(heads, clients, strict=True):
        chunks = [json.loads(line[6:]) for line in [*head, *client] if line.startswith("data: {")]
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "one answer"
        assert {c["id"] for c in chunks} == {f"chatcmpl-{proxy.calls()[0].id}"}
    assert len(engine.requests) == len(proxy.calls()) == 1


def test_the_same_request_again_after_an_answer_is_a_new_sample(scene):
    proxy, _ = scene(["one", "two"])
    for _ in range(2):
        proxy.post("chat/completions", chat(USER))
    first, second = proxy.calls()
    assert (first.parent, second.parent, second.attempt_of) == (None, None, None)


def test_a_client_that_leaves_aborts_its_call_and_its_retry_is_a_sibling(scene, stage):
    proxy, engine = scene(["The quick brown fox", "again"])
    engine.hold_after = 2
    body = json.dumps(chat(USER)).encode()
    with socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))) as client:
        head = f"POST /x/e/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        engine.wait_held()
    wait_until(proxy.calls)
    stage.do(engine.release())
    assert proxy.post("chat/completions", chat(USER)).status_code == 200
    first, second = proxy.calls()
    assert (first.finish, len(first.output_ids)) == ("abort", 2)
    assert (second.finish, second.attempt_of, second.parent) == ("stop", first.id, None)


def test_an_overlong_prompt_is_refused_in_each_protocol(scene):
    proxy, engine = scene(["no"], context_length=40)
    long = {"role": "user", "content": "word " * 60}
    anthropic = proxy.post("messages", chat(long, max_tokens=9, stream=True))
    assert anthropic.status_code == 400
    assert anthropic.json()["error"]["message"].startswith("prompt is too long: ")
    openai = proxy.post("chat/completions", chat(long))
    assert (openai.status_code, openai.json()["error"]["code"]) == (400, "context_length_exceeded")
    codex = {"model": "m", "input": [long], "stream": True}
    failed = list(read_stream(proxy, "responses", codex))
    last = failed.index("event: response.failed")
    assert (
        failed[last + 2 :] == [""] * len(failed[last + 2 :]) and "context_length_exceeded" in failed[last + 1]
    )
    assert engine.requests == [] and proxy.calls() == []


@pytest.mark.parametrize(("asked", "setting", "expected"), [(7, None, 7), (None, 5, 5), (9999, None, None)])
def test_the_answer_limit_is_the_clients_the_settings_or_the_contexts(scene, asked, setting, expected):
    proxy, engine = scene(["x"], context_length=100, max_new_tokens=setting)
    proxy.post("chat/completions", chat(USER, max_tokens=asked))
    (request,) = engine.requests
    room = 100 - len(request["input_ids"])
    assert request["sampling_params"]["max_new_tokens"] == (expected or room)


def test_a_refusal_of_the_engine_reaches_the_client_and_the_log(scene):
    proxy, engine = scene(["x"])
    engine.refuse = 422
    answer = proxy.post("chat/completions", chat(USER))
    assert answer.status_code == 400 and "refused by script" in answer.json()["error"]["message"]
    (call,) = proxy.calls()
    assert (call.finish, len(call.output_ids)) == ("error", 0)


def test_logprobs_that_do_not_fit_the_ids_are_missing_not_zero(scene):
    proxy, engine = scene(["Hello."])
    whole = engine._payload

    def one_short(*given):
        payload = whole(*given)
        payload["meta_info"]["output_token_logprobs"].pop()
        return payload

    engine._payload = one_short
    assert proxy.post("chat/completions", chat(USER)).status_code == 200
    (call,) = proxy.calls()
    assert len(call.logprobs) == len(call.output_ids) and np.isnan(call.logprobs).all()


def test_bad_requests_do_not_reach_engine_or_log(scene):
    proxy, engine = scene(["x"])
    url = f"{proxy.url}/x/e/v1/chat/completions"
    for content in (
        b"{",
        b"[]",
        b'{"messages": 3}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ):
        assert httpx.post(url, content=content).status_code == 400
    assert httpx.post(url, content=b"{}", headers={"content-encoding": "gzip"}).status_code == 400
    assert httpx.get(url).status_code == 404
    assert engine.requests == [] and proxy.calls() == []


def test_paths_work_with_and_without_v1_and_the_key_can_name_the_execution(scene):
    proxy, _ = scene(["x"])
    for path in ("/x/a/v1/chat/completions", "/x/a/chat/completions", "/x/a/v1/v1/chat/completions"):
        assert httpx.post(proxy.url + path, json=chat(USER)).status_code == 200
    for headers in ({"authorization": "Bearer worker-7"}, {"x-api-key": "worker-7"}):
        assert httpx.post(f"{proxy.url}/v1/messages", json=chat(USER), headers=headers).status_code == 200
    assert [call.execution for call in proxy.calls()] == ["a"] * 3 + ["worker-7"] * 2


def test_probes_are_answered(scene):
    proxy, _ = scene(["x"])
    assert httpx.get(f"{proxy.url}/health").json()["status"] == "ok"
    for path in ("/", "/api/hello", "/x/e"):
        assert httpx.head(proxy.url + path).status_code == 200
    assert httpx.get(f"{proxy.url}/x/e/v1/models").json()["data"][0]["id"] == "gyre"


def test_a_template_that_looks_at_the_past_still_records_every_call(scene, tmp_path):
    directory = build_tokenizer(tmp_path / "t", TURN_COUNTING_TEMPLATE)
    proxy, engine = scene(["one", "two"], tokenizer=directory)
    assert proxy.facts["mode"] == "full" and proxy.facts["mode_reason"]
    proxy.post("chat/completions", chat(USER))
    proxy.post("chat/completions", chat(USER, {"role": "assistant", "content": "one"}, USER))
    first, second = proxy.calls()
    path = np.concatenate((first.input_ids, first.output_ids)).tolist() if second.parent else []
    assert engine.requests[1]["input_ids"] == path + second.input_ids.tolist()


@pytest.mark.parametrize(
    "path, field, left",
    [
        ("chat/completions", "messages", {"role": "assistant", "content": "", "reasoning_content": "half"}),
        (
            "messages",
            "messages",
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "half", "signature": "s"}]},
        ),
        ("responses", "input", {"type": "reasoning", "summary": [{"type": "summary_text", "text": "half"}]}),
    ],
)
def test_a_turn_that_says_nothing_before_another_is_left_out(scene, path, field, left):
    """opencode sends the thinking of a broken answer back as a turn before the one that it asked for again."""
    proxy, _ = scene(["Hello.", "Bye."])
    more = {"max_tokens": 9} if path == "messages" else {}
    user = {"role": "user", "content": "go"}
    proxy.post(path, {"model": "m", field: [user], **more})
    answered = {"role": "assistant", "content": "Hello."}
    proxy.post(path, {"model": "m", field: [user, left, answered, user], **more})
    first, second = proxy.calls()
    assert second.parent == first.id


def test_a_request_of_nothing_but_thinking_is_answered(scene):
    proxy, _ = scene(["Hello."])
    left = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "half"}]}
    assert proxy.post("responses", {"model": "m", "input": [left]}).status_code in (200, 400)


def test_thinking_left_of_a_cut_attempt_is_no_turn_of_its_own(scene):
    """Codex keeps the finished thinking of an answer that broke off, asks again, and repeats both with the answer."""
    proxy, _ = scene(["Hello.", "Bye."])
    left = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "half"}]}
    given = [{"role": "user", "content": "go"}]
    answered = proxy.post("responses", {"model": "m", "input": [*given, left]}).json()
    repeated = [*given, left, *answered["output"], {"role": "user", "content": "on"}]
    proxy.post("responses", {"model": "m", "input": repeated})
    first, second = proxy.calls()
    assert second.parent == first.id


TWO_CALLS = (
    'Look.\n<tool_call>\n{"name": "shell", "arguments": {"cmd": "a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "shell", "arguments": {"cmd": "b"}}\n</tool_call>'
)


@pytest.mark.parametrize(
    "echo, extends",
    [
        (lambda m: [m], True),
        (lambda m: [m | {"tool_calls": m["tool_calls"][::-1]}], True),
        (lambda m: [{"role": "assistant", "content": m["content"]}, m | {"content": None}], True),
        (lambda m: [m | {"content": "Look elsewhere."}], False),
        (lambda m: [m | {"tool_calls": m["tool_calls"][:1]}], False),
    ],
    ids=["as it was", "calls in another order", "text apart", "other text", "a call left out"],
)
def test_ids_say_which_turn_an_echo_is(scene, echo, extends):
    proxy, engine = scene([TWO_CALLS, "Done."])
    tools = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
    user = {"role": "user", "content": "go"}
    body = {"model": "m", "messages": [user], "tools": tools}
    message = proxy.post("chat/completions", body).json()["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in message["tool_calls"]
    ]
    proxy.post("chat/completions", body | {"messages": [user, *echo(message), *results]})
    first, second = proxy.calls()
    assert second.parent == (first.id if extends else None)
    if extends:
        path = first.input_ids.tolist() + first.output_ids.tolist()
        assert engine.requests[1]["input_ids"] == path + second.input_ids.tolist()


def test_assistant_messages_in_a_row_are_one_turn_of_the_messages_protocol(scene):
    proxy, _ = scene([TWO_CALLS, "Done."])
    tools = [{"name": "shell", "input_schema": {"type": "object"}}]
    user = {"role": "user", "content": "go"}
    body = {"model": "m", "max_tokens": 99, "tools": tools}
    content = proxy.post("messages", body | {"messages": [user]}).json()["content"]
    apart = [{"role": "assistant", "content": [block]} for block in content]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
        for block in content
        if block["type"] == "tool_use"
    ]
    proxy.post("messages", body | {"messages": [user, *apart, {"role": "user", "content": results}]})
    first, second = proxy.calls()
    assert second.parent == first.id
