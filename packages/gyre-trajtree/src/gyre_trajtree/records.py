"""Owns the run log's record types and their one-line JSON form (format version 1).

Invariants: `from_line(to_line(record))` carries the same content, unknown fields (`extra`) and unknown record types
(`Unknown`) included, so a log passes unharmed through a version that knows less. A record is checked when it is
made, by the same rules as a line that is read, so no writer can put into a log what readers refuse.
Pure: no files here (see `runlog`).
"""

import math
import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import orjson

from gyre_trajtree.arrays import check_spans, logprob_array, packed_form, token_array
from gyre_trajtree.errors import RecordError
from gyre_trajtree.lines import check_writable, parse_object

FORMAT = "gyre-run-log"
FORMAT_VERSION = 1

EXECUTION_STATES = ("opened", "closed")
TERMINATIONS = ("completed", "failed", "timeout", "cancelled")
FINISHES = ("stop", "length", "abort", "error")
ASSESSMENT_STATUSES = ("valid", "unresolved", "placeholder")


@dataclass(slots=True)
class Header:
    """First line of a run log."""

    type: ClassVar[str] = "header"
    created: float | None = None
    """Unix seconds."""
    meta: dict = field(default_factory=dict)
    format: str = FORMAT
    version: int = FORMAT_VERSION
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(slots=True)
class Execution:
    """One run of a harness on one task, opened or closed."""

    type: ClassVar[str] = "execution"
    id: str
    state: str
    """"opened" or "closed"."""
    group: str | None = None
    task: str | None = None
    dispatch_version: int | None = None
    """Published version (training step) when the group was dispatched."""
    harness: str | None = None
    prompt: str | None = None
    """The text that the harness was started with."""
    deadline: float | None = None
    """Unix seconds."""
    time: float | None = None
    """Unix seconds."""
    termination: str | None = None
    """On close: "completed", "failed", "timeout" or "cancelled"."""
    error: str | None = None
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self)
        _named(self, "id")
        _one_of(self, "state", EXECUTION_STATES)
        if self.termination is not None:
            _one_of(self, "termination", TERMINATIONS)


@dataclass(slots=True, eq=False)
class Call:
    """One model call: what the engine was given and what it sampled.

    Token fields accept lists or arrays and are stored as arrays.
    """

    type: ClassVar[str] = "call"
    id: str
    execution: str
    input_ids: np.ndarray
    """int32 [n]: tokens after the parent's path; the whole prompt when `parent` is None. Nothing predicts the first token
    of a path, so a sampled one there never trains.
    """
    output_ids: np.ndarray
    """int32 [m]: tokens sampled by the engine, nothing else."""
    parent: str | None = None
    logprobs: np.ndarray | None = None
    """float32 [m]: behaviour log-probs in nats, NaN where missing (never a target). None means all missing."""
    versions: list = field(default_factory=list)
    """[[version, start, end), ...] over output positions, versions 0..2147483647; gaps are unknown."""
    sampling: dict = field(default_factory=dict)
    finish: str = "stop"
    """"stop", "length", "abort" or "error"."""
    engine: str | None = None
    time: dict = field(default_factory=dict)
    """Unix seconds of "start", "first" token and "end", or None."""
    digest: str | None = None
    hints: dict = field(default_factory=dict)
    evidence: dict = field(default_factory=dict)
    """What role inference needs; the keys are listed in docs/architecture.md."""
    attempt_of: str | None = None
    """Call that this one repeats because the harness retried it."""
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self)
        _named(self, "id")
        _named(self, "execution")
        _one_of(self, "finish", FINISHES)
        self.input_ids = token_array(self.input_ids, "input_ids")
        self.output_ids = token_array(self.output_ids, "output_ids")
        self.logprobs = logprob_array(self.logprobs, len(self.output_ids))
        check_spans(self.versions, len(self.output_ids))
        for moment, seconds in self.time.items():
            if not _is_number(seconds) and seconds is not None:
                raise RecordError(f"call: time {moment!r} must be unix seconds or null, not {seconds!r}")

    def token_versions(self) -> np.ndarray:
        """int32 [m]: the weight version that sampled each output token, -1 where unknown."""
        out = np.full(len(self.output_ids), -1, np.int32)
        for version, start, end in self.versions:
            out[start:end] = version
        return out


@dataclass(slots=True)
class Assessment:
    """One evaluation of an execution's preserved workspace (paper section 5.2)."""

    type: ClassVar[str] = "assessment"
    execution: str
    status: str
    """"valid", "unresolved" (no reward, never zero) or "placeholder" (no assessable work, reward 0)."""
    score: float | None = None
    artifact: str | None = None
    attempt: int = 0
    detail: str | None = None
    designated: bool = True
    """Whether this assessment supplies the execution's one reward."""
    time: float | None = None
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self)
        _named(self, "execution")
        _one_of(self, "status", ASSESSMENT_STATUSES)
        if self.status == "valid" and self.score is None:
            raise RecordError('assessment: status "valid" needs a score; use "unresolved" without one')
        if self.status == "placeholder" and self.score:
            raise RecordError(
                f'assessment: a placeholder\'s score is 0, not {self.score}; use "valid" for a real one'
            )

    def reward(self) -> float | None:
        """The reward it supplies: None when unresolved."""
        if self.status == "unresolved":
            return None
        return float(self.score or 0.0)


