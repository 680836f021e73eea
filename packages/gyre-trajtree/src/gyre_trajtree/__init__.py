"""Recorded model calls to trajectory trees, roles and bounded, masked training trajectories"""

from gyre_trajtree.advantages import group_advantages
from gyre_trajtree.conservation import REASONS, Ledger, account
from gyre_trajtree.contexts import Context, contexts_of
from gyre_trajtree.errors import (
    AccountError,
    RecordError,
    RewardError,
    RunLogCorrupt,
    RunLogError,
    RunLogFull,
    TrajtreeError,
    TreeError,
)
from gyre_trajtree.executions import RecordedExecution, executions
from gyre_trajtree.exports import ExportError, export
from gyre_trajtree.index import RunLogIndex
from gyre_trajtree.inspection import Inspection, inspect, summarise, tree_digest
from gyre_trajtree.packing import pack
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
from gyre_trajtree.roles import ROLES, RoleDecision, infer_roles
from gyre_trajtree.rows import RowPath, SharedRow, Trajectory, flat_row, sample_trajectories, shared_rows
from gyre_trajtree.runlog import RunLogTail, RunLogWriter, archive, read_run_log
from gyre_trajtree.samples import Sample, sample_run
from gyre_trajtree.sampling import Draw, draw, execution_rng
from gyre_trajtree.tree import Node, RejectedCall, Tree, dead_tips

__all__ = [
    "REASONS",
    "ROLES",
    "AccountError",
    "Assessment",
    "Call",
    "Context",
    "Draw",
    "Event",
    "Execution",
    "ExportError",
    "Header",
    "Inspection",
    "Ledger",
    "Node",
    "Record",
    "RecordError",
    "RecordedExecution",
    "RejectedCall",
    "RewardError",
    "RoleDecision",
    "RowPath",
    "RunLogCorrupt",
    "RunLogError",
    "RunLogFull",
    "RunLogIndex",
    "RunLogTail",
    "RunLogWriter",
    "Sample",
    "SharedRow",
    "Trajectory",
    "TrajtreeError",
    "Tree",
    "TreeError",
    "Unknown",
    "account",
    "archive",
    "contexts_of",
    "dead_tips",
    "draw",
    "execution_rng",
    "executions",
    "export",
    "flat_row",
    "from_line",
    "group_advantages",
    "infer_roles",
    "inspect",
    "pack",
    "read_run_log",
    "sample_run",
    "sample_trajectories",
    "shared_rows",
    "summarise",
    "to_line",
    "tree_digest",
]
