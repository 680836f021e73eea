"""Owns the checks of request fields that all dialects share. Pure; every failure is a BadRequest."""

from collections.abc import Iterable, Mapping

import orjson

from gyre_proxy.errors import BadRequest
from gyre_proxy.nesting import DEPTH, too_deep

SAMPLING = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")


def check_known(body: Mapping, known: Iterable[str]) -> None:
    """Refuse fields outside `known` unless they are empty, so that nothing asked for is silently ignored."""
    for name, value in body.items():
        if name not in known and value not in (None, [], {}, "", False):
            raise BadRequest(f"field {name!r} is not supported by this proxy; remove it", name)


def text_field(body: Mapping, name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise BadRequest(f"field {name!r} must be a string", name)
    return value


def list_field(body: Mapping, name: str) -> list:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"field {name!r} must be a list", name)
    return value


def flag_field(body: Mapping, name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest(f"field {name!r} must be true or false", name)
    return bool(value)


def limit_field(body: Mapping, *names: str) -> int | None:
    """The first of `names` that is set: a positive token count."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise BadRequest(f"field {name!r} must be a positive integer", name)
            return value
    return None


def stop_field(body: Mapping, name: str) -> tuple[str, ...]:
    value = body.get(name)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise BadRequest(f"field {name!r} must be a string or a list of non-empty strings", name)
    return tuple(values)


def asked_sampling(body: Mapping) -> dict:
    """Sampling fields the client sent, checked to be numbers."""
    asked = {}
    for name in SAMPLING:
        value = body.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BadRequest(f"field {name!r} must be a number", name)
            asked[name] = value
    return asked


def mapping(value: object, what: str) -> Mapping:
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be an object")
    return value


def json_text(value: object) -> str:
    return orjson.dumps(value).decode()


def arguments_text(text: str) -> str:
    """The arguments of a tool call, refused when they nest too deep to be compared and rendered."""
    if text.count("{") + text.count("[") <= DEPTH:
        return text
    try:
        deep = too_deep(orjson.loads(text))
    except orjson.JSONDecodeError:
        return text  # no JSON for any reader of this package: plain text
    if deep:
        raise BadRequest(f"tool call arguments nest deeper than {DEPTH} levels; flatten them")
    return text


def function_tool(name: object, description: object, parameters: object) -> dict:
    """A tool in the shape chat templates expect."""
    if not isinstance(name, str) or not name:
        raise BadRequest("every tool needs a name", "tools")
    function: dict = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def sse(event: str | None, data: object) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
