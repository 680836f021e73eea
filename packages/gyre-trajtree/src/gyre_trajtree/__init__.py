"""Recorded model calls to trajectory trees, roles and bounded, masked training trajectories"""

from gyre_trajtree.errors import RecordError, RunLogCorrupt, RunLogError, RunLogFull, TrajtreeError
from gyre_trajtree.records import (
    Assessment,
    Call,
    Event,
    Execution,
    Header,
    Record,
    Unknown,
    from_line,
    to_line,
)
from gyre_trajtree.runlog import RunLogTail, RunLogWriter, read_run_log

__all__ = [
    "Assessment",
    "Call",
    "Event",
    "Execution",
    "Header",
    "Record",
    "RecordError",
    "RunLogCorrupt",
    "RunLogError",
    "RunLogFull",
    "RunLogTail",
    "RunLogWriter",
    "TrajtreeError",
    "Unknown",
    "from_line",
    "read_run_log",
    "to_line",
]
