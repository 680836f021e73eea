"""Owns run.jsonl on disk: appending, reading, following, archiving; plain, or compressed when its name says so.

Invariants: a line (in a compressed log, its frame) is written by one write(2) under flock, so several processes may append
to one log; after any failed append the log holds exactly what it held before; whoever writes next repairs what a killed
writer left torn; a file that is no run log is left as it is. No line is longer than MAX_LINE.
"""

import errno
import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import orjson

from gyre_trajtree.compression import BrokenFrames, codec_of, decompressed, frames_end, whole_frames
from gyre_trajtree.errors import RecordError, RunLogCorrupt, RunLogError, RunLogFull
from gyre_trajtree.records import FORMAT, FORMAT_VERSION, Header, Record, from_line, to_line

MAX_LINE = 1 << 28
"""Bytes of the longest line: 8 M plain tokens with log-probs. What is longer is no record, and is never held in memory."""
FLUSHES = ("process", "disk")
LOCK_S = 20.0
"""Longest wait for another process to finish its line: it needs microseconds, but it may have been stopped amid them."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BLOCK = 1 << 16
_HEADER_START = b'{"type":"header"'
_NO_LOG = f'not a run log: the first line must be a header of format "{FORMAT}"'


class RunLogWriter:
    """Appends records to a run log; creates it with a header when it is empty.

    Safe to use from several threads and processes. `packed` writes token arrays as base64. An appended record survives
    the death of every process (`flush` "process"), or the loss of power as well ("disk": one fdatasync for each record,
    0.3 ms more on a local disk). Opening a compressed log reads it through once, to find where its whole
    frames end. Raises RunLogError when the path cannot be written or holds something else than a run log.
    """

    def __init__(
        self, path: str | os.PathLike, meta: dict | None = None, packed: bool = False, flush: str = "process"
    ) -> None:
        if flush not in FLUSHES:
            raise RunLogError(f"flush must be one of {', '.join(FLUSHES)}, not {flush!r}")
        self.path = Path(path)
        self._packed = packed
        self._to_disk = flush == "disk"
        self._codec = codec_of(path)
        self._whole = 0
        """Size up to which the log is known to hold whole lines, or frames; no writer makes it shorter."""
        self._folder_synced = False
        self._thread_lock = threading.Lock()
        self._patience_s = LOCK_S
        """For whoever holds the lock; next to none once it ran out, so that nobody waits again and again."""
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

        Raises RecordError for a record without JSON form, RunLogFull on a full disk, RunLogError when the disk refuses or
        another process holds the log for LOCK_S.
        """
        line = to_line(record, self._packed)
        if len(line) > MAX_LINE:
            raise RecordError(f"{record.type}: {len(line)} bytes in one line, more than {MAX_LINE}; split it")
        with self._locked():
            self._write(line, self._repaired_size())

    def sync(self) -> None:
        """Make everything appended so far survive loss of power, where `flush` "process" left that to the system.

        Many records can share one call, from any thread. Raises RunLogError when the disk refuses.
        """
        try:
            os.fdatasync(self._fd)
            if not self._folder_synced:
                self._sync_folder()
        except OSError as error:
            raise RunLogError(f"{self.path}: records did not reach the disk: {error.strerror}") from error

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
            if os.fstat(self._fd).st_size > 0:
                self._check_start()
            size = self._repaired_size()
            if size == 0:
                self._write(to_line(Header(created=time.time(), meta=meta)), 0)
        if self._to_disk:
            self._sync_folder()

    def _check_start(self) -> None:
        """Refuse what does not begin as a run log, before anything is repaired."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            stream = decompressed(file, self._codec) if self._codec else file
            try:
                first = stream.readline(MAX_LINE)
            except BrokenFrames as error:
                raise RunLogCorrupt(self.path, 1, str(error)) from error
        if not _is_torn_header(first):
            _check_header(self.path, first)

    def _sync_folder(self) -> None:
        folder = os.open(self.path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the name of a new file durable
        finally:
            os.close(folder)
        self._folder_synced = True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            if self._fd < 0:
                raise RunLogError(f"{self.path}: the run log is closed")
            self._lock()
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> None:
        deadline, pause = time.monotonic() + self._patience_s, 0.0001
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._patience_s = LOCK_S / 200
                    raise RunLogError(
                        f"{self.path}: another process held the run log for {LOCK_S:g} s, and nothing can be recorded; "
                        "is one that writes to it stopped?"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
            else:
                self._patience_s = LOCK_S
                return

    def _repaired_size(self) -> int:
        """Size of the log after repairing a torn tail; under the lock nobody is in the middle of a line."""
        state = os.fstat(self._fd)
        size = state.st_size
        if not state.st_nlink:
            raise RunLogError(f"{self.path}: the run log was removed; what is written now would be lost")
        if size < self._whole:
            raise RunLogError(f"{self.path}: the run log shrank below what was written; open it anew")
        if self._codec:
            return size if size == self._whole else self._repair_frames()
        if size == 0 or os.pread(self._fd, 1, size - 1) == b"\n":
            return size
        tail = _tail_after_newline(self._fd, size)
        if is_whole(tail):
            return self._write(b"\n", size)
        os.ftruncate(self._fd, size - len(tail))
        return size - len(tail)

    def _repair_frames(self) -> int:
        """Cut a torn last frame; a line that it holds whole goes into a new frame, since readers have seen it."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(self._whole)
            try:
                end = frames_end(file, self._codec, MAX_LINE)
            except BrokenFrames as error:
                raise RunLogError(f"{self.path}: cannot be continued: {error}") from error
        torn = end.torn or b""
        if end.open_line or len(torn) > MAX_LINE or b"\n" in torn[:-1]:
            raise RunLogError(
                f"{self.path}: cannot be continued, no writer of run logs left it so; archive it anew"
            )
        self._whole += end.size
        if end.torn is not None:
            os.ftruncate(self._fd, self._whole)
            if is_whole(torn):
                self._write(torn.rstrip(b"\n") + b"\n", self._whole)
        return self._whole

    def _write(self, line: bytes, size: int) -> int:
        """Append to a log of `size` bytes; returns its new size."""
        data = self._codec.frame(line) if self._codec else line
        try:
            written = os.write(self._fd, data)
        except OSError as error:  # nothing was written
            if error.errno in _NO_SPACE:
                raise self._full() from error
            raise RunLogError(f"{self.path}: cannot write the run log: {error.strerror}") from error
        if written != len(data):
            os.ftruncate(self._fd, size)
            raise self._full()
        if self._to_disk:
            self._sync(size)
        self._whole = size + len(data)
        return self._whole

    def _sync(self, size: int) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise RunLogError(f"{self.path}: the record did not reach the disk: {error.strerror}") from error

    def _full(self) -> RunLogFull:
        return RunLogFull(f"{self.path}: the disk is full, the record was not written; free space and go on")


