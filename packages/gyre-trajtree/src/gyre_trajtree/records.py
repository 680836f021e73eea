"""Owns the run log's record types and their one-line JSON form (format version 1).

Invariant: `from_line(to_line(record))` carries the same content, unknown fields (`extra`) and unknown
record types (`Unknown`) included, so a log passes unharmed through a version that knows less.
Pure: no files here (see `runlog`).
"""

import base64
import binascii
import math
import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import orjson

from gyre_trajtree.errors import RecordError

FORMAT = "gyre-run-log"
FORMAT_VERSION = 1

TOKEN_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")

EXECUTION_STATES = ("opened", "closed")
TERMINATIONS = ("completed", "failed", "timeout", "cancelled")
ASSESSMENT_STATUSES = ("valid", "unresolved", "placeholder")


@dataclass(slots=True)
class Header:
    """First line of a run log."""

    type: ClassVar[str] = "header"
    created: float
    """Unix seconds."""
    meta: dict = field(default_factory=dict)
    format: str = FORMAT
    version: int = FORMAT_VERSION
    extra: dict = field(default_factory=dict)


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
    deadline: float | None = None
    """Unix seconds."""
    time: float | None = None
    """Unix seconds."""
    termination: str | None = None
    """On close: "completed", "failed", "timeout" or "cancelled"."""
    error: str | None = None
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
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
    """int32 [n]: tokens after the parent's path; the whole prompt when `parent` is None."""
    output_ids: np.ndarray
    """int32 [m]: tokens sampled by the engine, nothing else."""
    parent: str | None = None
    logprobs: np.ndarray | None = None
    """float32 [m]: behaviour log-probs in nats, NaN where missing. None means all missing."""
    versions: list = field(default_factory=list)
    """[[version, start, end), ...] over output positions; gaps are unknown."""
    sampling: dict = field(default_factory=dict)
    finish: str = "stop"
    """"stop", "length", "abort" or "error"."""
    engine: str | None = None
    time: dict = field(default_factory=dict)
    """Unix seconds of "start", "first" token and "end"."""
    digest: str | None = None
    hints: dict = field(default_factory=dict)
    evidence: dict = field(default_factory=dict)
    """What role inference needs; the keys are listed in docs/architecture.md."""
    attempt_of: str | None = None
    """Call that this one repeats because the harness retried it."""
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.input_ids = _tokens(self.input_ids, "input_ids")
        self.output_ids = _tokens(self.output_ids, "output_ids")
        self.logprobs = _logprobs(self.logprobs, len(self.output_ids))
        _check_spans(self.versions, len(self.output_ids))

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
        _one_of(self, "status", ASSESSMENT_STATUSES)
        if self.score is not None and not math.isfinite(self.score):
            raise RecordError(f"assessment: score must be a finite number or null, not {self.score}")
        if self.status == "valid" and self.score is None:
            raise RecordError('assessment: status "valid" needs a score; use "unresolved" without one')

    def reward(self) -> float | None:
        """The reward it supplies: None when unresolved."""
        if self.status == "unresolved":
            return None
        return 0.0 if self.score is None else float(self.score)


@dataclass(slots=True)
class Event:
    """Anything else worth replaying: role changes, reroutes, publications, steps."""

    type: ClassVar[str] = "event"
    name: str
    time: float | None = None
    fields: dict = field(default_factory=dict)
    """Written beside `name` and `time`, at the top level of the line."""


@dataclass(slots=True)
class Unknown:
    """A record type of a later minor version, kept as it is."""

    type: str
    fields: dict


Record = Header | Execution | Call | Assessment | Event | Unknown


def to_line(record: Record, packed: bool = False) -> bytes:
    """The record as one JSON line that ends with a newline.

    `packed` writes token arrays as base64 little-endian, which is smaller; plain lists are for people.
    Raises RecordError when a value has no JSON form.
    """
    try:
        return orjson.dumps(_to_dict(record, packed), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except TypeError as error:
        raise RecordError(f"{record.type}: cannot be written as JSON: {error}") from error


def from_line(line: bytes | str) -> Record:
    """The record of one line. Raises RecordError when the line breaks the format."""
    try:
        raw = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"not JSON ({error})") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise RecordError('not an object with a "type"')
    kind = raw.pop("type")
    if kind == "event":
        return _event(raw)
    cls = _CLASSES.get(kind)
    return Unknown(kind, raw) if cls is None else _build(cls, raw)


