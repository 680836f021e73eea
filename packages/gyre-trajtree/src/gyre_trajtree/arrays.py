"""Owns the token-aligned values of a call: what they may hold, and their packed form in the run log.

Invariant: every array that leaves this module is one-dimensional, contiguous, of the run log's type, and holds only
values a trainer can use: ids in 0..2147483647, log-probs that are log-probabilities or NaN (missing), ordered spans.
Nothing is rounded, clipped or cast to fit: what breaks these rules raises RecordError.
"""

import base64
import binascii
from typing import Any

import numpy as np

from gyre_trajtree.errors import RecordError

TOKEN_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")

MAX_INT32 = 0x7FFFFFFF
LOGPROB_ROUNDING = 0.01
"""How far above 0 rounding may lift a log-prob (nats). More is a probability, or a sign turned round: a mistake of the
writer that concerns all its tokens, so it is refused at the line where it shows. Left out as missing it would empty the
training set in silence; trained on it would bend every ratio.
"""


def packed_form(array: np.ndarray) -> dict:
    """The array as base64 of its little-endian bytes, with its type."""
    return {"b64": base64.b64encode(array.tobytes()).decode("ascii"), "dtype": array.dtype.str[1:]}


def token_array(value: Any, name: str) -> np.ndarray:
    """int32 [n] from a flat list or array of ids, or from their packed form."""
    array = _unpacked(value, TOKEN_DTYPE, name) if isinstance(value, dict) else _integers(value, name)
    if array.size and (array.min() < 0 or array.max() > MAX_INT32):
        raise RecordError(f"call: field {name!r} holds a token id outside 0..{MAX_INT32}")
    return np.array(array, TOKEN_DTYPE)  # a copy: what was checked must not change with the caller's array


def logprob_array(value: Any, count: int) -> np.ndarray:
    """float32 [count] in nats, NaN where the value is null; None means that all are missing."""
    if value is None:
        return np.full(count, np.nan, LOGPROB_DTYPE)
    if isinstance(value, dict):
        array = _unpacked(value, LOGPROB_DTYPE, "logprobs")
    else:
        array = _reals(value, "logprobs")
    if len(array) != count:
        raise RecordError(
            f"call: {len(array)} logprobs for {count} output_ids; write null where one is missing"
        )
    if np.isinf(array).any() or (array > LOGPROB_ROUNDING).any():
        worst = float(array[np.isinf(array) | (array > LOGPROB_ROUNDING)][0])
        raise RecordError(
            f"call: field 'logprobs' holds {worst:g}, no log-probability; write natural logarithms, null where missing"
        )
    return array


def check_spans(spans: list, count: int) -> None:
    """Refuse `versions` that are not [version, start, end) in order within `count` output positions."""
    position = 0
    for span in spans:
        if not isinstance(span, list | tuple) or [type(number) for number in span] != [int] * 3:
            raise RecordError("call: each entry of 'versions' must be three integers: version, start, end")
        version, start, end = span
        if not 0 <= version <= MAX_INT32:
            raise RecordError(
                f"call: weight version {version} is outside 0..{MAX_INT32}; leave a gap where unknown"
            )
        if not position <= start <= end <= count:
            raise RecordError(
                f"call: versions span {list(span)} overlaps another or passes {count} output_ids"
            )
        position = end


def _integers(value: Any, name: str) -> np.ndarray:
    refused = RecordError(f"call: field {name!r} must be a flat list of token ids, all of them integers")
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or (value.dtype.kind not in "iu" and value.size):
            raise refused
        return value
    if not isinstance(value, list | tuple) or not _all_of(value, int, np.integer):
        raise refused
    try:
        return np.array(value, np.int64)
    except OverflowError as error:
        raise RecordError(f"call: field {name!r} holds a token id outside 0..{MAX_INT32}") from error


def _reals(value: Any, name: str) -> np.ndarray:
    """float32 [n] from a flat list or array of numbers and nulls."""
    refused = RecordError(f"call: field {name!r} must be a flat list of numbers and nulls")
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or (value.dtype.kind not in "iuf" and value.size):
            raise refused
    elif not isinstance(value, list | tuple) or not _all_of(value, float, int, type(None), np.floating):
        raise refused
    try:
        with np.errstate(over="ignore"):  # the caller refuses infinities
            return np.array(value, LOGPROB_DTYPE)
    except OverflowError as error:
        raise refused from error


def _all_of(values: list | tuple, *allowed: type) -> bool:
    """Whether each value is of an allowed type; bool is a kind of int to Python and to numpy, not here."""
    return all(kind is not bool and issubclass(kind, allowed) for kind in set(map(type, values)))


def _unpacked(value: dict, dtype: np.dtype, name: str) -> np.ndarray:
    if value.keys() != {"b64", "dtype"} or value["dtype"] != dtype.str[1:]:
        raise RecordError(
            f'call: field {name!r} must be packed as {{"b64": ..., "dtype": "{dtype.str[1:]}"}}'
        )
    try:
        return np.frombuffer(base64.b64decode(value["b64"], validate=True), dtype)
    except (TypeError, ValueError, binascii.Error) as error:
        raise RecordError(f"call: field {name!r} has no whole base64 array ({error})") from error