def read_run_log(path: str | os.PathLike, corrupt: list[RunLogCorrupt] | None = None) -> Iterator[Record]:
    """Records of a run log in order, the header first; one line in memory at a time.

    A torn last line is dropped. Any other unreadable line raises RunLogCorrupt with its number, or is put
    into `corrupt` when that list is given, so that nothing valid is lost. Raises RunLogError without a file.
    """
    report = reporter(corrupt)
    with open_log(path) as file:
        for _, number, line in numbered_lines(path, file, report):
            try:
                record = parse(path, number, line)
            except RunLogCorrupt as error:
                report(error)
                continue
            yield record


class RunLogTail:
    """Follows a run log that others append to. Not safe for use by several threads at once."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._codec = codec_of(path)
        self._offset = 0
        self._open_line = b""
        """What whole frames held after their last newline."""
        self._lines = 0

    def poll(self) -> list[Record]:
        """Records whose lines were completed since the last poll; [] when there are none or no file yet.

        A line without its newline, and a frame that is not whole, stay for a later poll. Raises RunLogCorrupt for an
        unreadable whole line and RunLogError when the log became shorter than what was already read.
        """
        if not self.path.exists():
            return []
        with _opened(self.path) as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                raise RunLogError(f"{self.path}: the run log shrank below what was read; start a new tail")
            file.seek(self._offset)
            text, size = self._fresh(file)
        text = self._open_line + text
        *lines, open_line = text.split(b"\n")
        records = [parse(self.path, self._lines + i, line) for i, line in enumerate(lines, 1)]
        self._offset += size
        self._lines += len(records)
        self._open_line = open_line
        return records

    def _fresh(self, file: BinaryIO) -> tuple[bytes, int]:
        """What was completed from the file's position on, and the bytes that it takes in the file."""
        if self._codec is None:
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            return whole, len(whole)
        try:
            return whole_frames(file, self._codec)
        except BrokenFrames as error:
            raise RunLogCorrupt(self.path, self._lines + 1, str(error)) from error


