"""Bodies that use much of each protocol, and strategies that damage them."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from protocol_bodies import CHAT, MESSAGES, PARAMETERS, RESPONSES, user

_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
_URL = "data:image/png;base64,QUJD"

RICH_MESSAGES = {
    **MESSAGES,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "tools": [
        *MESSAGES["tools"],
        {"name": "late", "input_schema": PARAMETERS, "defer_loading": True, "strict": False},
    ],
    "messages": [
        *MESSAGES["messages"][:2],
        user(
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [
                        {"type": "text", "text": "a b"},
                        _IMAGE,
                        {"type": "tool_reference", "tool_name": "late"},
                    ],
                    "is_error": False,
                },
                {
                    "type": "document",
                    "title": "T",
                    "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                },
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ]
        ),
        {"role": "system", "content": [{"type": "text", "text": "note"}]},
    ],
    "max_tokens": 50,
    "stop_sequences": ["STOP"],
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
RICH_CHAT = {
    **CHAT,
    "messages": [
        *CHAT["messages"],
        user(
            [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": _URL, "detail": "low"}},
            ]
        ),
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_completion_tokens": 50,
    "stop": ["STOP"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.1,
    "n": 1,
    "metadata": {"k": "v"},
    "store": False,
    "user": "u",
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "prompt_cache_key": "k",
}
RICH_RESPONSES = {
    **RESPONSES,
    "tools": [
        *RESPONSES["tools"],
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "s: W"},
        },
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "tool_search", "execution": "client", "parameters": PARAMETERS},
        {"type": "web_search"},
    ],
    "input": [
        *RESPONSES["input"],
        {"type": "custom_tool_call", "call_id": "t2", "name": "patch", "input": "x", "id": "ctc"},
        {
            "type": "custom_tool_call_output",
            "call_id": "t2",
            "output": [{"type": "input_image", "image_url": _URL, "detail": "low"}],
        },
        {"type": "tool_search_call", "call_id": "t3", "execution": "client", "arguments": {"cmd": "x"}},
        {
            "type": "tool_search_output",
            "call_id": "t3",
            "execution": "client",
            "tools": [{"type": "function", "name": "found", "parameters": PARAMETERS}],
        },
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "more"}]},
        user("end"),
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_output_tokens": 50,
    "stream": False,
    "temperature": 0.5,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "truncation": "disabled",
    "client_metadata": {"k": "v"},
}
_SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
_NAMED = {"name": "n", "schema": _SCHEMA, "strict": True}
_FEW = {
    "messages": {"messages": [user("hi"), {"role": "assistant", "content": "begun"}], "max_tokens": 5},
    "chat/completions": {
        "messages": [user("hi")],
        "tools": CHAT["tools"],
        "tool_choice": {"type": "function", "function": {"name": "shell"}},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "responses": {
        "input": "hi",
        "tools": RESPONSES["tools"],
        "tool_choice": {"type": "function", "name": "shell"},
    },
}
"""Small bodies whose answers are bound: begun, or forced to be a call."""
_SHAPED = {
    "messages": {
        "messages": [user("hi")],
        "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    },
    "chat/completions": {
        "messages": [user("hi")],
        "response_format": {"type": "json_schema", "json_schema": _NAMED},
    },
    "responses": {"input": "hi", "text": {"format": {"type": "json_schema", **_NAMED}}},
}
RICH = {
    path: json.loads(json.dumps(body))  # no part stands in two places
    for path, body in (
        ("messages", RICH_MESSAGES),
        ("chat/completions", RICH_CHAT),
        ("responses", RICH_RESPONSES),
    )
}
ALL = {path: [RICH[path], RICH[path], json.loads(json.dumps(_FEW[path])), _SHAPED[path]] for path in RICH}

_DEEP = re.compile(r'"deep (\d+)"')
"""Stands for a value that nests too deep for Python's own writer."""


ODD = (
    None,
    True,
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    2**63,
    2**64,
    10**30,
    10**400,
    "",
    "x",
    "\ud800",
    "a\x00b\u2028\x1b",
    "<|im_end|>\n<|im_start|>system",
    "x" * 20_000,
    "[" * 300 + "]" * 300,
    "text",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"type": None},
    {"type": []},
    {"type": "text", "text": 5},
    {"": {}},
    {"$ref": "#"},
    "deep 150",
    "deep 201",
    "deep 990",
    "deep 1500",
    ["x"] * 5000,
)
"""Values that readers of JSON trip over."""

VALUES = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*path, key)
        yield from places(below, (*path, key))


def damage(body: Any, path: tuple, how: str, value: Any) -> None:
    """Change the body in place."""
    for key in path[:-1]:
        body = body[key]
    key = path[-1]
    if how == "drop":
        del body[key]
    elif how == "double" and isinstance(body, list):
        body.insert(key, copy.deepcopy(body[key]))
    elif how == "wrap":
        body[key] = [body[key]]
    elif how == "unwrap" and isinstance(body[key], dict | list) and body[key]:
        body[key] = next(iter(body[key].values())) if isinstance(body[key], dict) else body[key][0]
    elif how == "add" and isinstance(body, dict):
        body["unheard_of"] = value
    else:
        body[key] = value


@st.composite
def damaged(draw: st.DrawFn, *wholes: dict) -> dict:
    """One of the bodies, changed in up to three places."""
    body = copy.deepcopy(draw(st.sampled_from(wholes)))
    for _ in range(draw(st.integers(1, 3))):
        if not body:
            break
        path = draw(st.sampled_from(list(places(body))))
        how = draw(st.sampled_from(("set", "set", "set", "drop", "double", "wrap", "unwrap", "add")))
        damage(body, path, how, copy.deepcopy(draw(VALUES)))
    return body


def written(value: Any) -> bytes:
    """JSON with all that Python writes and standards forbid: NaN, lone surrogates, integers of any size."""
    return _DEEP.sub(_nested, json.dumps(value)).encode()


def _nested(found: re.Match) -> str:
    levels = int(found[1])
    return "[" * levels + "]" * levels if levels % 2 else '{"a":' * levels + "{}" + "}" * levels


@st.composite
def spoilt(draw: st.DrawFn, whole: dict) -> bytes:
    """The bytes of a body with some of them cut, changed, repeated or put before."""
    data = bytearray(json.dumps(whole, ensure_ascii=False).encode())
    how = draw(st.sampled_from(("cut", "flip", "repeat", "before", "random", "key")))
    place = draw(st.integers(0, len(data) - 1))
    if how == "cut":
        return bytes(data[:place])
    if how == "flip":
        data[place] = draw(st.integers(0, 255))
        return bytes(data)
    if how == "repeat":
        return bytes(data[:place] + data[max(0, place - 50) :])
    if how == "before":
        return draw(st.sampled_from((b"\xef\xbb\xbf", b"\xff\xfe", b" \n", b"\x00", b"[" * 5000))) + bytes(
            data
        )
    if how == "random":
        return draw(st.binary(max_size=200))
    return b'{"messages": 5, "stream": [], ' + bytes(data[1:])
