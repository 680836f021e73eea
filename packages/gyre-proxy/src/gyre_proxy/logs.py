"""Owns the proxy's own log: one JSON object a line on standard error, with execution and call ids as fields.

A record's `extra={"fields": {...}}` is written beside `time` (unix seconds), `level` and `event`.
"""

import logging
import sys
import time
from typing import TYPE_CHECKING

import orjson

from gyre_proxy.errors import ClientLeft, ExecutionClosed, ProxyError

if TYPE_CHECKING:
    from gyre_proxy.flights import Flight

_LOG = logging.getLogger("gyre_proxy")

LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One line a record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure(level: str) -> None:
    """Send this package's records of `level` and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    _LOG.handlers[:] = [handler]
    _LOG.setLevel(level.upper())
    _LOG.propagate = False


def ids_of(flight: "Flight") -> dict[str, str]:
    """The fields that tell whose call a line is about."""
    return {"execution": flight.session.execution, "call": flight.id}


def report(flight: "Flight", failure: ProxyError | None) -> None:
    """One line of the proxy's log for a call that ended."""
    if not _LOG.isEnabledFor(logging.INFO) and failure is None:
        return
    fields = {
        **ids_of(flight),
        "parent": flight.prompt.parent.id if flight.prompt.parent else None,
        "protocol": flight.protocol,
        "engine": flight.last_engine,
        "engines_used": flight.legs,
        "finish": flight.finish,
        "prompt_tokens": len(flight.prompt),
        "output_tokens": len(flight.ids),
        "seconds": round(time.time() - flight.started, 3),
    }
    if failure is None:
        _LOG.info("call ended", extra={"fields": fields})
    else:
        level = logging.INFO if isinstance(failure, ClientLeft | ExecutionClosed) else logging.WARNING
        _LOG.log(level, "call failed", extra={"fields": {**fields, "why": str(failure)}})