def archive(
    source: str | os.PathLike, target: str | os.PathLike, corrupt: list[RunLogCorrupt] | None = None
) -> None:
    """Copy the lines of a log into a new one whose name says its form: plain, `.gz` or `.zst` (then one single stream).

    A torn last line stays behind; records are not checked. Data that cannot be decompressed raise RunLogCorrupt, or
    end the copy and go into `corrupt` when that list is given. The target appears whole or not at all.
    Raises RunLogError when it exists already, RunLogFull on a full disk.
    """
    source, target = Path(source), Path(target)
    codec = codec_of(target)
    if target.exists():
        raise RunLogError(f"{target}: exists already; an archive is never written over")
    compressor = codec.compressor(-1) if codec else None
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open_log(source) as file, open(part, "wb") as out:
            for _, _, line in numbered_lines(source, file, reporter(corrupt)):
                line = line.removesuffix(b"\n") + b"\n"
                out.write(compressor.compress(line) if compressor else line)
            if compressor:
                out.write(compressor.flush())
            out.flush()
            os.fsync(out.fileno())
        part.rename(target)
    except OSError as error:
        kind = RunLogFull if error.errno in _NO_SPACE else RunLogError
        raise kind(f"{target}: cannot write the archive: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def open_log(path: str | os.PathLike) -> BinaryIO:
    """The log's lines as a stream, decompressed. Raises RunLogError when it cannot be opened."""
    codec = codec_of(path)
    return decompressed(_opened(path), codec) if codec else _opened(path)


def _opened(path: str | os.PathLike) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise RunLogError(f"{path}: cannot read the run log: {error.strerror}") from error


def reporter(corrupt: list[RunLogCorrupt] | None) -> Callable[[RunLogCorrupt], None]:
    """What becomes of an unreadable line: it is raised, or put into the list when there is one."""

    def report(error: RunLogCorrupt) -> None:
        if corrupt is None:
            raise error
        corrupt.append(error)

    return report


def numbered_lines(
    path: str | os.PathLike, file: BinaryIO, report: Callable[[RunLogCorrupt], None]
) -> Iterator[tuple[int, int, bytes]]:
    """Lines of an open log, each with its offset and its number from 1; a torn last one is left out.

    A line that is too long is reported and passed over; broken compressed data are reported and end the log.
    """
    offset = 0
    for number in itertools.count(1):
        try:
            line = file.readline(MAX_LINE + 1)
            excess, ended = _pass_over(file, line) if len(line) > MAX_LINE else (0, line.endswith(b"\n"))
        except BrokenFrames as error:
            report(RunLogCorrupt(path, number, str(error)))
            return
        if not ended and (excess or not is_whole(line)):
            if number == 1 and not _is_torn_header(line):
                report(RunLogCorrupt(path, 1, _NO_LOG))
            return
        if excess:
            report(RunLogCorrupt(path, number, f"{len(line) + excess} bytes long, more than {MAX_LINE}"))
        else:
            yield offset, number, line
        offset += len(line) + excess


def _pass_over(file: BinaryIO, line: bytes) -> tuple[int, bool]:
    """Read on to the end of a line that begins with `line`: how many bytes more, and whether its newline came."""
    excess = 0
    while line and not line.endswith(b"\n"):
        line = file.readline(_BLOCK)
        excess += len(line)
    return excess, bool(line)


def parse(path: str | os.PathLike, number: int, line: bytes) -> Record:
    """The record of line `number` (from 1), which must be a header when it is the first. Raises RunLogCorrupt."""
    if number == 1:
        _check_header(path, line)
    try:
        record = from_line(line)
    except RecordError as error:
        raise RunLogCorrupt(path, number, str(error)) from error
    if isinstance(record, Header) and (record.format, record.version) != (FORMAT, FORMAT_VERSION):
        raise RunLogCorrupt(path, number, f"a header of {record.format!r}, version {record.version}")
    return record


def _check_header(path: str | os.PathLike, line: bytes) -> None:
    try:
        header = from_line(line)
    except RecordError as error:
        raise RunLogCorrupt(path, 1, f"not a run log's header: {error}") from error
    if not isinstance(header, Header) or header.format != FORMAT:
        raise RunLogCorrupt(path, 1, _NO_LOG)
    if header.version != FORMAT_VERSION:
        raise RunLogError(
            f"{path}: run log version {header.version}, this package reads version {FORMAT_VERSION}; "
            "use the gyre-trajtree that wrote it"
        )


def _is_torn_header(line: bytes) -> bool:
    """Whether a first line may be what a writer that was killed in its first append left."""
    begins = _HEADER_START.startswith(line[: len(_HEADER_START)])
    return begins and not line.endswith(b"\n") and not is_whole(line)


def is_whole(line: bytes) -> bool:
    """Whether a line that lacks only its newline holds a whole JSON object."""
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _tail_after_newline(fd: int, size: int) -> bytes:
    tail, position = b"", size
    while position > 0 and b"\n" not in tail:
        start = max(0, position - _BLOCK)
        tail = os.pread(fd, position - start, start) + tail
        position = start
    return tail[tail.rfind(b"\n") + 1 :]
