"""Owns the package's exceptions. Every message is one line that says what is wrong and what to do.

TrajtreeError
  RecordError          a record breaks the run log's format
  RunLogError          a run log cannot be opened or read
    RunLogCorrupt      a line other than the torn last one is unreadable
    RunLogFull         the disk is full; the log was left as it was before the append
  TreeError            calls that do not form a tree
  RewardError          a reward that is no finite number
  ExportError          samples that cannot be exported, or not to that place
  AccountError         sampled tokens differ from trained plus excluded tokens
"""


class TrajtreeError(Exception):
    """Base of every error this package raises on purpose."""


class RecordError(TrajtreeError):
    """A record breaks the run log's format."""


class RunLogError(TrajtreeError):
    """A run log cannot be opened or read."""


class RunLogCorrupt(RunLogError):
    """A whole line of a run log is unreadable. `line` is its number, counted from 1."""

    def __init__(self, path: object, line: int, reason: str) -> None:
        super().__init__(f"{path}: line {line}: {reason}; repair or remove that line")
        self.line = line


class RunLogFull(RunLogError):
    """The disk is full. The log holds exactly what it held before the append."""


class TreeError(TrajtreeError):
    """Calls that do not form one execution's tree."""


class RewardError(TrajtreeError):
    """A reward that is no finite number."""


class ExportError(TrajtreeError):
    """Samples that cannot be exported, or not to that place."""


class AccountError(TrajtreeError):
    """Sampled tokens differ from trained plus excluded tokens, or a token is trained twice."""
