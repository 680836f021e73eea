"""Owns run.jsonl on disk: appending, reading, following.

Invariants: a line is written by one write(2) under flock, so several processes may append to one log; after
any failed append the log holds exactly what it held before; whoever writes next repairs a line that a killed
writer left torn. A line is durable against the death of every process, not against loss of power.
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import orjson

from gyre_trajtree.errors import RecordError, RunLogCorrupt, RunLogError, RunLogFull
from gyre_trajtree.records import FORMAT, FORMAT_VERSION, Header, Record, from_line, to_line

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BLOCK = 1 << 16


class RunLogWriter:
    """Appends records to a run log; creates it with a header when it is empty.

    Safe to use from several threads and processes. `packed` writes token arrays as base64.
    Raises RunLogError when the path cannot be written or holds something else than a run log.
    """

    def __init__(self, path: str | os.PathLike, meta: dict | None = None, packed: bool = False) -> None:
        self.path = Path(path)
        self._packed = packed
        self._thread_lock = threading.Lock()
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunLogError(f"{self.path}: cannot open the run log: {error.strerror}") from error
        try:
            self._start(meta or {})
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Write one record. On return it survives the death of this process.

        Raises RecordError for a record without JSON form, RunLogFull on a full disk.
        """
        line = to_line(record, self._packed)
        with self._locked():
            self._write(line, self._repaired_size())

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "RunLogWriter":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _start(self, meta: dict) -> None:
        with self._locked():
            size = self._repaired_size()
            if size == 0:
                self._write(to_line(Header(created=time.time(), meta=meta)), 0)
            else:
                _check_header(self.path, _first_line(self._fd, size))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            if self._fd < 0:
                raise RunLogError(f"{self.path}: the run log is closed")
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _repaired_size(self) -> int:
        """Size of the log after repairing a torn tail; under the lock nobody is in the middle of a line."""
        size = os.fstat(self._fd).st_size
        if size == 0 or os.pread(self._fd, 1, size - 1) == b"\n":
            return size
        tail = _tail_after_newline(self._fd, size)
        if is_whole(tail):
            self._write(b"\n", size)
            return size + 1
        os.ftruncate(self._fd, size - len(tail))
        return size - len(tail)

    def _write(self, line: bytes, size: int) -> None:
        try:
            written = os.write(self._fd, line)
        except OSError as error:  # nothing was written
            if error.errno in _NO_SPACE:
                raise self._full() from error
            raise RunLogError(f"{self.path}: cannot write the run log: {error.strerror}") from error
        if written != len(line):
            os.ftruncate(self._fd, size)
            raise self._full()

    def _full(self) -> RunLogFull:
        return RunLogFull(f"{self.path}: the disk is full, the record was not written; free space and go on")


def read_run_log(path: str | os.PathLike, corrupt: list[RunLogCorrupt] | None = None) -> Iterator[Record]:
    """Records of a run log in order, the header first; one line in memory at a time.

    A torn last line is dropped. Any other unreadable line raises RunLogCorrupt with its number, or is put
    into `corrupt` when that list is given, so that nothing valid is lost. Raises RunLogError without a file.
    """
    with open_log(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and not is_whole(line):
                return
            try:
                record = parse(path, number, line)
            except RunLogCorrupt as error:
                if corrupt is None:
                    raise
                corrupt.append(error)
                continue
            yield record


class RunLogTail:
    """Follows a run log that others append to. Not safe for use by several threads at once."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._offset = 0
        self._lines = 0

    def poll(self) -> list[Record]:
        """Records whose lines were completed since the last poll; [] when there are none or no file yet.

        A line without its newline stays for a later poll. Raises RunLogCorrupt for an unreadable whole line
        and RunLogError when the log became shorter than what was already read.
        """
        if not self.path.exists():
            return []
        with open_log(self.path) as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                raise RunLogError(f"{self.path}: the run log shrank below what was read; start a new tail")
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        records = [
            parse(self.path, self._lines + i, line) for i, line in enumerate(whole.split(b"\n")[:-1], 1)
        ]
        self._offset += len(whole)
        self._lines += len(records)
        return records


def open_log(path: str | os.PathLike) -> BinaryIO:
    """The log's bytes. Raises RunLogError when it cannot be read."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise RunLogError(f"{path}: cannot read the run log: {error.strerror}") from error


def parse(path: str | os.PathLike, number: int, line: bytes) -> Record:
    """The record of line `number` (from 1), which must be a header when it is the first. Raises RunLogCorrupt."""
    if number == 1:
        _check_header(path, line)
    try:
        return from_line(line)
    except RecordError as error:
        raise RunLogCorrupt(path, number, str(error)) from error


def _check_header(path: str | os.PathLike, line: bytes) -> None:
    try:
        header = from_line(line)
    except RecordError as error:
        raise RunLogCorrupt(path, 1, f"not a run log's header: {error}") from error
    if not isinstance(header, Header) or header.format != FORMAT:
        raise RunLogCorrupt(path, 1, f'not a run log: the first line must be a header of format "{FORMAT}"')
    if header.version != FORMAT_VERSION:
        raise RunLogError(
            f"{path}: run log version {header.version}, this package reads version {FORMAT_VERSION}; "
            "use the gyre-trajtree that wrote it"
        )


def is_whole(line: bytes) -> bool:
    """Whether a line that lacks only its newline holds a whole JSON object."""
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _first_line(fd: int, size: int) -> bytes:
    data, position = b"", 0
    while b"\n" not in data and position < size:
        data += os.pread(fd, _BLOCK, position)
        position = len(data)
    return data.split(b"\n", 1)[0]


def _tail_after_newline(fd: int, size: int) -> bytes:
    tail, position = b"", size
    while position > 0 and b"\n" not in tail:
        start = max(0, position - _BLOCK)
        tail = os.pread(fd, position - start, start) + tail
        position = start
    return tail[tail.rfind(b"\n") + 1 :]
