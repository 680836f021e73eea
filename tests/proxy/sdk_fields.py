"""What the official SDKs' parameter types list: fields, kinds of objects, and a smallest value of each type."""

import typing
from typing import Any, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

_UNIONS = (typing.Union, type(int | str))
_WRAPPERS = (typing.Required, typing.NotRequired, typing.Annotated)
PLAIN = {str: "shell", int: 1, float: 1.0, bool: True, object: {}, Any: {}}


def unwrapped(hint: Any) -> Any:
    while get_origin(hint) in _WRAPPERS:
        hint = get_args(hint)[0]
    return hint


def fields(params: type) -> dict[str, Any]:
    """Name -> type of every field."""
    return get_type_hints(params, include_extras=True)


def members(hint: Any) -> list[Any]:
    """The alternatives of a type, entries of lists included."""
    hint = unwrapped(hint)
    if get_origin(hint) in _UNIONS:
        return [inner for arg in get_args(hint) for inner in members(arg)]
    if get_origin(hint) is not None and get_origin(hint) not in (dict, typing.Literal):
        return [inner for arg in get_args(hint) for inner in members(arg)]
    return [hint]


def kinds(hint: Any) -> list[tuple[str, type]]:
    """(the value of `type`, the parameter type) of every kind of object that a field may hold."""
    found = []
    for member in members(hint):
        if is_typeddict(member) and "type" in fields(member):
            words = [w for hint in members(fields(member)["type"]) for w in get_args(hint)]
            found += [(word, member) for word in words]
    return found


def smallest(hint: Any) -> Any:
    """A value of the type that has only what is required."""
    hint = unwrapped(hint)
    origin = get_origin(hint)
    if is_typeddict(hint):
        return {
            name: smallest(inner)
            for name, inner in fields(hint).items()
            if get_origin(inner) is typing.Required or name == "type"
        }
    if origin in _UNIONS:
        return smallest(next(arg for arg in get_args(hint) if arg is not type(None)))
    if origin is typing.Literal:
        return get_args(hint)[0]
    if origin is dict:
        return {}
    return PLAIN.get(hint, [])
