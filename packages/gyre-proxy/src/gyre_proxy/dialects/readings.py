"""Owns what was read of an execution's last requests, so that a growing conversation is read once and not every turn.

Pure; forgetting it costs time only. Invariant: a reader goes on only behind items that equal those it read, under
equal tools.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

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
    field: str
    tools: object
    items: list
    reader: Reader


class Readings:
    """The last readings of one execution."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def resume(self, field: str, tools: object, items: list) -> tuple[Reader | None, int]:
        """A reader of the first n items, and n; (None, 0) when nothing like it was read."""
        like = (
            row
            for row in self._rows
            if row.field == field and row.tools == tools and items[: len(row.items)] == row.items
        )
        row = max(like, key=lambda row: len(row.items), default=None)
        return (row.reader.copy(), len(row.items)) if row else (None, 0)

    def keep(self, field: str, tools: object, items: list, reader: Reader) -> None:
        """Note a reading in the place of those that it goes on from."""
        others = [row for row in self._rows if row.items != items[: len(row.items)]]
        self._rows = [_Row(field, tools, items, reader.copy()), *others][:ROWS]


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
    if type(items) is not list or type(tools) not in (list, type(None)):
        check(body)
        items = []
    reader, known = (None, 0) if readings is None else readings.resume(field, tools, items)
    _check(check, body, field, known)
    if reader is None:
        reader = begin(tools or [])
    end = len(items) - left_out
    settled = max(known, end - MOVING)
    for item in items[known:settled]:
        reader.add(item)
    if readings is not None and settled > known:
        readings.keep(field, tools, items[:settled], reader)
    for item in items[settled:end]:
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
