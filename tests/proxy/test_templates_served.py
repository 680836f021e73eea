"""Whole proxies on templates of several kinds: typed calls after a restart, prompts that are encoded whole."""

import json

import pytest
from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Message
from gyre_trajtree import Tree
from proxy_tokenizer import build_tokenizer
from real_tokenizers import trl_template
from template_snippets import chatml

TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {
            "type": "object",
            "properties": {
                "lines": {"type": "integer"},
                "deep": {"type": "boolean"},
                "path": {"type": "string"},
            },
        },
    },
}
CALL = (
    "look\n</think>\n\n<tool_call>\n<function=read>\n<parameter=lines>\n3\n</parameter>\n<parameter=deep>\nTrue\n"
    "</parameter>\n<parameter=path>\n7\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture
def start(stage, tmp_path):
    """start(template, script) -> (proxy, engine, codec), on one log each time; the proxy before is stopped."""

    def begin(template, script):
        stage.clear()
        directory = tmp_path / "t"
        if not directory.exists():
            build_tokenizer(directory, template)
        codec = Codec(directory)
        engine = stage.engine(codec, script)
        settings = {"tokenizer": directory, "record": tmp_path / "run.jsonl", "engines": [engine.url]}
        return stage.proxy(**settings), engine, codec

    return begin


def turn(proxy, *messages, tools=()):
    body = {"model": "m", "messages": list(messages), "tools": list(tools)}
    answer = proxy.post("chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def test_a_call_without_quotes_is_the_same_call_after_a_restart(start):
    template = trl_template("qwen3_6")
    proxy, _, _ = start(template, [CALL])
    assert (proxy.facts["mode"], proxy.facts["tool_parser"], proxy.facts["notices"]) == (
        "suffix",
        "qwen3_coder",
        [],
    )
    first = turn(proxy, user("q"), tools=[TOOL])
    function = first["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"lines": 3, "deep": True, "path": "7"}
    function["arguments"] = '{"path":"7","deep":true,"lines":3}'  # as a harness writes it anew
    del first["reasoning_content"]
    proxy, engine, codec = start(template, ["done</think>Done."])
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "text"}
    assert turn(proxy, user("q"), first, result, tools=[TOOL])["content"] == "Done."
    calls = proxy.calls()
    assert [call.parent for call in calls] == [None, calls[0].id]
    path = [*calls[0].input_ids, *calls[0].output_ids]
    assert engine.requests[0]["input_ids"][: len(path)] == path
    assert codec.text(calls[1].input_ids.tolist()).startswith("\n<|im_start|>user\n<tool_response>\ntext\n")


def test_a_whole_prompt_that_begins_with_the_recorded_tokens_reuses_them(start):
    """Questions are numbered, so no suffix is stable; answers stand as they were sampled."""
    number = "{% if m.role == 'user' %}{{ loop.index }}{% endif %}"
    proxy, engine, codec = start(
        chatml(before=number), [("One.", "length"), ("Two.", "length"), ("Three.", "length")]
    )
    assert proxy.facts["mode"] == "full" and "where the new messages alone give" in proxy.facts["mode_reason"]
    said = [user("a")]
    for question in ("b", "c"):
        said += [turn(proxy, *said), user(question)]
    turn(proxy, *said)
    calls = proxy.calls()
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id]
    messages = tuple(Message(m["role"], m["content"]) for m in said)
    assert engine.requests[-1]["input_ids"] == codec.encode_prompt(messages)
    assert len(Tree.from_calls(calls).leaves()) == 1


def test_a_whole_prompt_without_the_recorded_tokens_is_a_new_branch(start):
    """The template numbers questions and leaves earlier thoughts out: what was sampled is nowhere in the next prompt."""
    source = trl_template("qwen3").replace(
        "'<|im_start|>' + message.role + '\\n' + content", "(loop.index | string) + content"
    )
    proxy, engine, codec = start(source, [("<think>\nhm\n</think>\n\nOne.", "length"), ("Two.", "length")])
    assert proxy.facts["mode"] == "full"
    first = turn(proxy, user("a"))
    turn(proxy, user("a"), first, user("b"))
    assert [call.parent for call in proxy.calls()] == [None, None]
    messages = (Message("user", "a"), Message("assistant", "One.", "hm"), Message("user", "b"))
    assert engine.requests[1]["input_ids"] == codec.encode_prompt(messages)


def test_only_messages_whose_suffix_is_not_proved_are_encoded_whole(start):
    """Results are written another way after the first; questions are not."""
    before = "messages[:loop.index0] | selectattr('role', 'equalto', 'tool') | list"
    again = f"{{% if m.role == 'tool' and {before} %}}again{{% endif %}}"
    call = '<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>'
    template = chatml(
        before=again,
        calls="{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
    )
    proxy, engine, codec = start(template, [call, call, "Done.", "Yes."])
    assert proxy.facts["mode"] == "suffix" and "tool results are encoded whole" in proxy.facts["mode_reason"]
    said = [user("a")]
    for _ in range(2):
        said.append(turn(proxy, *said, tools=[TOOL]))
        said.append({"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": "r"})
    said += [turn(proxy, *said, tools=[TOOL]), user("sure?")]
    assert turn(proxy, *said, tools=[TOOL])["content"] == "Yes."
    texts = [codec.text(request["input_ids"]) for request in engine.requests]
    assert "again<|im_start|>tool" not in texts[1] and texts[2].count("again<|im_start|>tool") == 1
    assert (
        texts[3] == texts[2] + "Done.<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )
    calls = proxy.calls()
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id, calls[2].id]