def _event(raw: dict) -> Event:
    name, time = raw.pop("name", None), raw.pop("time", None)
    if not isinstance(name, str) or not isinstance(time, int | float | None):
        raise RecordError("event: needs a text name and a time in seconds")
    return Event(name, time, raw)


def _build(cls: type, raw: dict) -> Record:
    given = {}
    for name, allowed, required in _SCHEMA[cls]:
        if name in raw:
            value = raw.pop(name)
            if allowed is not None and not isinstance(value, allowed):
                raise RecordError(f"{cls.type}: field {name!r} has the wrong type ({type(value).__name__})")
            given[name] = value
        elif required:
            raise RecordError(f"{cls.type}: field {name!r} is missing")
    return cls(**given, extra=raw)


def _to_dict(record: Record, packed: bool) -> dict:
    if isinstance(record, Event | Unknown):
        head = {"type": record.type}
        if isinstance(record, Event):
            head |= {"name": record.name, "time": record.time}
        if clash := head.keys() & record.fields.keys():
            raise RecordError(f"{record.type}: field names {sorted(clash)} are reserved; rename them")
        return head | record.fields
    out: dict[str, Any] = {"type": record.type}
    for name, _, _ in _SCHEMA[type(record)]:
        value = getattr(record, name)
        out[name] = _packed(value) if packed and isinstance(value, np.ndarray) else value
    return out | record.extra if record.extra else out


def _packed(array: np.ndarray) -> dict:
    return {"b64": base64.b64encode(array.tobytes()).decode("ascii"), "dtype": array.dtype.str[1:]}


def _unpacked(value: dict, dtype: np.dtype, name: str) -> np.ndarray:
    if value.get("dtype") != dtype.str[1:]:
        raise RecordError(f"call: field {name!r} must be packed as {dtype.str[1:]!r}")
    try:
        data = base64.b64decode(value["b64"], validate=True)
        return np.frombuffer(data, dtype)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise RecordError(f"call: field {name!r} has no whole base64 array ({error})") from error


def _tokens(value: Any, name: str) -> np.ndarray:
    if isinstance(value, dict):
        array = _unpacked(value, TOKEN_DTYPE, name)
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise RecordError(f"call: field {name!r} must be a flat list of token ids") from error
    if array.size == 0:
        return np.empty(0, TOKEN_DTYPE)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RecordError(f"call: field {name!r} must be a flat list of token ids")
    if array.min() < 0 or array.max() > 0x7FFFFFFF:
        raise RecordError(f"call: field {name!r} holds a token id outside 0..2147483647")
    return np.ascontiguousarray(array, TOKEN_DTYPE)


def _logprobs(value: Any, count: int) -> np.ndarray:
    if value is None:
        return np.full(count, np.nan, LOGPROB_DTYPE)
    if isinstance(value, dict):
        array = _unpacked(value, LOGPROB_DTYPE, "logprobs")
    else:
        try:
            array = np.ascontiguousarray(value, LOGPROB_DTYPE)
        except (TypeError, ValueError) as error:
            raise RecordError("call: field 'logprobs' must be a flat list of numbers and nulls") from error
    if array.shape != (count,):
        raise RecordError(
            f"call: {array.size} logprobs for {count} output_ids; write null where one is missing"
        )
    return array


def _check_spans(spans: list, count: int) -> None:
    position = 0
    for span in spans:
        if (
            not isinstance(span, list | tuple)
            or len(span) != 3
            or not all(type(number) is int for number in span)
        ):
            raise RecordError("call: each entry of 'versions' must be three integers: version, start, end")
        _, start, end = span
        if not position <= start <= end <= count:
            raise RecordError(
                f"call: versions span {list(span)} overlaps another or passes {count} output_ids"
            )
        position = end


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
_SCHEMA: dict[type, list[tuple[str, tuple[type, ...] | None, bool]]] = {}
for _cls in _CLASSES.values():
    _hints = typing.get_type_hints(_cls)
    _without_default = {
        f.name
        for f in fields(_cls)
        if f.default is f.default_factory  # both are MISSING
    }
    _SCHEMA[_cls] = [
        (f.name, _allowed(_hints[f.name]), f.name in _without_default)
        for f in fields(_cls)
        if f.name != "extra"
    ]
