"""Owns the types that tools give their parameters, for tool calls whose values are written without quotes.

Pure. Invariant: a value that does not fit its type stays the text that the model wrote; nothing is lost or invented.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

Types = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Tool -> parameter -> JSON types it may have; parameters that are text, or of which nothing is known, are left out."""

_KNOWN = ("string", "integer", "number", "boolean", "null", "object", "array")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_DEPTH = 8
"""Levels of anyOf, oneOf, allOf and $ref that are followed."""


class _ToolTypes(Mapping[str, Mapping[str, tuple[str, ...]]]):
    """Types by tool, found when they are asked for: of many tools on offer an answer calls few."""

    def __init__(self, functions: Mapping[str, Mapping]) -> None:
        self._functions = functions

    def __getitem__(self, name: str) -> dict[str, tuple[str, ...]]:
        schema = self._functions[name].get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        found = {}
        for parameter, inner in (properties if isinstance(properties, dict) else {}).items():
            allowed = _types(inner, schema, _DEPTH)
            types = tuple(kind for kind in _KNOWN if kind in allowed)
            if types not in ((), ("string",)):
                found[parameter] = types
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


def tool_types(tools: Iterable[Mapping]) -> Types:
    """Types by tool and parameter, of tools in the shape {"type": "function", "function": {...}}."""
    functions = [tool.get("function") for tool in tools]
    named = (f for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str))
    return _ToolTypes({function["name"]: function for function in named})


def _types(schema: object, root: Mapping, depth: int) -> set[str]:
    """JSON types that a schema allows; empty when it does not say."""
    if not isinstance(schema, dict) or not depth:
        return set()
    given = schema.get("type")
    types = {t for t in (given if isinstance(given, list) else [given]) if t in _KNOWN}
    if schema.get("nullable") is True and types:
        types.add("null")
    if types:
        return types
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {_type(value) for value in schema.get("enum", [schema.get("const")])}
    if isinstance(schema.get("$ref"), str):
        return _types(_target(schema["$ref"], root), root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            return set().union(*(_types(inner, root, depth - 1) for inner in schema[key]))
    if isinstance(schema.get("properties"), dict):
        return {"object"}
    return {"array"} if "items" in schema else set()


def _target(reference: str, root: Mapping) -> object:
    """What "#/$defs/X" names; None for anything else."""
    value: object = root
    head, *steps = reference.split("/")
    for step in steps if head == "#" else [""]:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _type(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def typed(text: str, types: tuple[str, ...]) -> object:
    """The JSON value that `text` stands for in a parameter of these types; the text itself when it fits none."""
    bare = text.strip()
    word = bare.lower()
    if word in _WORDS and ("null" if _WORDS[word] is None else "boolean") in types:
        return _WORDS[word]
    if _NUMBER.fullmatch(bare) and ("integer" in types or "number" in types):
        return _number(bare, text, "number" in types)
    if bare[:1] in ("{", "[") and ("object" if bare[0] == "{" else "array") in types:
        try:
            return json.loads(bare)
        except (ValueError, RecursionError):
            return text
    return text


def _number(bare: str, text: str, fractions: bool) -> object:
    try:
        value = json.loads(bare)
    except ValueError:  # thousands of digits, or leading zeros
        return text
    if isinstance(value, float) and (not math.isfinite(value) or not (fractions or value.is_integer())):
        return text
    return int(value) if isinstance(value, float) and not fractions else value
