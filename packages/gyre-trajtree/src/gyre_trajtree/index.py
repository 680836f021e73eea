"""Owns random access to a run log: one pass notes where each execution's lines are, then executions are read singly.

Invariant: memory holds 17 bytes for each line, and the records of the executions that the caller keeps. The pass
reads a line's type and execution from its head and leaves its tokens undecoded when the line begins as `to_line` writes it;
any other line is parsed whole. The index covers what the log held when it was made; a log that grows does not disturb it.
"""

import os
import re
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from gyre_trajtree.errors import RunLogCorrupt, RunLogError
from gyre_trajtree.executions import RecordedExecution, execution_of
from gyre_trajtree.records import Call, Header
from gyre_trajtree.runlog import numbered_lines, open_log, parse, reporter

_TEXT = rb'"((?:[^"\\]|\\.)*)"'
_HEAD = re.compile(
    rb'\{"type":(?:"call","id":'
    + _TEXT
    + rb',"execution":|"execution","id":|"assessment","execution":)'
    + _TEXT
    + rb"[,}]"
)


class RunLogIndex:
    """The executions of one run log, loaded one at a time. Close it, or use it as a context manager.

    A compressed log has no random access, nor has a pipe: it is copied once into a nameless temporary file (in TMPDIR, as
    large as the plain log), which closing frees. Raises RunLogError without a run log. An unreadable line raises
    RunLogCorrupt with its number when it is met, in the pass or in `load`, or is put into `corrupt`, once, when that list is
    given; an execution all of whose lines are unreadable is then listed, and empty. A torn last line is dropped.
    """

    def __init__(self, path: str | os.PathLike, corrupt: list[RunLogCorrupt] | None = None) -> None:
        self.path = Path(path)
        self.header: Header | None = None
        """None for a log whose writer died before its first line was whole."""
        self._report_new = reporter(corrupt)
        self._reported: set[int] = set()
        self._lines: dict[str, tuple[array, array, array]] = {}
        """Of each execution: offsets, numbers, and whether a line is a call."""
        source = open_log(path)
        self._file = source if source.seekable() else _scratch_file()
        try:
            self._scan(source)
        except BaseException:
            self.close()
            raise
        finally:
            if source is not self._file:
                source.close()

    @property
    def ids(self) -> list[str]:
        """Executions in the order in which they first appear."""
        return list(self._lines)

    def load(self, execution: str) -> RecordedExecution:
        """All records of one execution. Raises RunLogError when the log has none."""
        return self._load(execution, calls=True)

    def outlines(self) -> Iterator[RecordedExecution]:
        """The executions without their calls: states and assessments, read quickly."""
        return (self._load(execution, calls=False) for execution in self._lines)

    def _load(self, execution: str, calls: bool) -> RecordedExecution:
        if execution not in self._lines:
            raise RunLogError(f"{self.path}: holds no execution {execution!r}; `ids` lists those it holds")
        if self._file.closed:
            raise RunLogError(f"{self.path}: the index is closed")
        recorded = RecordedExecution(execution)
        for offset, number, is_call in zip(*self._lines[execution], strict=True):
            if is_call and not calls:
                continue
            self._file.seek(offset)
            try:
                record = parse(self.path, number, self._file.readline())
                if execution_of(record) != execution:
                    raise RunLogError(
                        f"{self.path}: line {number} changed since it was indexed; index it anew"
                    )
                recorded.add(record)
            except RunLogCorrupt as error:
                self._report(error)
        return recorded

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        self._file.close()

    def __iter__(self) -> Iterator[RecordedExecution]:
        return (self.load(execution) for execution in self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, execution: str) -> bool:
        return execution in self._lines

    def __enter__(self) -> "RunLogIndex":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _report(self, error: RunLogCorrupt) -> None:
        if error.line not in self._reported:
            self._report_new(error)
            self._reported.add(error.line)

    def _scan(self, source: BinaryIO) -> None:
        """Note the place of every line in the file that `load` reads, which may be a copy of `source`."""
        for offset, number, line in numbered_lines(self.path, source, self._report):
            if source is not self._file:
                offset = self._copied(line)
            try:
                self._note(offset, number, line)
            except RunLogCorrupt as error:
                self._report(error)

    def _copied(self, line: bytes) -> int:
        """Offset of the line in the copy that it is now part of."""
        try:
            offset = self._file.tell()
            self._file.write(line)
            return offset
        except OSError as error:
            raise RunLogError(
                f"{self.path}: no room for a copy of it in {tempfile.gettempdir()} ({error.strerror}); set TMPDIR"
            ) from error

    def _note(self, offset: int, number: int, line: bytes) -> None:
        execution, is_call = (None, False) if number == 1 else _head(line)
        if execution is None:
            record = parse(self.path, number, line)
            if number == 1:
                self.header = record
            execution, is_call = execution_of(record), isinstance(record, Call)
        if execution is not None:
            if execution not in self._lines:
                self._lines[execution] = array("q"), array("q"), array("b")
            for column, value in zip(self._lines[execution], (offset, number, is_call), strict=True):
                column.append(value)


def _scratch_file() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="gyre-trajtree-")


def _head(line: bytes) -> tuple[str | None, bool]:
    """Execution that a line names in its head, and whether it is a call; None when the line has to be parsed."""
    head = _HEAD.match(line)
    if head is None:
        return None, False
    try:
        return orjson.loads(b'"%b"' % head[2]), head[1] is not None
    except orjson.JSONDecodeError:
        return None, False
