"""Owns the bytes of server-sent events. Pure."""

import orjson


def sse(event: str | None, data: object) -> bytes:
    """One event; without a name when `event` is None. JSON has no line breaks, so its text stays on one line."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
