"""Templates that look back, each in one way: the proof finds it, names it, and keeps what is still stable."""

from datetime import datetime

import pytest
from gyre_proxy.codec import VARIANTS, Codec
from gyre_proxy.conversation import Message, ToolCall
from gyre_proxy.errors import BadRequest, TokenizerError
from gyre_proxy.proof import prove
from gyre_proxy.template import ChatTemplate
from proxy_tokenizer import build_tokenizer
from template_snippets import ASK, CALLS, TURN, chatml

ALL = frozenset(("user", "assistant", "system", "tool"))

LOOKING_BACK = {
    "the number of messages": (
        chatml(before="{{ loop.index }}"),
        frozenset(),
        "a user message after a system prompt and a turn",
        "4<|im_start|>user",
    ),
    "tools before the last question": (
        chatml(before="{% if tools and loop.last and m.role == 'user' %}{{ tools | tojson }}{% endif %}"),
        frozenset(),
        "with tools on offer",
        "",
    ),
    "the system prompt before the last question": (
        chatml(
            before="{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        ),
        frozenset(),
        "a system prompt",
        "",
    ),
    "a switch in the system prompt": (
        chatml(ask=ASK + "{% if '/no_think' in messages[0].content %}<think></think>{% endif %}"),
        frozenset(),
        "/no_think",
        "<think></think>",
    ),
    "a switch in any question": (
        chatml(
            ask="{% set s = namespace(on=false) %}{% for m in messages %}{% if m.content.endswith('/quick') %}"
            "{% set s.on = true %}{% endif %}{% endfor %}" + ASK + "{% if s.on %}quick{% endif %}"
        ),
        frozenset(),
        "with '/quick'",
        "quick",
    ),
    "the name of the tool that was called": (
        chatml(
            before="{% if m.role == 'tool' %}{% for q in messages %}{% for c in q.tool_calls or [] %}"
            "{% if c.id == m.tool_call_id %}{{ c.function.name }}{% endif %}{% endfor %}{% endfor %}{% endif %}"
        ),
        ALL - {"tool"},
        "requests with tool results are encoded whole",
        "probe0",
    ),
    "whether there were results before": (
        chatml(
            before="{% if m.role == 'tool' and messages[:loop.index0] | selectattr('role', 'equalto', 'tool') | list %}"
            "again{% endif %}"
        ),
        ALL - {"tool"},
        "requests with tool results are encoded whole",
        "again",
    ),
    "whether the answer called": (
        chatml(inside="{% if m.tool_calls %}{{ '<|endoftext|>' }}{% endif %}", after="").replace(
            "{{ '<|im_end|>\\n' }}", "{% if not m.tool_calls %}{{ '<|im_end|>\\n' }}{% endif %}"
        ),
        frozenset(),
        "a tool call",
        "<|endoftext|>",
    ),
    "words of its own after an answer": (
        chatml(inside="{% if m.role == 'assistant' and tools %} [tools]{% endif %}"),
        frozenset(),
        "between the answer and the new messages",
        "[tools]",
    ),
    "late system messages by their place": (
        chatml(before="{% if m.role == 'system' and not loop.first %}{{ loop.index }}{% endif %}"),
        ALL - {"system"},
        "requests with system messages in mid-conversation are encoded whole",
        "",
    ),
    "thoughts before the last question": (
        chatml(
            before="{% if m.reasoning_content and loop.index < 5 %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        ),
        ALL - {"assistant"},
        "turns of an assistant that were not sampled here",
        "",
    ),
}


@pytest.mark.parametrize("case", LOOKING_BACK)
def test_what_a_template_looks_back_at_is_found_and_named(tmp_path, case):
    template, kept, probe, difference = LOOKING_BACK[case]
    codec = Codec(build_tokenizer(tmp_path / "t", template))
    assert {role for role in ALL if codec.extends((Message(role, "x"),))} == kept
    assert codec.mode == ("suffix" if kept else "full")
    assert probe in codec.mode_reason and difference in codec.mode_reason


STABLE = {
    "nothing": chatml(),
    "the last question, which is new": chatml(before="{% if loop.last %}{{ '<|endoftext|>' }}{% endif %}"),
    "thoughts since the last question": chatml(
        before="{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
        "{% if m.reasoning_content and loop.index0 > messages.index(last) %}<think>{% endif %}"
    ),
    "the clock": chatml(before="{{ strftime_now('%H:%M:%S.%f') }}"),
}


@pytest.mark.parametrize("case", STABLE)
def test_what_does_not_depend_on_the_past_is_proved(tmp_path, case):
    codec = Codec(build_tokenizer(tmp_path / "t", STABLE[case]))
    assert (codec.mode, codec.mode_reason) == ("suffix", None)


def test_every_rendering_of_a_proof_is_of_one_instant():
    template = ChatTemplate("{{ strftime_now('%f') }}{{ messages[0].content }}", {})
    stopped = template.at(datetime(2026, 1, 2, 3, 4, 5, 678))
    assert stopped.render((Message("user", "q"),)) == "000678q"


def form_of(source):
    return ChatTemplate(source, {}).form


def test_alternating_roles_are_kept_by_joining_users():
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}" + ASK
    )
    template = ChatTemplate(source, {})
    said = (
        Message("system", "s"),
        Message("user", "q"),
        Message("assistant", "a"),
        Message("system", "late"),
    )
    text = template.render((*said, Message("user", "r")))
    assert text.split("<|im_start|>")[1:] == [
        "user\ns\n\nq<|im_end|>\n",
        "assistant\na<|im_end|>\n",
        "user\nlate\n\nr<|im_end|>\n",
        "assistant\n",
    ]
    assert prove(template).roles == ALL


