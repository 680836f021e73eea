"""Owns what was read of an execution's last requests, so that a growing conversation is read once and not every turn.

Pure; forgetting it costs time only. Invariant: a reader goes on only behind items that equal those it read, under
equal tools, in the protocol that it reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import orjson

from gyre_proxy.dialects.checks import BadField, Check

ROWS = 4
"""Readings that are kept: agents of one execution speak in turns."""

MOVING = 6
"""Items at the end of a request that the next one may hold in another form: cache marks move."""


class Reader(Protocol):
    """Takes checked items one after the other."""

    def add(self, item: Mapping) -> None: ...

    def copy(self) -> Self:
        """A reader that has read the same; adding to one leaves the other as it is."""


@dataclass(frozen=True, slots=True)
class _Row:
    begin: Callable[[list], Reader]
    """What made the reader: each protocol has its own."""
    tools: bytes
    head: bytes
    """The items as JSON, which tells 1 from true, without the bracket at the end."""
    count: int
    reader: Reader


class Readings:
    """The last readings of one execution."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def resume(self, begin: Callable[[list], Reader], tools: bytes, text: bytes) -> tuple[Reader | None, int]:
        """A reader of the first n items of a list that is `text` as JSON, and n; (None, 0) when none is known."""
        like = (
            row for row in self._rows if row.begin is begin and row.tools == tools and _begins(text, row.head)
        )
        row = max(like, key=lambda row: row.count, default=None)
        return (row.reader.copy(), row.count) if row else (None, 0)

    def keep(
        self, begin: Callable[[list], Reader], tools: bytes, head: bytes, count: int, reader: Reader
    ) -> None:
        """Note a reading in the place of those that it goes on from."""
        others = [row for row in self._rows if not _begins(head + b",", row.head)]
        self._rows = [_Row(begin, tools, head, count, reader.copy()), *others][:ROWS]


def _begins(text: bytes, head: bytes) -> bool:
    return text.startswith(head) and text[len(head) : len(head) + 1] in (b",", b"]")


def read(
    readings: Readings | None,
    body: Mapping,
    field: str,
    check: Check,
    begin: Callable[[list], Reader],
    left_out: int = 0,
) -> Reader:
    """Check a body and read the items of `field`, but for the last `left_out`. Raises BadField.

    `begin(tools)` makes a reader for checked tools.
    """
    items, tools = body.get(field), body.get("tools")
    listed = type(items) is list and type(tools) in (list, type(None))
    if readings is None or not listed:
        check(body)
        return _read(begin(tools or []), items[: len(items) - left_out] if type(items) is list else [])
    end = len(items) - left_out
    try:
        offered, text = orjson.dumps(tools), orjson.dumps(items[:end])
        reader, known = readings.resume(begin, offered, text)
    except orjson.JSONEncodeError:  # it nests deeper than JSON can be written
        check(body)
        raise
    _check(check, body, field, known)
    settled = max(known, end - MOVING)
    _read(reader := reader or begin(tools or []), items[known:settled])
    if settled > known:
        after = len(orjson.dumps(items[settled:end])) - 1
        readings.keep(begin, offered, text[: len(text) - after - (settled < end)], settled, reader)
    return _read(reader, items[settled:end])


def _read(reader: Reader, items: list) -> Reader:
    for item in items:
        reader.add(item)
    return reader


def _check(check: Check, body: Mapping, field: str, known: int) -> None:
    """Check what is not known yet; failures name the place in the whole body."""
    if not known:
        return check(body)
    try:
        check({**body, field: body[field][known:], "tools": None})
    except BadField as error:
        if error.path[:1] == (field,) and len(error.path) > 1:
            index, *inner = error.path[1:]
            error.path = tuple(inner)
            error.under(field, index + known)
        raise
