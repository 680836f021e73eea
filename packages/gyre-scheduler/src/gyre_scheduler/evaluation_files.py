"""Reads a workspace that an agent left behind, and trusts nothing in it.

Invariant: nothing outside the workspace is ever opened. Every component of a path is opened relative to the folder before
it and never through a symbolic link, so that no link, wherever it points and whenever it is put there, leads out. Only
regular files are read; what is read and listed is bounded.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

DIGEST_FILES = 10_000
DIGEST_BYTES = 64 << 20
"""What of a workspace's contents is read for its digest. Beyond, sizes stand for contents."""
DEPTH = 64
"""Folders within each other that are looked into."""
CHUNK = 1 << 20
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


class Unreadable(Exception):
    """A path that cannot be read; the message says why, in words for whoever asked."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a workspace. `path` is relative to it."""

    path: str
    kind: Literal["folder", "file", "link", "other"]
    size: int
    target: str = ""
    """Where a link points."""
    executable: bool = False


class Files:
    """The files of one workspace: `with Files.of(workspace) as files`. Unreadable if there is no such folder."""

    def __init__(self, root: int):
        self._root = root

    @classmethod
    @contextmanager
    def of(cls, workspace: Path) -> Iterator[Files]:
        try:
            root = os.open(workspace, FOLDER)
        except OSError as error:
            raise Unreadable(f"the workspace cannot be opened: {error.strerror}") from None
        try:
            yield cls(root)
        finally:
            os.close(root)

    def entries(self, folder: str, limit: int) -> tuple[list[Entry], bool]:
        """What is in a folder and below, breadth first and sorted in each folder; whether that is all.

        Of a folder with more than `limit` entries, some `limit` are told.
        """
        found: list[Entry] = []
        whole = True
        waiting = [tuple(_parts(folder))]
        for parts in waiting:  # grows
            if len(found) >= limit or len(parts) > DEPTH:
                return found, False
            try:
                here, ended = self._folder(parts, limit - len(found))
            except Unreadable:
                if parts is waiting[0]:
                    raise
                here, ended = [], False
            whole = whole and ended
            found += here
            waiting += [(*parts, entry.path.rpartition("/")[2]) for entry in here if entry.kind == "folder"]
        return found, whole

    def read(self, path: str, offset: int, limit: int) -> tuple[bytes, int]:
        """At most `limit` bytes of a file from `offset` on, and its size."""
        with self._file(path) as file:
            size = os.fstat(file).st_size
            return (os.pread(file, limit, offset) if offset < size else b""), size

    def digest(self) -> str:
        """One name for the state of the whole workspace: equal states, and only these, have equal names.

        Of paths, contents, links and what is executable; owners and times do not count. "sha256-part:..." where the
        workspace is above the bounds, so that the name does not tell everything apart.
        """
        entries, whole = self.entries("", DIGEST_FILES)
        digest, room = hashlib.sha256(), DIGEST_BYTES
        for entry in sorted(entries, key=lambda entry: entry.path):
            for field in (entry.path, entry.kind, entry.target, str(entry.size), "x" * entry.executable):
                digest.update(_bytes(field) + b"\0")
            if entry.kind == "file":
                room -= entry.size
                whole = whole and room >= 0 and self._add(entry, digest)
        return f"{'sha256' if whole else 'sha256-part'}:{digest.hexdigest()}"

    def _add(self, entry: Entry, digest: hashlib._Hash) -> bool:
        """Add a file's contents, as much as its size says; whether that was possible."""
        try:
            with self._file(entry.path) as file:
                for begin in range(0, entry.size, CHUNK):
                    digest.update(os.pread(file, min(CHUNK, entry.size - begin), begin))
        except (Unreadable, OSError):
            return False
        return True

    def _folder(self, parts: tuple[str, ...], limit: int) -> tuple[list[Entry], bool]:
        with self._opened(parts, FOLDER) as folder, os.scandir(folder) as scan:
            names = [each.name for each in islice(scan, limit + 1)]
            here = [_entry(folder, parts, name) for name in sorted(names[:limit])]
        return here, len(names) <= limit

    @contextmanager
    def _file(self, path: str) -> Iterator[int]:
        with self._opened(tuple(_parts(path)), FILE) as file:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise Unreadable(f"{path!r} is not a regular file")
            yield file

    @contextmanager
    def _opened(self, parts: tuple[str, ...], flags: int) -> Iterator[int]:
        """Descend folder by folder; the last part is opened with `flags`."""
        here = os.open(".", FOLDER, dir_fd=self._root)
        try:
            for number, part in enumerate(parts, 1):
                _no_link(part, parts, here)
                inner = os.open(part, flags if number == len(parts) else FOLDER, dir_fd=here)
                os.close(here)
                here = inner
            yield here
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "no such name"
            raise Unreadable(f"{'/'.join(parts)!r} cannot be read: {reason}") from None
        finally:
            os.close(here)


def digest(workspace: Path) -> str:
    """`Files.digest` of a workspace."""
    with Files.of(workspace) as files:
        return files.digest()


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts:
        raise Unreadable(f"{path!r} is outside; give a path relative to the workspace")
    return parts


def _no_link(part: str, parts: tuple[str, ...], folder: int) -> None:
    """A clear word about links, and no device is opened; what keeps links from being followed are the flags."""
    mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise Unreadable(
            f"{'/'.join(parts)!r} leads through a symbolic link, {part!r}, which is not followed"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise Unreadable(f"{'/'.join(parts)!r} is not a regular file")


def _entry(folder: int, parts: tuple[str, ...], name: str) -> Entry:
    path = "/".join((*parts, name))
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            return Entry(path, "link", 0, os.readlink(name, dir_fd=folder))
    except OSError:  # it vanished meanwhile
        return Entry(path, "other", 0)
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, "folder", 0)
    if stat.S_ISREG(found.st_mode):
        return Entry(path, "file", found.st_size, executable=bool(found.st_mode & stat.S_IXUSR))
    return Entry(path, "other", 0)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
