"""Owns the proxy's own log: one JSON object a line on standard error, with execution and call ids as fields.

A record's `extra={"fields": {...}}` is written beside `time` (unix seconds), `level` and `event`.
"""

import logging
import sys

import orjson

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
    logger = logging.getLogger("gyre_proxy")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
