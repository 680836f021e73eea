"""Owns how the bytes of a request become a JSON object. Pure; every failure is a BadRequest.

Of a key that repeats the last one counts, as for every common reader of JSON. How deep a value nests is checked
where the dialects know what it is.
"""

from collections.abc import Mapping

import orjson

from gyre_proxy.dialects.readings import Begin, Body, Readings
from gyre_proxy.errors import BadRequest
from gyre_proxy.nesting import DEPTH


def request_body(
    headers: Mapping[bytes, bytes], body: bytes, readings: Readings | None, begin: Begin
) -> Body:
    """The body of a request as an object, without what is known to the execution's `readings` by readers of `begin`."""
    if readings is not None and headers.get(b"content-encoding", b"identity") == b"identity":
        known = readings.resume(begin, body)
        if known is not None:
            return known
    return Body(json_object(headers, body), body, readings)


def json_object(headers: Mapping[bytes, bytes], body: bytes) -> dict:
    """The body of a request as an object."""
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding != b"identity":
        name = encoding.decode("latin-1")[:60]
        raise BadRequest(f"content-encoding {name!r} is not supported; send plain JSON")
    if not body and b"upgrade" in headers:
        name = headers[b"upgrade"].decode("latin-1")[:60]
        raise BadRequest(f"'Upgrade: {name}' is not served, and cost the body; send plain HTTP/1.1")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "depth" in error.msg:
            raise BadRequest(f"the body nests deeper than {DEPTH} levels; flatten it") from error
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value