def test_content_may_be_wanted_as_parts():
    form = form_of(
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    assert form.parts
    assert form.messages((Message("user", "q"),))[0]["content"] == [{"type": "text", "text": "q"}]


def test_arguments_may_be_wanted_as_text():
    source = chatml(
        calls="{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    )
    call = Message("assistant", "", tool_calls=(ToolCall("c", "f", '{"a":  1}'),))
    assert 'f{"a":  1}' in ChatTemplate(source, {}).render((Message("user", "q"), call))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_is_given_under_the_name_that_the_template_reads(key):
    form = form_of(chatml(before="{% if m." + key + " %}{{ m." + key + " }}{% endif %}"))
    assert form.messages((Message("assistant", "a", "thought"),))[0][key] == "thought"


def test_parallel_calls_are_written_one_by_one_where_a_message_may_have_one():
    source = chatml(
        calls="{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{{ m.tool_calls[0].function | tojson }}{% endif %}"
    )
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "g", "{}"))
    messages = (
        Message("user", "q"),
        Message("assistant", "text", tool_calls=calls),
        Message("tool", "of g", call_id="b"),
        Message("tool", "of f", call_id="a"),
        Message("tool", "stray", call_id="x"),
    )
    rows = form_of(source).messages(messages)
    said = [(row["role"], row["content"], [c["id"] for c in row.get("tool_calls", ())]) for row in rows]
    assert said == [
        ("user", "q", []),
        ("assistant", "text", ["a"]),
        ("tool", "of f", []),
        ("assistant", "", ["b"]),
        ("tool", "of g", []),
        ("tool", "stray", []),
    ]


def test_results_that_a_template_would_leave_out_are_refused(tmp_path):
    source = "{% for m in messages if m.role != 'tool' %}" + TURN % CALLS + "{% endfor %}" + ASK
    codec = Codec(build_tokenizer(tmp_path / "t", source))
    messages = (Message("user", "q"), Message("tool", "r", call_id="c"))
    with pytest.raises(BadRequest, match="does not show tool results"):
        codec.encode_prompt(messages)


def test_a_directory_that_renders_nothing_is_refused_at_the_start(tmp_path):
    directory = build_tokenizer(tmp_path / "t", "{{ bos_token + messages[0].content }}")
    with pytest.raises(TokenizerError, match="bos_token.*undefined"):
        Codec(directory)


# --- template arguments of a request


def test_arguments_of_a_request_have_a_proof_of_their_own(tmp_path):
    codec = Codec(
        build_tokenizer(tmp_path / "t", chatml(before="{% if number %}{{ loop.index }}{% endif %}"))
    )
    assert codec.mode == "suffix"
    numbered = codec.for_arguments({"number": True})
    assert numbered.mode == "full" and not numbered.extends((Message("user", "q"),))
    assert codec.mode == "suffix" and codec.for_arguments({"number": False}).mode == "suffix"


def test_arguments_of_a_request_override_those_of_the_proxy(tmp_path):
    ask = ASK + "{% if enable_thinking %}{{ '<think>\\n' }}{% else %}{{ '<think></think>' }}{% endif %}"
    codec = Codec(build_tokenizer(tmp_path / "t", chatml(ask=ask)), {"enable_thinking": True})
    off = codec.for_arguments({"enable_thinking": False})
    assert (codec.opens_reasoning, off.opens_reasoning) == (True, False)
    assert codec.decode(off.encode_prompt((Message("user", "q"),))).endswith("<think></think>")
    assert off.for_arguments({"enable_thinking": True}).opens_reasoning


def test_codecs_of_arguments_are_kept_and_bounded(codec):
    first = codec.for_arguments({"n": 0, "m": 1})
    assert codec.for_arguments({"m": 1, "n": 0}) is first and codec.for_arguments({}) is codec
    for n in range(VARIANTS):
        codec.for_arguments({"n": n + 1})
    assert codec.for_arguments({"n": 0, "m": 1}) is not first
    assert len(codec._variants) == VARIANTS


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "strftime_now"])
def test_arguments_cannot_take_the_place_of_the_conversation(codec, name):
    with pytest.raises(BadRequest, match=name) as caught:
        codec.for_arguments({name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_arguments_that_the_template_refuses_are_a_bad_request(tmp_path):
    source = (
        "{% if effort not in (undefined, 'low') %}{{ raise_exception('no such effort') }}{% endif %}"
        + chatml()
    )
    codec = Codec(
        build_tokenizer(tmp_path / "t", source.replace("(undefined, 'low')", "('low', none)")),
        {"effort": "low"},
    )
    with pytest.raises(BadRequest, match="no such effort"):
        codec.for_arguments({"effort": "high"})
