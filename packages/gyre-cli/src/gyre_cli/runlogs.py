"""Run logs as commands see them: opening, choosing an execution, progress, targets that are not overwritten.

A log is read one execution at a time. Everything a person should know beside the result goes to standard error.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from gyre_trajtree import AccountError, RecordedExecution, RunLogIndex, TrajtreeError
from gyre_trajtree.errors import RunLogCorrupt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gyre_cli.errors import CommandError, MisuseError
from gyre_cli.treeview import visible

QUIET_S = 2.0
"""Work shorter than this shows no progress."""
LINE_EVERY_S = 10.0
"""Pause between lines of progress where standard error is no terminal."""
SAID = 3
"""Unreadable lines that are named singly."""
_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def opened(log: Path, corrupt: list[RunLogCorrupt] | None = None) -> Iterator[RunLogIndex]:
    """The executions of a run log. An error of the log, or of what the block does with it, is a CommandError.

    With a list given, unreadable lines are put into it and the rest is read.
    """
    if log.exists() and not log.is_file():
        raise MisuseError(f"{log} is not a file")
    console = Console(stderr=True)
    try:
        with console.status(f"reading {log.name}") if console.is_terminal else nullcontext():
            index = RunLogIndex(log, corrupt)
        with index:
            if corrupt and index.header is None:
                raise MisuseError(visible(str(corrupt[0])))
            yield index
    except TrajtreeError as error:
        raise _command_error(error) from None


def warn_of(corrupt: list[RunLogCorrupt]) -> list[int]:
    """Name unreadable lines on standard error; returns their numbers. A line that was met twice counts once."""
    by_line = {error.line: error for error in corrupt}
    lines = sorted(by_line)
    for line in lines[:SAID]:
        print(f"gyre: warning: {visible(str(by_line[line]))}", file=sys.stderr)
    if len(lines) > SAID:
        print(f"gyre: warning: … {len(lines) - SAID:,} more unreadable lines", file=sys.stderr)
    return lines


def chosen(index: RunLogIndex, wanted: str) -> str:
    """The execution of that id, or the only one whose id begins so."""
    ids = index.ids
    if wanted in ids:
        return wanted
    found = [identity for identity in ids if identity.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(map(visible, found[:4])) + (", …" if len(found) > 4 else "")
        raise MisuseError(f"{len(found):,} executions begin with {wanted!r}: {shown}; give more of the id")
    first = f"; the first is {ids[0]!r}" if ids else ""
    raise MisuseError(f"{index.path} holds no execution {wanted!r}: it holds {len(ids):,}{first}")


class Watched:
    """Executions loaded one at a time, each time that it is iterated; slow work shows its progress."""

    def __init__(self, index: RunLogIndex, ids: list[str], doing: str) -> None:
        """`doing` says on standard error what is done with them."""
        self._index, self._ids, self._doing = index, ids, doing

    def outlines(self) -> Iterator[RecordedExecution]:
        """All executions of the log without their calls."""
        return self._index.outlines()

    def __iter__(self) -> Iterator[RecordedExecution]:
        console = Console(stderr=True)
        started = last = time.monotonic()
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True,
        )  # fmt: skip
        task = bar.add_task(self._doing, total=len(self._ids))
        try:
            for done, identity in enumerate(self._ids):
                now = time.monotonic()
                if console.is_terminal:
                    if now - started > QUIET_S:
                        bar.start()
                    bar.update(task, completed=done)
                elif now - last > LINE_EVERY_S:
                    last = now
                    print(f"{self._doing}: {done:,} of {len(self._ids):,} executions", file=sys.stderr)
                yield self._index.load(identity)
        finally:
            if bar.live.is_started:
                bar.stop()


def refuse_existing(target: Path, force: bool, log: Path | None = None) -> None:
    """Raise MisuseError before any work for a target that would be lost, that cannot be a file, or that is the log."""
    if log and target.exists() and log.exists() and target.samefile(log):
        raise MisuseError(f"{target} is the run log itself, which is never written over; name another file")
    if target.is_dir():
        raise MisuseError(f"{target} is a folder; name a file")
    if target.exists() and not force:
        raise MisuseError(f"{target} exists; name another file or add --force")
    if not target.parent.is_dir():
        raise MisuseError(f"{target.parent} is no folder; make it first")


def _command_error(error: TrajtreeError) -> CommandError:
    """A full disk or a broken account is a failure, anything else a mistake in what was asked for."""
    full = isinstance(error.__cause__, OSError) and error.__cause__.errno in _FAILURES
    return (CommandError if full or isinstance(error, AccountError) else MisuseError)(visible(str(error)))
