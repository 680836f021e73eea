"""What an answer's text means, and that a growing answer shows the same."""

import json

import pytest
from gyre_proxy.parsers import REASONINGS, TOOL_PARSERS, AnswerFormat, Parsed, Segmenter, parse
from hypothesis import given
from hypothesis import strategies as st

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


THINK = REASONINGS[0]


def form(in_reasoning=False, tools="hermes", reasoning=THINK):
    return AnswerFormat(reasoning, in_reasoning, TOOL_PARSERS[tools])


def look(text, in_reasoning=False, with_tools=True):
    return parse(text, form(in_reasoning), {} if with_tools else None)


def test_thinking_text_and_calls_are_told_apart():
    assert look(f"<think>\nhm\n</think>\n\nText.\n{CALL}\n{CALL}") == Parsed(
        "hm", "Text.", (("f", '{"a": 1}'), ("f", '{"a": 1}'))
    )


def test_plain_text_keeps_its_white_space():
    assert look("  two\n\n") == Parsed("", "  two\n\n")


def test_unclosed_thinking_is_all_thinking():
    assert look(f"<think>\nlong {CALL}") == Parsed(f"long {CALL}", "")
    assert look("still thinking", in_reasoning=True) == Parsed("still thinking", "")


def test_thinking_opened_by_the_prompt_ends_at_its_close():
    assert look("hm\n</think>\n\nText", in_reasoning=True) == Parsed("hm", "Text")


def test_calls_are_not_looked_for_without_tools():
    assert look(CALL, with_tools=False) == Parsed("", CALL)


def test_malformed_calls_stay_in_the_text():
    for bad in (
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ):
        assert look(f"a {bad}") == Parsed("", f"a {bad}")


def test_a_malformed_call_does_not_hide_a_good_one():
    bad = "<tool_call>\n{not json}\n</tool_call>"
    assert look(f"{bad} {CALL}") == Parsed("", bad, (("f", '{"a": 1}'),))


def test_text_around_calls_is_kept():
    assert look(f"before {CALL} after").text == "before  after"


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        CALL,
        "text",
        " ",
        "\n",
        "<",
        "</t",
        "<tool",
        "{",
        "é",
    ]
)


@pytest.mark.parametrize("in_reasoning", [False, True])
@pytest.mark.parametrize("size", [1, 100])
def test_a_second_opening_tag_is_thinking(in_reasoning, size):
    text = "<think><think>a</think>b"
    segmenter, pieces = Segmenter(form(in_reasoning), False), []
    for start in range(0, len(text), size):
        pieces += segmenter.feed(text[start : start + size])
    shown = ["".join(piece for kind, piece in pieces if kind == wanted) for wanted in ("reasoning", "text")]
    assert shown == ["<think>a", "b"]
    assert (look(text, in_reasoning, False).reasoning, look(text, in_reasoning, False).text) == (
        "<think>a",
        "b",
    )


@given(st.lists(PIECES, max_size=12), st.booleans(), st.booleans(), st.data())
def test_a_growing_answer_shows_a_prefix_of_the_whole(pieces, in_reasoning, with_tools, data):
    text = "".join(pieces)
    segmenter, shown = Segmenter(form(in_reasoning), with_tools), {"reasoning": "", "text": ""}
    while text_left := text:
        size = data.draw(st.integers(1, len(text_left)))
        for kind, piece in segmenter.feed(text[:size]):
            shown[kind] += piece
        text = text[size:]
    whole = look("".join(pieces), in_reasoning, with_tools)
    assert whole.reasoning.startswith(shown["reasoning"])
    assert whole.text.startswith(shown["text"])


@given(st.lists(PIECES, max_size=12), st.booleans())
def test_no_word_the_model_wrote_is_lost(pieces, in_reasoning):
    text = "".join(pieces)
    parsed = look(text, in_reasoning)
    for word in ("text", "é", "{"):
        in_calls = len(parsed.calls) * CALL.count(word)
        assert (parsed.reasoning + parsed.text).count(word) + in_calls == text.count(word)


@given(
    st.dictionaries(
        st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=4
    )
)
def test_every_json_object_is_a_call(arguments):
    block = "<tool_call>" + json.dumps({"name": "f", "arguments": arguments}) + "</tool_call>"
    calls = look(block).calls
    encodable = not any("\ud800" <= c <= "\udfff" for c in json.dumps(arguments, ensure_ascii=False))
    assert [(name, json.loads(text)) for name, text in calls] == ([("f", arguments)] if encodable else [])
