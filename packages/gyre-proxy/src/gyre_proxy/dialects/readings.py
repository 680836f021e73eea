"""Owns what was read of an execution's last requests, so that a growing conversation is read once and not every turn.

No I/O; forgetting it costs time only. A body that begins with the bytes of a known one, up to the end of an item of its
list, is taken up there: neither its JSON nor its items are read again. Invariant: what is taken up means what the whole
body means, in the protocol that read it, under the tools that it was read under.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import orjson

from gyre_proxy.dialects.checks import BadField, Check

ROWS = 4
"""Readings that are kept: agents of one execution speak in turns."""

MOVING = 1
"""Items at the end of a request that the next one may hold in another form: cache marks move on. At least one."""

_REST = secrets.token_hex(8)
"""Stands for the name of the list in what is left of a body; no client can know it, so none can write it twice."""

_MARKS = 3
"""Items at the end among which clients move their cache marks."""

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{},]')
"""What the ends of values are found by, in bytes that are known to be JSON."""

_TOKENS = 2**18
"""How many are looked at before a body is given up as nothing worth noting: it takes about 0.1 s."""


class Reader(Protocol):
    """Takes checked items one after the other, and notes what they mean in lists and dicts, whose values it leaves alone."""

    def add(self, item: Mapping) -> None: ...


Begin = Callable[[list], Reader]
"""Makes a reader for checked tools. Each protocol has its own, and is told apart by it."""


@dataclass(frozen=True, slots=True)
class _Row:
    """What the first items of a list meant, and the bytes that said so."""

    begin: Begin
    tools: bytes | None
    """As JSON, which tells 1 from true."""
    head: bytes
    """The body up to the end of the last item that was read."""
    field: str
    before: Mapping[str, object]
    """The fields before the list."""
    count: int
    """Items that were read."""
    reader: Reader


class Body(dict):
    """The fields of a request. Of items that an earlier request held already its list is without the first `known`."""

    def __init__(
        self, fields: Mapping, raw: bytes = b"", readings: "Readings | None" = None, row: _Row | None = None
    ) -> None:
        """`raw`: the whole body, which `readings` may take note of."""
        super().__init__(fields)
        self.raw, self.readings, self.row = raw, readings, row

    @property
    def known(self) -> int:
        return self.row.count if self.row else 0


class Readings:
    """The last readings of one execution."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def resume(self, begin: Begin, raw: bytes) -> Body | None:
        """The body without the items that were read before; None when none are known, or it is no JSON."""
        like = [row for row in self._rows if row.begin is begin and _goes_on(raw, row.head)]
        for row in sorted(like, key=lambda row: row.count, reverse=True):
            rest = _rest(raw, len(row.head) + 1)
            items = rest and rest.pop(_REST)
            if not items:
                return None  # it is no JSON, or would be none without the items that are known
            if row.field in rest or not rest.keys().isdisjoint(row.before):
                return None  # it names a field twice, and the last one counts
            fields = {**row.before, row.field: items, **rest}
            if _json(fields.get("tools")) == row.tools:
                return Body(fields, raw, self, row)
        return None

    def keep(self, body: Body, field: str, settled: int, begin: Begin, reader: Reader) -> None:
        """Note a reading of the first `settled` items of a body's list, in the place of those that it goes on from."""
        if body.row is not None:
            tools, before, start = body.row.tools, body.row.before, len(body.row.head) + 1
        else:
            tools = _json(body.get("tools"))
            found = _list(body.raw, field)
            if found is None:
                return
            before, start = found
        end = _end(body.raw, start, settled)
        if end is None:
            return
        head = body.raw[:end]
        others = [row for row in self._rows if not _goes_on(head + b",", row.head)]
        row = _Row(begin, tools, head, field, before, body.known + settled, _copied(reader))
        self._rows = [row, *others][:ROWS]


def _goes_on(raw: bytes, head: bytes) -> bool:
    return raw.startswith(head) and raw[len(head) : len(head) + 1] == b","


def _json(value: object) -> bytes | None:
    """None for what nests deeper than JSON can be written."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return None


def _rest(raw: bytes, start: int) -> dict | None:
    """What a body holds from an item of its list on, the list under _REST; None when it is no JSON."""
    try:
        return orjson.loads(b'{"%b":[%b' % (_REST.encode(), raw[start:]))
    except orjson.JSONDecodeError:
        return None


def _list(raw: bytes, field: str) -> tuple[dict, int] | None:
    """(fields before the list `field` of a body, where its first item begins).

    None when the field comes twice, its name is written with escapes, or it is far.
    """
    name, depth, last = b'"%b"' % field.encode(), 0, b""
    for token in islice(_TOKEN.finditer(raw), _TOKENS):
        text = token[0]
        if text == b"[" and depth == 1 and last == name:
            break
        if text in (b"[", b"{"):
            depth += 1
        elif text in (b"]", b"}"):
            depth -= 1
        elif depth == 1 and text != b",":
            last = text
    else:
        return None
    before = orjson.loads(raw[: token.start()] + b"0}")
    del before[field]
    rest = _rest(raw, token.end())
    once = rest is not None and field not in rest and rest.keys().isdisjoint(before)
    return (before, token.end()) if once else None


def _end(raw: bytes, start: int, count: int) -> int | None:
    """Where the first `count` items of a list end that goes on at `start` and has more of them; None when that is far."""
    depth = 0
    for token in islice(_TOKEN.finditer(raw, start), _TOKENS):
        text = token[0]
        if text in (b"[", b"{"):
            depth += 1
        elif text in (b"]", b"}"):
            depth -= 1
        elif text == b"," and depth == 0:
            count -= 1
            if count == 0:
                return token.start()
    return None


def read(body: Mapping, field: str, check: Check, begin: Begin, left_out: int = 0) -> tuple[Reader, int]:
    """Check a body and read the items of `field`, but for the last `left_out`.

    Returns what was read, and how many items come before those that the body still holds. Raises BadField.
    """
    body = body if isinstance(body, Body) else Body(body)
    _check(check, body, field)
    items = body.get(field)
    items = items[: len(items) - left_out] if type(items) is list else []
    reader = _copied(body.row.reader) if body.row else begin(body.get("tools") or [])
    settled = _settled(items) if body.readings is not None else 0
    _read(reader, items[:settled])
    if settled:
        body.readings.keep(body, field, settled, begin, reader)
    _read(reader, items[settled:])
    return reader, body.known


def _settled(items: list[Mapping]) -> int:
    """How many items of a list the next request will hold as they are."""
    settled = max(0, len(items) - MOVING)
    marked = (at for at in range(max(0, len(items) - _MARKS), settled) if _marked(items[at]))
    return next(marked, settled)


def _marked(item: Mapping) -> bool:
    content = item.get("content")
    parts = content if type(content) is list else ()
    return any("cache_control" in part for part in (item, *parts))


def _copied(reader: Reader) -> Reader:
    """A reader that has read the same; adding to one leaves the other as it is."""
    other = object.__new__(type(reader))
    vars(other).update((n, v.copy() if type(v) in (list, dict) else v) for n, v in vars(reader).items())
    return other


def _read(reader: Reader, items: list) -> None:
    for item in items:
        reader.add(item)


def _check(check: Check, body: Body, field: str) -> None:
    """Check what is not known yet; failures name the place in the whole body."""
    if not body.known:
        return check(dict(body))
    try:
        check({**body, "tools": None})
    except BadField as error:
        if error.path[:1] == (field,) and len(error.path) > 1:
            index, *inner = error.path[1:]
            error.path = tuple(inner)
            error.under(field, index + body.known)
        raise
