"""What an answer's text means, and that a growing answer shows the same."""

import itertools
import json

import pytest
from gyre_proxy.parsers import REASONINGS, TOOL_PARSERS, AnswerFormat, Parsed, Segmenter, parse, tool_types
from gyre_proxy.tool_types import typed
from hypothesis import given, settings
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


CALLS = {
    "hermes": CALL,
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "lfm2": "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:f{a:1}<tool_call|>",
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
}
TYPES = {"f": {"a": ("integer",)}}


def test_every_format_has_an_example_and_reads_it():
    assert list(CALLS) == list(TOOL_PARSERS)
    for name, call in CALLS.items():
        assert parse(f"Text.\n{call}", form(tools=name), TYPES) == Parsed("", "Text.", (("f", '{"a": 1}'),))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "llama3_json"])
def test_text_between_and_after_calls_is_kept_in_every_format(name):
    call = CALLS[name]
    parsed = parse(f"a {call} b {call}\n{call} c", form(tools=name), TYPES)
    assert parsed.text == "a  b  c" and len(parsed.calls) == 3


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_anywhere_is_text(name):
    call = CALLS[name]
    for end in range(1, len(call)):
        assert parse(f"a {call[:end]}", form(tools=name), TYPES) == Parsed("", f"a {call[:end]}")


@pytest.mark.parametrize("name", CALLS)
def test_calls_inside_of_thinking_are_thinking(name):
    thought = f"I could {CALLS[name]} or not"
    assert parse(f"<think>{thought}</think>no", form(tools=name), TYPES) == Parsed(thought, "no")
    assert parse(thought, form(True, name), TYPES) == Parsed(thought, "")


@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_call_hides_none_after_or_inside_of_it(name):
    opening = TOOL_PARSERS[name].opening
    parsed = parse(f"{opening} oh {opening}{CALLS[name]}", form(tools=name), TYPES)
    assert parsed == Parsed("", f"{opening} oh {opening}", (("f", '{"a": 1}'),))


@pytest.mark.parametrize("name", CALLS)
def test_thousands_of_malformed_calls_cost_no_more_than_their_length(name):
    """Each is read to the end of the answer at worst; without a bound this would take hours."""
    begun = TOOL_PARSERS[name].started("f")
    text = (begun + "x" * 10) * 20_000
    assert parse(text, form(tools=name), TYPES) == Parsed("", text)


@st.composite
def grown(draw):
    """(format, text, sizes of the pieces in which it comes) of answers that are mostly tags and calls."""
    name, reasoning = draw(st.sampled_from(list(CALLS))), draw(st.sampled_from([None, *REASONINGS]))
    call = CALLS[name]
    tags = (reasoning.opening, reasoning.closing) if reasoning else ("",)
    part = st.sampled_from(
        [
            call,
            call.removeprefix("<|python_tag|>"),
            call[:-3],
            TOOL_PARSERS[name].opening,
            *tags,
            '{"name": "f"',
        ]
    )
    text = "".join(draw(st.lists(part, max_size=3) | st.lists(part | PIECES, max_size=8)))
    in_reasoning = reasoning is not None and draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return form(in_reasoning, name, reasoning), text, sizes


@settings(max_examples=400)
@given(grown(), st.booleans())
def test_a_growing_answer_shows_a_prefix_of_the_whole(answer, with_tools):
    answers, text, sizes = answer
    whole = parse(text, answers, TYPES if with_tools else None)
    segmenter, shown, position = Segmenter(answers, with_tools), {"reasoning": "", "text": ""}, 0
    for size in itertools.cycle(sizes):
        if position >= len(text):
            break
        for kind, piece in segmenter.feed(text[position : position + size]):
            shown[kind] += piece
        position += size
    assert whole.reasoning.startswith(shown["reasoning"])
    assert whole.text.startswith(shown["text"])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("alone", [True, False])
def test_nothing_of_a_call_is_shown_while_it_grows(name, alone):
    text = CALLS[name].removeprefix("<|python_tag|>") if alone else f"Text. {CALLS[name]}"
    segmenter = Segmenter(form(tools=name), True)
    shown = "".join(piece for character in text for _, piece in segmenter.feed(character))
    assert shown == ("" if alone else "Text.")


