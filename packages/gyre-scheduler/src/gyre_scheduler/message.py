"""The dictionary form shared by events and actions.

Invariant: `Base.from_dict(json(x.to_dict())) == x`. The `name` key is the class name, so that a message can
be one `event` line of the run log; keys that are not fields (`type`, `time`) are ignored on the way back.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, Self

from .errors import ProtocolError


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


class Message:
    """Base of the frozen dataclasses in `events` and `actions`. Fields are JSON values; lists are tuples."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type[Message]]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form: `{"name": class name, field: value, ...}`."""
        record: dict[str, Any] = {"name": type(self).__name__}
        for name in _field_names(type(self)):
            value = getattr(self, name)
            record[name] = list(value) if isinstance(value, tuple) else value
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """The message that `to_dict` described; ProtocolError for an unknown name or a missing field."""
        kind = cls.kinds.get(record.get("name", ""))
        if kind is None:
            raise ProtocolError(f"unknown {cls.__name__.lower()} {record.get('name')!r} in the record")
        try:
            values = {name: record[name] for name in _field_names(kind)}
        except KeyError as missing:
            raise ProtocolError(f"{kind.__name__} in the record lacks the field {missing}") from None
        return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
