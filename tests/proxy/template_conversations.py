"""Strategies: conversations as harnesses make them, tool arguments of every type, texts that are hard on templates."""

import json

from gyre_proxy.conversation import Message, ToolCall
from hypothesis import strategies as st

TEXT = st.lists(
    st.sampled_from(
        ["word", " ", "\n", "1", "é", "e\u0301", "日本", "🙂", "\u200d", "\ufdd2", "{}", '"', "'", "\\", "</", "<|im_end|>",
         "</think>", "<think>", "<tool_call>", "<|eot_id|>", "/no_think", "[INST]", "<｜User｜>", "\t", "\u2028", "{{ 1 }}"]
    )
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=4),
    max_size=6,
).map("".join)  # fmt: skip
WORDS = st.lists(st.sampled_from(["one", "two", "日本", "é"]), min_size=1, max_size=3).map(" ".join)
"""What assistants say: templates take an answer's own tags apart."""

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does <|im_end|> things",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "where"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "mcp__x-run")
)
_CALL = st.tuples(st.sampled_from(["read_file", "mcp__x-run"]), TEXT)


@st.composite
def answers(draw: st.DrawFn, calls: int = 2) -> Message:
    """An assistant's message; ids of calls are set by `numbered`."""
    made = draw(st.lists(_CALL, max_size=calls))
    text = draw(WORDS) if not made else draw(WORDS | st.just(""))
    thought = draw(st.just("") | WORDS)
    return Message(
        "assistant", text, thought, tuple(ToolCall("", n, json.dumps({"path": t})) for n, t in made)
    )


@st.composite
def follow_ups(draw: st.DrawFn, answer: Message) -> list[Message]:
    """What comes after an answer until the next one: results for its calls, what users and harnesses add."""
    out = [Message("tool", draw(TEXT), call_id=call.id) for call in answer.tool_calls]
    more = [Message("user", draw(TEXT)), Message("system", draw(TEXT))]
    count = draw(st.integers(0 if out else 1, 2))
    return out + draw(st.permutations(more))[:count]


@st.composite
def conversations(draw: st.DrawFn, calls: int = 2) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """(history that ends in an answer, new messages after it); a message has at most `calls` calls."""
    history = [Message("system", draw(TEXT))] * draw(st.integers(0, 1)) + [Message("user", draw(TEXT))]
    number = 0
    for last in [False] * draw(st.integers(0, 3)) + [True]:
        answer, number = numbered(draw(answers(calls)), number)
        history.append(answer)
        if not last:
            history += draw(follow_ups(answer))
    new = draw(follow_ups(history[-1]))
    for _ in range(draw(st.integers(0, 1))):
        answer, number = numbered(draw(answers(calls)), number)
        new += [answer, *draw(follow_ups(answer))]
    return tuple(history), tuple(new)


def numbered(answer: Message, first: int) -> tuple[Message, int]:
    """The answer with ids for its calls, and the next free number."""
    calls = tuple(
        ToolCall(f"callnum{first + i:02d}", call.name, call.arguments)
        for i, call in enumerate(answer.tool_calls)
    )
    return Message("assistant", answer.text, answer.reasoning, calls), first + len(calls)


NAME = "edit-file.v2"
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"type": ["integer", "null"]},
    "items": {"type": "array", "items": {}},
    "map": {"anyOf": [{"type": "object"}]},
}
TYPED_TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "d",
        "parameters": {"type": "object", "properties": PROPERTIES},
    },
}


def typed_arguments(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict]:
    """Arguments that fit PROPERTIES; `text` gives their strings."""
    scalar = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | text
    number = st.floats(allow_nan=False, allow_infinity=False, width=32).filter(
        lambda x: 1e-4 < abs(x) < 1e9 or not x
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "text": text,
            "count": st.integers(-(10**12), 10**12),
            "ratio": number,
            "flag": st.booleans(),
            "maybe": st.none() | st.integers(-9, 9),
            "items": st.lists(scalar, max_size=3),
            "map": st.dictionaries(st.sampled_from(["a", "b c", "日"]), scalar, max_size=2),
        },
    )
