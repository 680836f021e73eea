"""Owns tools and tool calls in the neutral form, as all dialects make them. Pure."""

from collections.abc import Iterable

import orjson

from gyre_proxy.dialects.checks import BadField
from gyre_proxy.nesting import DEPTH, too_deep


def function_tool(name: str, description: str | None, parameters: dict | None) -> dict:
    """A tool in the shape chat templates expect."""
    function: dict = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def forced_tool(name: str | None, tools: Iterable[dict], *path: str) -> str | None:
    """The `forced` of a request, checked against the tools on offer; `path` is the field that names the tool."""
    if name is None:
        return None
    names = {tool["function"]["name"] for tool in tools}
    if (name == "" and names) or name in names:
        return name
    raise BadField("names a tool that is not in 'tools'" if name else "needs 'tools' to choose from", *path)


def arguments(text: str) -> None:
    """The check of a tool call's arguments: a string, whose JSON is not too deep to be compared and rendered."""
    if type(text) is not str:
        raise BadField("must be a string of JSON")
    if text.count("{") + text.count("[") <= DEPTH:
        return
    try:
        deep = too_deep(orjson.loads(text))
    except orjson.JSONDecodeError:
        return  # no JSON for any reader of this package: plain text
    if deep:
        raise BadField(f"nests deeper than {DEPTH} levels; flatten it")


def json_text(value: object) -> str:
    return orjson.dumps(value).decode()
