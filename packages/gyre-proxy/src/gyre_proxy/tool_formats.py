"""Owns how models write tool calls: one small reader for each way, in a registry by name.

Pure. A reader gets the answer's visible text and the place where a call begins, and finds the calls written there or
nothing: a malformed call is no call. Invariants: the arguments of a call are the JSON text of an object that every
JSON reader takes; the cost of reading a whole answer grows with its length, not with its square.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from gyre_proxy.nesting import too_deep
from gyre_proxy.tool_types import Types, typed

Call = tuple[str, str]
"""(name, arguments as the JSON text of an object)."""

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Block:
    """Calls found in a text, and where what they are written with ends."""

    end: int
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls."""

    name: str
    opening: str
    """The text that begins a call."""
    read: Callable[[str, int, Types], Block | None]
    """The calls that begin with the `opening` at a place; None when they are malformed."""
    started: Callable[[str], str]
    """What begins a call of the named tool, up to its arguments; of any tool when the name is empty."""
    bare: bool = False
    """An answer that begins with "{" may be a call too, of a tool on offer: JSON can be an answer as well."""

    def begin(self, text: str, position: int, first: bool) -> int:
        """Where the next call may begin, -1 when none does. `first`: the text begins the answer and nothing is read."""
        if self.bare and first and text.lstrip().startswith("{"):
            return 0
        return text.find(self.opening, position)

    def before(self, text: str, first: bool) -> int:
        """Length of what is certainly before any call while the text still grows."""
        if self.bare and first and text.lstrip()[:1] in ("", "{"):
            return 0
        found = text.find(self.opening)
        return found if found >= 0 else len(text) - beginning(text, self.opening)


def beginning(text: str, tag: str) -> int:
    """Characters at the end of the text that may be the beginning of the tag."""
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


def call(name: object, arguments: object) -> Call | None:
    """A call when the parts can be sent to any client: a name, and an object without infinities or lone surrogates."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or too_deep(arguments):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        name.encode()
        orjson.loads(text)  # to many readers a number of 400 digits is none
    except (ValueError, TypeError, RecursionError):
        return None
    return name, text


def _json(text: str, start: int) -> tuple[object, int] | None:
    """(value, end) of the JSON object that begins at a place, white space before it allowed."""
    start = _SPACE.match(text, start).end()
    if not text.startswith("{", start):
        return None
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _after(text: str, position: int, tag: str) -> int | None:
    """The end of the tag, which only white space may precede."""
    position = _SPACE.match(text, position).end()
    return position + len(tag) if text.startswith(tag, position) else None


# --- <tool_call> {"name": ..., "arguments": {...}} </tool_call>

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _hermes(text: str, start: int, types: Types) -> Block | None:
    found = _json(text, start + len(_OPEN))
    end = found and _after(text, found[1], _CLOSE)
    if not end:
        return None
    made = call(found[0].get("name"), found[0].get("arguments", {}))
    return Block(end, (made,)) if made else None


def _hermes_started(name: str) -> str:
    return f'{_OPEN}\n{{"name": "' + (f'{_inside(name)}", "arguments": ' if name else "")


def _inside(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]


# --- <tool_call> <function=NAME> <parameter=NAME> VALUE </parameter> ... </function> </tool_call>

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*<parameter=[^>\n]+>|\s*</function>\s*</tool_call>)")
_FUNCTION_END = re.compile(r"\s*</function>\s*</tool_call>")


def _qwen3_coder(text: str, start: int, types: Types) -> Block | None:
    head = _FUNCTION.match(text, start + len(_OPEN))
    if not head:
        return None
    known = types.get(head[1], {})
    arguments: dict[str, object] = {}
    position = head.end()
    while parameter := _PARAMETER.match(text, position):
        value = _VALUE_END.search(text, parameter.end())
        if not value:
            return None
        arguments[parameter[1]] = typed(text[parameter.end() : value.start()], known.get(parameter[1], ()))
        position = value.end()
    end = _FUNCTION_END.match(text, position)
    made = call(head[1], arguments) if end else None
    return Block(end.end(), (made,)) if made else None


def _qwen3_coder_started(name: str) -> str:
    return f"{_OPEN}\n<function=" + (f"{name}>\n" if name else "")


# --- <tool_call>NAME <arg_key>NAME</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>

_GLM_NAME = re.compile(r"\s*([^<>\s{}\"]+)")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>(?=\s*<arg_key>|\s*</tool_call>)")


def _glm(text: str, start: int, types: Types) -> Block | None:
    head = _GLM_NAME.match(text, start + len(_OPEN))
    if not head:
        return None
    known = types.get(head[1], {})
    arguments: dict[str, object] = {}
    position = head.end()
    while key := _GLM_KEY.match(text, position):
        value = _GLM_VALUE_END.search(text, key.end())
        if not value:
            return None
        arguments[key[1]] = typed(text[key.end() : value.start()], known.get(key[1], ()))
        position = value.end()
    end = _after(text, position, _CLOSE)
    made = call(head[1], arguments) if end else None
    return Block(end, (made,)) if made else None


def _glm_started(name: str) -> str:
    return _OPEN + (f"{name}\n" if name else "")


# --- DeepSeek V3: a JSON code block for each call between control tokens

_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = re.compile(r"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n]+)\n```json\n")
_DEEPSEEK_END = re.compile(r"\s*```<｜tool▁call▁end｜>")


def _deepseek(text: str, start: int, types: Types) -> Block | None:
    calls: list[Call] = []
    position = start + len(_DEEPSEEK_OPEN)
    while head := _DEEPSEEK_CALL.match(text, position):
        found = _json(text, head.end())
        end = found and _DEEPSEEK_END.match(text, found[1])
        made = call(head[1], found[0]) if end else None
        if made is None:
            return None
        calls.append(made)
        position = end.end()
    end = _after(text, position, _DEEPSEEK_CLOSE)
    return Block(end, tuple(calls)) if calls and end else None


def _deepseek_started(name: str) -> str:
    head = f"{_DEEPSEEK_OPEN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    return head + (f"{name}\n```json\n" if name else "")


# --- LFM2: a list of calls like Python's, [name(key='text', key=1)], between control tokens

_LFM2_OPEN, _LFM2_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_LFM2_HEAD = re.compile(r"\s*([^\s(),\[\]'\"=]+)\(")
_LFM2_KEY = re.compile(r"\s*([^\s=(),'\"]+)=")
_LFM2_NEXT = r"(?=,\s*[^\s=(),'\"]+=|\)\s*(?:,\s*[^\s(),\[\]'\"=]+\(|\]\s*" + re.escape(_LFM2_CLOSE) + "))"
"""What may follow a value: another one, another call, the end. Quotes inside of texts are not always escaped."""
_LFM2_VALUE_END = re.compile(_LFM2_NEXT)
_LFM2_TEXT_END = {quote: re.compile(rf"(?<!\\)(?:\\\\)*{quote}" + _LFM2_NEXT) for quote in "'\""}
_LFM2_ESCAPE = re.compile(r"\\([\\'\"nrt])")
_LFM2_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_LITERAL_LIMIT = 1 << 16
"""Characters of a value that Python's own parser may see."""


