"""Owns the words in which the dialects say what a field may hold. Pure; every failure is a BadField.

A check is a callable that takes a value, which is not null, and raises BadField when it cannot stand in its field.
Null counts as an absent field everywhere. Invariant: what passed the checks of a dialect can be read without
another look at its types, and nests at most DEPTH levels below any field.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from gyre_proxy.errors import BadRequest
from gyre_proxy.nesting import DEPTH, RECORDED_DEPTH, too_deep

Check = Callable[[Any], None]

STATELESS = "this proxy is stateless; send the whole conversation with each request"

SHOWN = 60
"""Characters of a client's word that an error message repeats."""


class BadField(BadRequest):
    """A field holds what it cannot. `reason` goes on with the sentence that the field's name begins."""

    def __init__(self, reason: str, *path: str | int) -> None:
        super().__init__(reason, _path_text(path) or None)
        self.reason, self.path = reason, path

    def under(self, *outer: str | int) -> None:
        """See the failure from further out."""
        self.path = (*outer, *self.path)
        self.param = _path_text(self.path)

    def __str__(self) -> str:
        return f"field {_path_text(self.path)!r} {self.reason}" if self.path else self.reason


def _path_text(path: tuple[str | int, ...]) -> str:
    """messages[3].content[0].text"""
    parts = [f"[{part}]" if isinstance(part, int) else "." + part[:SHOWN] for part in path]
    return "".join(parts).removeprefix(".")


def shown(value: object) -> str:
    """A value as an error message repeats it: on one line, cut."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value[:SHOWN] if isinstance(value, str) else value)


def plainly(kind: type) -> Callable[[Check], Check]:
    """Marks a check that every value of one type passes, so that tables need not call it for those."""

    def mark(check: Check) -> Check:
        check.plain = kind
        return check

    return mark


@plainly(str)
def text(value: object) -> None:
    if type(value) is not str:
        raise BadField("must be a string")


def name(value: object) -> None:
    if type(value) is not str or not value:
        raise BadField("must be a string that is not empty")


@plainly(bool)
def flag(value: object) -> None:
    if type(value) is not bool:
        raise BadField("must be true or false")


def number(value: object) -> None:
    if type(value) not in (int, float) or not isfinite(value):
        raise BadField("must be a number")


@plainly(int)
def integer(value: object) -> None:
    """5.0 is an integer to JSON."""
    if type(value) is not int and not (type(value) is float and value.is_integer()):
        raise BadField("must be an integer")


def positive(value: object) -> None:
    integer(value)
    if value < 1:
        raise BadField("must be positive")


def whole(value: int | float | None) -> int | None:
    """What an integer field that passed its check stands for."""
    return None if value is None else int(value)


def anything(value: object) -> None:
    """Any JSON that is not too deep to be compared and rendered."""
    if value and too_deep(value):
        raise BadField(f"nests deeper than {DEPTH} levels; flatten it")


def mapping(value: object) -> None:
    if type(value) is not dict:
        raise BadField("must be an object")
    anything(value)


def recorded(value: object) -> None:
    """An object that the run log repeats."""
    mapping(value)
    if too_deep(value, RECORDED_DEPTH):
        raise BadField(f"nests deeper than {RECORDED_DEPTH} levels; flatten it")


def any_list(value: object) -> None:
    if type(value) is not list:
        raise BadField("must be a list")
    anything(value)


def strings_by_name(value: object) -> None:
    if type(value) is not dict or not all(type(inner) is str for inner in value.values()):
        raise BadField("must be an object of strings")


def one_of(*words: object) -> Check:
    def check(value: object) -> None:
        if type(value) is not str or value not in words:
            raise BadField(f"must be one of {', '.join(map(str, words))}, not {shown(value)}")

    return check


def refused(why: str) -> Check:
    """A field, or a kind of object, that the protocol has and this proxy does not serve."""

    def check(value: object) -> None:
        raise BadField(f"is not supported: {why}")

    return check


def refused_unless(harmless: object, why: str) -> Check:
    """Refused except for the one value that asks for nothing."""

    def check(value: object) -> None:
        if isinstance(value, bool) != isinstance(harmless, bool) or value != harmless:
            raise BadField(f"is not supported: {why}")

    return check


def either(*checks: tuple[type, Check]) -> Check:
    """The check of the value's own type."""
    by_type = dict(checks)
    words = {str: "a string", list: "a list", dict: "an object", int: "an integer", bool: "true or false"}

    def check(value: object) -> None:
        inner = by_type.get(type(value))
        if inner is None:
            raise BadField(f"must be {' or '.join(words[kind] for kind in by_type)}")
        inner(value)

    plain = [kind for kind, inner in by_type.items() if getattr(inner, "plain", None) is kind]
    return plainly(plain[0])(check) if plain else check


def list_of(check_one: Check, most: int | None = None) -> Check:
    """A list whose entries all pass."""
    kinds, key = getattr(check_one, "kinds", ({}, ""))

    def check(value: object) -> None:
        if type(value) is not list:
            raise BadField("must be a list")
        if most is not None and len(value) > most:
            raise BadField(f"may hold at most {most} entries")
        index = -1
        try:
            for inner in value:
                index += 1
                kind = inner.get(key) if type(inner) is dict else None
                check_kind = kinds.get(kind) if type(kind) is str else None
                (check_kind or check_one)(inner)
        except BadField as error:
            error.under(index)
            raise

    return check


def table(fields: Mapping[str, Check], required: str = "") -> Check:
    """An object with these fields, each with its check; others are refused unless they are empty.

    `required`: names of the fields that must be there, separated by blanks.
    """
    plain_type = {name: check.plain for name, check in fields.items() if hasattr(check, "plain")}.get
    needed = required.split()

    def check(value: object) -> None:
        if type(value) is not dict:
            raise BadField("must be an object")
        for name, inner in value.items():
            if type(inner) is plain_type(name) or inner is None:
                continue
            check_one = fields.get(name)
            if check_one is not None:
                try:
                    check_one(inner)
                except BadField as error:
                    error.under(name)
                    raise
            elif inner not in ([], {}, "", False):
                raise BadField("is not supported by this proxy; remove it", name)
        for name in needed:
            if value.get(name) is None:
                raise BadField("is missing", name)

    return check


def tagged(kinds: Mapping[str | None, Check], key: str = "type") -> Check:
    """An object of one of several kinds, which its field `key` tells apart; each kind has its own check.

    A check under None is that of objects without the field.
    """
    known = ", ".join(str(word) for word in kinds if word is not None)

    def check(value: object) -> None:
        if type(value) is not dict:
            raise BadField("must be an object")
        kind = value.get(key)
        check_one = kinds.get(kind) if type(kind) is str or kind is None else None
        if check_one is not None:
            check_one(value)
        elif kind is None:
            raise BadField("is missing", key)
        else:
            raise BadField(f"{shown(kind)} is not supported, only {known}", key)

    check.kinds = (kinds, key)
    return check
