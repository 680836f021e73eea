"""Chat templates that models ship, as trl collects them: what each is judged to be, and that the judgement is right.

Vocabularies of most of these models are not at hand; a small one gets the control tokens that the template writes.
The other tests of templates use real vocabularies.
"""

import json
import re
from dataclasses import replace

import jinja2
import pytest
from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Message, ToolCall
from gyre_proxy.errors import BadRequest
from gyre_proxy.parsers import TOOL_PARSERS, parse, tool_types
from gyre_proxy.template import Sandbox
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from proxy_tokenizer import build_tokenizer
from real_tokenizers import control_tokens, trl_names, trl_template
from template_conversations import NAME, TEXT, TOOLS, TYPED_TOOL, WORDS, conversations, typed_arguments

ALL = frozenset(("user", "assistant", "system", "tool"))
NOTHING = frozenset()

PROVED = {
    "deepseekv3": ALL - {"tool"},
    "deepseek_r1_distill": ALL - {"tool"},
    "muse_glimmer": ALL - {"tool", "system"},
    "gptoss": NOTHING,
    "gemma4": NOTHING,
    "gemma4_v3": NOTHING,
    "gemma4_v4": NOTHING,
    "gemma4_v5": NOTHING,
    "diffusion_gemma": NOTHING,
}
"""Kinds of new messages whose suffixes are stable; all of them for every other template."""

REASONS = {
    "deepseekv3": "tool results are encoded whole",
    "deepseek_r1_distill": "a tool result after two rounds of tools",
    "muse_glimmer": "Valid recipients",
    "gptoss": "<|call|>",
    "gemma4": "<tool_call|><|tool_response>",
    "gemma4_v3": "<tool_call|><|tool_response>",
    "gemma4_v4": "<tool_call|><|tool_response>",
    "gemma4_v5": "<tool_call|><|tool_response>",
    "diffusion_gemma": "<tool_call|><|tool_response>",
}

PARSERS = {
    "hermes": ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"],
    "qwen3_coder": ["qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"],
    "glm": ["glm4moe"],
    "deepseek": ["deepseekv3"],
    "lfm2": ["lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"],
    "gemma4": ["gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"],
    "llama3_json": ["llama3_1", "llama3_2"],
}
PARSERS["qwen3_coder"] += [f"nemotron_3_{kind}" for kind in ("5_lightning", "nano", "super", "ultra")]
PARSER = {name: parser for parser, names in PARSERS.items() for name in names}

THINK_FIRST = {
    "qwen3_5_think", "qwen3_6", "qwen3_8", "deepseekv3", "deepseek_r1_distill",
    "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
}  # fmt: skip
"""Templates whose generation prompt opens the thinking."""

NAMES = trl_names()


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    made = {}

    def codec(name):
        if name not in made:
            source = trl_template(name)
            directory = tmp_path_factory.mktemp(name) / "t"
            made[name] = Codec(build_tokenizer(directory, source, control=control_tokens(source)))
        return made[name]

    return codec


@pytest.mark.parametrize("name", NAMES)
def test_each_template_is_judged(codecs, name):
    codec = codecs(name)
    proved = PROVED.get(name, ALL)
    assert {role for role in ALL if codec.extends((Message(role, "x"),))} == proved
    assert codec.mode == ("suffix" if proved else "full")
    assert (codec.mode_reason is None) == (proved == ALL)
    assert REASONS.get(name, "") in (codec.mode_reason or "")
    assert codec.tool_parser == PARSER.get(name)
    assert codec.opens_reasoning == (name in THINK_FIRST)


def test_whether_a_prompt_opened_the_thinking_may_depend_on_its_last_message(codecs):
    codec = codecs("deepseekv3")
    call = Message("assistant", "", tool_calls=(ToolCall("c0", "f", "{}"),))
    asked = (Message("user", "q"), call, Message("tool", "r", call_id="c0"))
    opened = [codec.answers_after(codec.encode_prompt(asked[:n])).in_reasoning for n in (1, 3)]
    assert opened == [True, False]


def test_a_turn_may_end_with_the_token_of_the_next_speaker(codecs):
    codec = codecs("glm4moe")
    token = codec._tokenizer.token_to_id
    assert {token(t) for t in ("<|user|>", "<|observation|>")} <= set(codec.stop_ids)
    result, follow = (Message("tool", "r", call_id="c"),), (Message("user", "q"),)
    shown = [
        codec.text(codec.encode_suffix(new, last))
        for new in (result, follow)
        for last in (token("<|observation|>"), 5)
    ]
    assert shown == [
        "\n<tool_response>\nr\n</tool_response><|assistant|>",
        "<|observation|>\n<tool_response>\nr\n</tool_response><|assistant|>",
        "<|user|>\nq<|assistant|>",
        "<|user|>\nq<|assistant|>",
    ]


def calls(codec):
    """Calls that a message may have for the template to show it and its results."""
    form = codec.template.form
    return 0 if not form.shows_results else 1 if form.single_calls else 2


