"""Owns the JSON of one line of the run log: bytes to an object, nothing dropped on the way.

Invariant: an object whose keys repeat is refused at any depth (JSON readers keep the last of equal keys, so what a
writer said first would be lost without a word), and so is one nested too deeply to be written again.
"""

import json
import re

import orjson

from gyre_trajtree.errors import RecordError

MAX_DEPTH = 200
"""Objects and lists within each other; orjson writes 254."""

_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')


def parse_object(line: bytes | str) -> dict:
    """The JSON object of one line. Raises RecordError for anything else."""
    try:
        raw = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise RecordError("not a JSON object")
    keys, depth = _measure(raw)
    _check_depth(depth)
    text = line.encode() if isinstance(line, str) else line
    if _written_keys(text) != keys:
        json.loads(text, object_pairs_hook=_distinct, parse_int=str, parse_float=str)
    return raw


def check_writable(raw: dict) -> None:
    """Raise RecordError for an object that no reader would take because it is nested too deeply."""
    _check_depth(_measure(raw)[1])


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RecordError(f"objects and lists are nested {depth} deep, more than {MAX_DEPTH}")


def _measure(raw: dict) -> tuple[int, int]:
    """How many keys an object holds at all depths, and how deep it is."""
    keys, depth, level = 0, 0, [raw]
    while level:
        depth += 1
        inner: list = []
        for value in level:
            if type(value) is dict:
                keys += len(value)
                value = value.values()
            inner += [each for each in value if type(each) is dict or type(each) is list]
        level = inner
    return keys, depth


def _written_keys(line: bytes) -> int | None:
    """How many keys the line spells out, found without parsing; None when that would take a parser.

    A quote with a colon after it ends a key, or is text, where the quote is escaped. Space before the colon
    hides a key; a backslash at the end of a key, itself escaped, makes it look like text.
    """
    if _SPACED_COLON.search(line) or b'\\\\":' in line:
        return None
    return line.count(b'":') - line.count(b'\\":')


def _distinct(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise RecordError(f"field {repeated!r} is given twice; keep one")
    return found