def test_text_is_shown_as_soon_as_no_call_can_begin_in_it():
    segmenter = Segmenter(form(), True)
    assert [segmenter.feed(text) for text in ("Hel", "lo <", "tool", "s> and <tool_call>", "x")] == [
        [("text", "Hel")],
        [("text", "lo")],
        [],
        [("text", " <tools> and")],
        [],
    ]


def test_an_answer_of_a_model_that_does_not_think_aloud_is_text():
    assert parse("<think>a</think>b", form(reasoning=None), None) == Parsed("", "<think>a</think>b")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": NaN}',
        '{"x": Infinity}',
        '{"x": 1e999}',
        '{"x": "\\ud800"}',
        '{"x": %s}' % ("9" * 400),
        '{"a": 1',
        "[1]",
        '"a"',
        "null",
    ],
)
def test_arguments_that_some_json_reader_refuses_make_no_call(arguments):
    for before, after, name in (
        ('<tool_call>{"name": "f", "arguments": ', "}</tool_call>", "hermes"),
        ('{"name": "f", "parameters": ', "}", "llama3_json"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "deepseek",
        ),
    ):
        text = f"{before}{arguments}{after}"
        assert parse(text, form(tools=name), TYPES) == Parsed("", text)


def test_the_last_of_repeated_keys_counts_as_for_every_json_reader():
    assert look('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>').calls == (
        ("f", '{"a": 2}'),
    )


def test_closing_tags_inside_of_arguments_end_no_call():
    arguments = json.dumps({"cmd": "echo '</tool_call>' </think>"})
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert look(call).calls == (("f", arguments),)


# --- values without quotes


def coder(*parameters, types=None):
    inner = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in parameters)
    text = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    calls = parse(text, form(tools="qwen3_coder"), {"f": types or {}}).calls
    return json.loads(calls[0][1]) if calls else None


def test_text_between_parameter_tags_loses_one_line_break_at_each_end():
    for written, meant in (
        ("\na\n", "a"),
        ("\n\na\n\n", "\na\n"),
        ("a", "a"),
        ("\n\n", ""),
        ("\n  a\t\n", "  a\t"),
        ("", ""),
    ):
        assert coder(("p", written)) == {"p": meant}


def test_tags_inside_of_a_value_end_it_only_where_the_call_goes_on():
    value = "a </parameter> b </function> c </tool_call> <parameter=x> d"
    assert coder(("p", f"\n{value}\n"), ("q", "\n2\n")) == {"p": value, "q": "2"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", (), "5"),
        ("true", (), "true"),
        ("5", ("integer",), 5),
        ("-5", ("integer",), -5),
        ("5.0", ("integer",), 5),
        ("5.5", ("integer",), "5.5"),
        ("005", ("integer",), "005"),
        ("1e3", ("number",), 1000.0),
        ("1e999", ("number",), "1e999"),
        ("5", ("number",), 5),
        ("five", ("number",), "five"),
        ("True", ("boolean",), True),
        ("false", ("boolean",), False),
        ("yes", ("boolean",), "yes"),
        ("None", ("integer", "null"), None),
        ("null", ("string", "null"), None),
        ("null", ("integer",), "null"),
        ('{"a": [1]}', ("object",), {"a": [1]}),
        ('\n[1, "x"]\n', ("array",), [1, "x"]),
        ("[1", ("array",), "[1"),
        ('{"a": 1}', ("array",), '{"a": 1}'),
        ("7", ("string", "integer"), 7),
        ("seven", ("string", "integer"), "seven"),
        ("[" * 100_000, ("array",), "[" * 100_000),
        ("9" * 5000, ("integer",), "9" * 5000),
    ],
)
def test_a_value_has_the_type_that_its_tool_gives_it(text, types, value):
    assert typed(text, types) == value and type(typed(text, types)) is type(value)