@pytest.mark.parametrize("name", NAMES)
def test_a_suffix_is_the_tail_of_the_whole_prompt(codecs, name):
    codec = codecs(name)
    seen = []

    @settings(max_examples=25, deadline=None)
    @given(conversations(calls(codec)), st.booleans())
    def check(conversation, with_tools):
        history, new = conversation
        if not codec.extends(new):
            return
        try:
            whole = codec.encode_prompt((*history, *new), TOOLS if with_tools else ())
        except BadRequest:
            assume(False)
        suffix = codec.encode_suffix(new, -1)
        assert whole[-len(suffix) :] == suffix
        assert codec.encode_suffix(new, suffix[0]) == suffix[1:]
        seen.append(suffix)

    if codec.mode == "suffix":
        check()
        assert seen


@pytest.mark.parametrize("name", NAMES)
def test_the_same_text_as_transformers_gives(codecs, name):
    from transformers.utils.chat_template_utils import render_jinja_template

    codec = codecs(name)
    form = codec.template.form

    @settings(max_examples=10, deadline=None)
    @given(conversations(calls(codec)), st.booleans())
    def check(conversation, with_tools):
        messages = [m for part in conversation for m in part]
        tools = TOOLS if with_tools else ()
        try:
            ours = codec.template.render(messages, tools)
        except BadRequest:
            assume(False)
        (theirs,), _ = render_jinja_template(
            [form.messages(messages)],
            tools=list(tools) or None,
            chat_template=codec.template.source,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )
        assert ours == theirs

    check()


def written(codec, text, arguments, calls=1):
    """An assistant's message with calls as the template writes it, its turn end left out."""
    made = tuple(ToolCall(f"callnum{i:02d}", NAME, json.dumps(arguments)) for i in range(calls))
    question, follow = Message("user", "questionmark"), Message("user", "followmark")
    said = Message("assistant", text, tool_calls=made)
    whole = codec.template.render((question, said, follow), (TYPED_TOOL,))
    tail = codec.template.render((question, Message("assistant", "answermark"), follow), (TYPED_TOOL,))
    return whole.rpartition("questionmark")[2].removesuffix(tail.rpartition("answermark")[2])


AMBIGUOUS = {
    "qwen3_coder": ("<", "\n"),
    "glm": ("<",),
    "gemma4": ("<",),
    "lfm2": ("'", "\\", '"', "<"),
    "deepseek": ("`",),
}
"""What texts inside of arguments may not hold for a format that marks their ends but escapes nothing."""


@pytest.mark.parametrize("name", sorted(PARSER))
def test_the_calls_that_a_template_writes_are_read_back(codecs, name):
    codec = codecs(name)
    tools = codec.answers.tools
    banned = AMBIGUOUS.get(tools.name, ())
    text = TEXT.filter(lambda t: not any(c in t for c in banned))

    @settings(max_examples=40, deadline=None)
    @given(typed_arguments(text), st.integers(1, 2))
    def check(arguments, count):
        if codec.template.form.single_calls or name == "deepseekv3":
            count = 1
        answer = written(codec, "", arguments, count)
        if tools.bare:
            answer = answer[answer.index('{"name"') :]
        parsed = parse(answer, replace(codec.answers, in_reasoning=False), tool_types((TYPED_TOOL,)))
        assert [(n, json.loads(a)) for n, a in parsed.calls] == [(NAME, arguments)] * count

    check()


@pytest.mark.parametrize("name", sorted(PARSER))
def test_a_started_call_is_how_the_template_begins_one(codecs, name):
    tools = codecs(name).answers.tools
    answer = written(codecs(name), "", {"text": "x"})
    assert tools.started(NAME) in answer
    assert tools.started(NAME).startswith(tools.started(""))
    assert tools.started("") in answer


@given(st.sampled_from(sorted(TOOL_PARSERS)), WORDS)
def test_a_started_call_of_any_name_is_where_calls_are_looked_for(parser, name):
    tools = TOOL_PARSERS[parser]
    assert tools.begin(tools.started(name), 0, True) == 0


@pytest.mark.parametrize(
    "expression",
    ["m.role", "m['role']", "m.missing", "m.missing.more", "m.items", "m.items()|list", "m.get('role')", "m.keys",
     "m.__class__", "m.__class__.mro()", "m.update", "m.pop('role')", "m.__init__.__globals__", "m.format", "m.role.upper()",
     "m.role.format", "'{0.__class__}'.format(m)", "m.inner.role", "m.update is defined", "m.missing is defined"],
)  # fmt: skip
def test_the_sandbox_shows_and_refuses_what_the_library_s_own_does(expression):
    def rendered(kind: type) -> str:
        message = {"role": "user", "update": "shadowed", "inner": {"role": "x"}}
        try:
            return kind().from_string("{{ " + expression + " }}").render(m=message)
        except jinja2.TemplateError as error:
            return repr(error)

    def without_addresses(text: str) -> str:
        return re.sub("0x[0-9a-f]+", "", text)

    assert without_addresses(rendered(Sandbox)) == without_addresses(rendered(ImmutableSandboxedEnvironment))