def _lfm2(text: str, start: int, types: Types) -> Block | None:
    position = _after(text, start + len(_LFM2_OPEN), "[")
    calls: list[Call] = []
    while position is not None and (head := _LFM2_HEAD.match(text, position)):
        try:
            arguments, position = _lfm2_arguments(text, head.end())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        made = call(head[1], arguments)
        if made is None:
            return None
        calls.append(made)
        position = _after(text, position, ",") or position
    inner = None if position is None else _after(text, position, "]")
    end = inner and _after(text, inner, _LFM2_CLOSE)
    return Block(end, tuple(calls)) if calls and end else None


def _lfm2_arguments(text: str, position: int) -> tuple[dict, int]:
    """(arguments, end) of what follows an opening parenthesis. Raises ValueError or SyntaxError when malformed."""
    out: dict[str, object] = {}
    while key := _LFM2_KEY.match(text, position):
        out[key[1]], position = _lfm2_value(text, key.end())
        position = _after(text, position, ",") or position
    end = _after(text, position, ")")
    if end is None:
        raise ValueError("arguments do not end")
    return out, end


def _lfm2_value(text: str, position: int) -> tuple[object, int]:
    quote = text[position : position + 1]
    if quote in _LFM2_TEXT_END:
        end = _LFM2_TEXT_END[quote].search(text, position + 1)
        if not end:
            raise ValueError("a text does not end")
        inner = text[position + 1 : end.end() - 1]
        return _LFM2_ESCAPE.sub(lambda found: _LFM2_ESCAPED.get(found[1], found[1]), inner), end.end()
    if quote and quote in "{[":
        try:
            value, end = _DECODER.raw_decode(text, position)
        except ValueError:
            pass
        else:
            if _LFM2_VALUE_END.match(text, end):
                return value, end
    found = _LFM2_VALUE_END.search(text, position)
    if not found or found.start() - position > _LITERAL_LIMIT:
        raise ValueError("a value does not end")
    bare = text[position : found.start()]
    return (_WORDS[bare] if bare in _WORDS else ast.literal_eval(bare)), found.start()


def _lfm2_started(name: str) -> str:
    return f"{_LFM2_OPEN}[" + (f"{name}(" if name else "")


# --- Llama 3: the whole answer is {"name": ..., "parameters": {...}}, or several with ";" between