def parameter_types(schema, **root):
    parameters = {"type": "object", "properties": {"p": schema}, **root}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return tool_types((tool,))["f"].get("p")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, ("integer",)),
        ({"type": "string"}, None),
        ({}, None),
        (True, None),
        ({"type": ["string", "null"]}, ("string", "null")),
        ({"type": "integer", "nullable": True}, ("integer", "null")),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, ("string", "array")),
        ({"oneOf": [{"type": "null"}, {"allOf": [{"type": "number"}]}]}, ("number", "null")),
        ({"enum": ["a", 1, None, True, 0.5]}, ("string", "integer", "number", "boolean", "null")),
        ({"const": {}}, ("object",)),
        ({"properties": {}}, ("object",)),
        ({"items": {}}, ("array",)),
        ({"type": "gizmo"}, None),
        ({"type": {"a": 1}}, None),
        ({"anyOf": {"a": 1}}, None),
        ({"$ref": "#/$defs/x"}, ("boolean",)),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "http://elsewhere/x"}, None),
        ({"$ref": "#/$defs/absent"}, None),
    ],
)
def test_types_are_found_wherever_a_schema_says_them(schema, types):
    root = {"$defs": {"x": {"type": "boolean"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}
    assert parameter_types(schema, **root) == types


@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"function": None},
        {"function": {"name": 5}},
        {"type": "web_search"},
        {"function": {"parameters": 1}},
    ],
)
def test_tools_without_a_name_have_no_types(tool):
    assert tool_types((tool,)) == {}


@pytest.mark.parametrize("parameters", [None, [], "x", {"properties": []}, {"properties": {"p": 5}}])
def test_schemas_that_say_nothing_leave_every_value_text(parameters):
    assert tool_types(({"function": {"name": "f", "parameters": parameters}},)) == {"f": {}}


def test_pythonic_calls_are_read_with_their_quotes_and_words():
    text = (
        "<|tool_call_start|>[my-tool(a='it\\'s', b=\"x, y='1'\", c=True, d=None, e=[1, 'z'], f={\"k\": null}, g=-2.5), "
        "other()]<|tool_call_end|>"
    )
    calls = parse(text, form(tools="lfm2"), {}).calls
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (
            "my-tool",
            {"a": "it's", "b": "x, y='1'", "c": True, "d": None, "e": [1, "z"], "f": {"k": None}, "g": -2.5},
        ),
        ("other", {}),
    ]


@pytest.mark.parametrize(
    "inner",
    [
        "f(open('x'))",
        "f(a=open)",
        "f(a=__import__('os'))",
        "f(1)",
        "f(**{})",
        "[f()]",
        "f",
        "f(a=1",
        "f(a=1 b=2)",
    ],
)
def test_pythonic_text_that_is_no_plain_call_is_text(inner):
    text = f"<|tool_call_start|>[{inner}]<|tool_call_end|>"
    assert parse(text, form(tools="lfm2"), {}) == Parsed("", text)


def test_llama_writes_calls_alone_or_after_a_tag_and_several_with_semicolons():
    one = '{"name": "f", "parameters": {"a": 1}}'
    read = ("f", '{"a": 1}')
    for text, shown, count in (
        (one, "", 1),
        (f"\n {one} \n", "", 1),
        (f"{one}; {one}", "", 2),
        (f"<|python_tag|>{one};{one}", "", 2),
        (f"Sure. <|python_tag|>{one}", "Sure.", 1),
        (f"{one} and more", f"{one} and more", 0),
        (f"Sure: {one}", f"Sure: {one}", 0),
        ('{"answer": 1}', '{"answer": 1}', 0),
    ):
        assert parse(text, form(tools="llama3_json"), TYPES) == Parsed("", shown, (read,) * count)


def test_bare_json_is_a_call_only_of_a_tool_on_offer():
    bare = '{"name": "Ada", "parameters": {"a": 1}}'
    assert parse(bare, form(tools="llama3_json"), TYPES) == Parsed("", bare)
    tagged = f"<|python_tag|>{bare}"
    assert parse(tagged, form(tools="llama3_json"), TYPES).calls == (("Ada", '{"a": 1}'),)


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