@dataclass(slots=True)
class Event:
    """Anything else worth replaying: role changes, reroutes, publications, steps."""

    type: ClassVar[str] = "event"
    name: str
    time: float | None = None
    fields: dict = field(default_factory=dict)
    """Written beside `name` and `time`, at the top level of the line."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.fields, dict):
            raise RecordError("event: needs a text name, and its fields as an object")
        if not _is_number(self.time) and self.time is not None:
            raise RecordError(f"event: time must be unix seconds or null, not {self.time!r}")


@dataclass(slots=True)
class Unknown:
    """A record type of a later minor version, kept as it is."""

    type: str
    fields: dict

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or self.type in KINDS:
            raise RecordError(
                f"an unknown record's type must be text that no record class has, not {self.type!r}"
            )


Record = Header | Execution | Call | Assessment | Event | Unknown


def to_line(record: Record, packed: bool = False) -> bytes:
    """The record as one JSON line that ends with a newline.

    `packed` writes token arrays as base64 little-endian, which is smaller; plain lists are for people.
    Raises RecordError when a value has no JSON form or is nested too deeply.
    """
    raw = _to_dict(record, packed)
    check_writable(raw)
    try:
        return orjson.dumps(raw, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except TypeError as error:
        raise RecordError(f"{record.type}: cannot be written as JSON: {error}") from error


def from_line(line: bytes | str) -> Record:
    """The record of one line. Raises RecordError when the line breaks the format."""
    raw = parse_object(line)
    kind = raw.pop("type", None)
    if not isinstance(kind, str):
        raise RecordError('not an object with a "type"')
    if kind == "event":
        if "name" not in raw:
            raise RecordError("event: field 'name' is missing")
        return Event(raw.pop("name"), raw.pop("time", None), raw)
    cls = _CLASSES.get(kind)
    return Unknown(kind, raw) if cls is None else _build(cls, raw)


def _build(cls: type, raw: dict) -> Record:
    given = {}
    for name, _, required in _SCHEMA[cls]:
        if name in raw:
            given[name] = raw.pop(name)
        elif required:
            raise RecordError(f"{cls.type}: field {name!r} is missing")
    return cls(**given, extra=raw)


def _to_dict(record: Record, packed: bool) -> dict:
    if isinstance(record, Event | Unknown):
        out = {"type": record.type}
        if isinstance(record, Event):
            out |= {"name": record.name, "time": record.time}
        return _joined(out, record.fields)
    out = {"type": record.type}
    for name, _, _ in _SCHEMA[type(record)]:
        value = getattr(record, name)
        out[name] = packed_form(value) if packed and isinstance(value, np.ndarray) else value
    return _joined(out, record.extra)


def _joined(out: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    if clash := out.keys() & more.keys():
        raise RecordError(f"{out['type']}: field names {sorted(clash)} are reserved; rename them")
    return out | more


def _check_fields(record: Record) -> None:
    """Refuse a field whose value is not of its annotated JSON type; numpy scalars become Python's."""
    for name, allowed, _ in _SCHEMA[type(record)]:
        value = getattr(record, name)
        if isinstance(value, np.generic):
            value = value.item()
            setattr(record, name, value)
        if allowed is not None and not _is_of(value, allowed):
            words = " or ".join(_WORDS[kind] for kind in allowed if kind is not int or float not in allowed)
            raise RecordError(f"{record.type}: field {name!r} must be {words}, not {_shown(value)}")


def _is_of(value: Any, allowed: tuple[type, ...]) -> bool:
    """Whether a JSON value is of an allowed type: true is no number, NaN and infinity are none either."""
    if isinstance(value, bool):
        return bool in allowed
    if isinstance(value, float):
        return float in allowed and math.isfinite(value)
    return isinstance(value, allowed)


def _is_number(value: Any) -> bool:
    return _is_of(value, (int, float))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, bool | float | None) else type(value).__name__


def _named(record: Record, name: str) -> None:
    if not getattr(record, name):
        raise RecordError(f"{record.type}: field {name!r} is empty; give it a name that is unique in the log")


def _one_of(record: Record, name: str, values: tuple[str, ...]) -> None:
    if getattr(record, name) not in values:
        raise RecordError(
            f"{record.type}: {name} must be one of {', '.join(values)}, not {getattr(record, name)!r}"
        )


def _allowed(hint: Any) -> tuple[type, ...] | None:
    """Python types of a JSON value for one annotation; None when the class converts the value itself."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if np.ndarray in members:
        return None
    return members + (int,) if float in members else members


_CLASSES: dict[str, type] = {cls.type: cls for cls in (Header, Execution, Call, Assessment)}
KINDS = frozenset(_CLASSES) | {"event"}
_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    types.NoneType: "null",
}
_REQUIRED_IN_LINES = {(Header, "format"), (Header, "version")}
"""Fields with a default for writers that every line must carry: a header that names no format is none."""
_SCHEMA: dict[type, list[tuple[str, tuple[type, ...] | None, bool]]] = {}
for _cls in _CLASSES.values():
    _hints = typing.get_type_hints(_cls)
    _without_default = {
        f.name
        for f in fields(_cls)
        if f.default is f.default_factory  # both are MISSING
    }
    _SCHEMA[_cls] = [
        (f.name, _allowed(_hints[f.name]), f.name in _without_default or (_cls, f.name) in _REQUIRED_IN_LINES)
        for f in fields(_cls)
        if f.name != "extra"
    ]