_PYTHON_TAG = "<|python_tag|>"


def _llama3_json(text: str, start: int, types: Types) -> Block | None:
    tagged = text.startswith(_PYTHON_TAG, start)
    position = start + len(_PYTHON_TAG) if tagged else start
    calls: list[Call] = []
    while found := _json(text, position):
        made = call(found[0].get("name"), found[0].get("parameters", found[0].get("arguments")))
        if made is None or not (tagged or made[0] in types):
            return None
        calls.append(made)
        position = _SPACE.match(text, found[1]).end()
        if position == len(text):
            return Block(position, tuple(calls))
        position += text.startswith(";", position)
    return None


def _llama3_json_started(name: str) -> str:
    return '{"name": "' + (f'{_inside(name)}", "parameters": ' if name else "")


# --- Gemma 4: call:NAME{key:value,...} between control tokens, text between <|"|> marks

_GEMMA_OPEN, _GEMMA_CLOSE, _GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_GEMMA_HEAD = re.compile(r"call:([^{\s]+)\{")
_GEMMA_KEY = re.compile(r"([^:,{}\[\]]+):")
_GEMMA_BARE = re.compile(r"[^,{}\[\]<]+")


def _gemma4(text: str, start: int, types: Types) -> Block | None:
    head = _GEMMA_HEAD.match(text, start + len(_GEMMA_OPEN))
    if not head:
        return None
    try:
        arguments, position = _gemma_object(text, head.end(), 0)
    except (ValueError, RecursionError):
        return None
    end = _after(text, position, _GEMMA_CLOSE)
    made = call(head[1], arguments) if end else None
    return Block(end, (made,)) if made else None


def _gemma_object(text: str, position: int, depth: int) -> tuple[dict, int]:
    """(value, end) of what follows an opening brace. Raises ValueError when it is malformed."""
    out: dict[str, object] = {}
    while not text.startswith("}", position):
        key, position = _gemma_key(text, position)
        out[key], position = _gemma_value(text, position, depth + 1)
        position = _gemma_comma(text, position, "}")
    return out, position + 1


def _gemma_list(text: str, position: int, depth: int) -> tuple[list, int]:
    out: list[object] = []
    while not text.startswith("]", position):
        value, position = _gemma_value(text, position, depth + 1)
        out.append(value)
        position = _gemma_comma(text, position, "]")
    return out, position + 1


def _gemma_comma(text: str, position: int, end: str) -> int:
    if text.startswith(",", position):
        return position + 1
    if text.startswith(end, position):
        return position
    raise ValueError("neither a comma nor an end")


def _gemma_key(text: str, position: int) -> tuple[str, int]:
    if text.startswith(_GEMMA_QUOTE, position):
        key, position = _gemma_text(text, position)
        if not text.startswith(":", position):
            raise ValueError("a key without a value")
        return key, position + 1
    found = _GEMMA_KEY.match(text, position)
    if not found:
        raise ValueError("no key")
    return found[1], found.end()


def _gemma_text(text: str, position: int) -> tuple[str, int]:
    begin = position + len(_GEMMA_QUOTE)
    end = text.index(_GEMMA_QUOTE, begin)
    return text[begin:end], end + len(_GEMMA_QUOTE)


def _gemma_value(text: str, position: int, depth: int) -> tuple[object, int]:
    if depth > 200:
        raise ValueError("too deep")
    if text.startswith(_GEMMA_QUOTE, position):
        return _gemma_text(text, position)
    if text.startswith("{", position):
        return _gemma_object(text, position + 1, depth)
    if text.startswith("[", position):
        return _gemma_list(text, position + 1, depth)
    found = _GEMMA_BARE.match(text, position)
    if not found:
        raise ValueError("no value")
    bare = found[0]
    return (_WORDS[bare] if bare in _WORDS else typed(bare, ("number",))), found.end()


def _gemma4_started(name: str) -> str:
    return f"{_GEMMA_OPEN}call:" + (f"{name}{{" if name else "")


TOOL_PARSERS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("hermes", _OPEN, _hermes, _hermes_started),
        ToolFormat("qwen3_coder", _OPEN, _qwen3_coder, _qwen3_coder_started),
        ToolFormat("glm", _OPEN, _glm, _glm_started),
        ToolFormat("deepseek", _DEEPSEEK_OPEN, _deepseek, _deepseek_started),
        ToolFormat("lfm2", _LFM2_OPEN, _lfm2, _lfm2_started),
        ToolFormat("gemma4", _GEMMA_OPEN, _gemma4, _gemma4_started),
        ToolFormat("llama3_json", _PYTHON_TAG, _llama3_json, _llama3_json_started, bare=True),
    )
}
"""In the order in which they are tried on a template's own calls."""
