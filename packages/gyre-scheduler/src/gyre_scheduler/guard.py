"""Starts commands whose every process ends: with the command, when told, or when the driver dies (SIGKILL, out of memory).

A guard is a small child process of the driver. It forks a keeper for each command (`keeper` says how that finds daemons),
and kills the groups that it was told to watch when the driver is gone.
"""

from __future__ import annotations

import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import keeper

NEEDED = ("LD_LIBRARY_PATH",)
"""What an interpreter may need to start. A harness can read the environment of the keeper above it."""
END_S = 5.0
ANSWER_S = 10.0
"""The guard answers within a millisecond; a silent one was stopped."""


class Guard:
    """`with Guard() as guard: with guard.watching(group): ...`. For one thread.

    A guard's process that was killed is replaced.
    """

    def __enter__(self) -> Guard:
        self._groups: set[int] = set()
        self._begin()
        return self

    def __exit__(self, *raised: object) -> None:
        self._end(at_once=False)

    @contextmanager
    def watching(self, group: int) -> Iterator[None]:
        """Kill this process group if the driver dies inside the block."""
        self._groups.add(group)
        self._ask(keeper.WATCH + b"%d" % group)
        try:
            yield
        finally:
            self._groups.discard(group)
            self._ask(keeper.FORGET + b"%d" % group)

    def start(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        streams: Sequence[int],
        stop: Sequence[str] = (),
    ) -> socket.socket:
        """Have a keeper start a command; the connection to the keeper, which speaks as `keeper` says.

        `streams`: the descriptors of input, output and errors. `stop` runs when no process of the command is left.
        """
        request = marshal.dumps(
            (
                [os.fsencode(part) for part in command],
                [os.fsencode(part) for part in stop],
                os.fsencode(folder),
                {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            )
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.memfd_create("request"), "w+b") as file:
            file.write(request)
            file.seek(0)
            self._ask(keeper.START, (theirs.fileno(), file.fileno(), *streams))
        return ours

    def _ask(self, message: bytes, files: Sequence[int] = ()) -> None:
        """One more attempt where the guard's process turns out to be killed or stopped."""
        for last in (False, True):
            try:
                socket.send_fds(self._socket, [message], files)
                if not files or self._socket.recv(1):
                    return
            except OSError:
                if last:
                    raise
            self._end(at_once=True)
            self._begin()
        raise OSError("the process that starts commands was killed, and its replacement too")

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(number)],
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                env={name: os.environ[name] for name in NEEDED if name in os.environ},
                start_new_session=True,
            )
        for group in self._groups:
            socket.send_fds(self._socket, [keeper.WATCH + b"%d" % group], ())

    def _end(self, at_once: bool) -> None:
        """Let it kill what it watches, and end, unless `at_once`."""
        if at_once:
            self._process.kill()
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
