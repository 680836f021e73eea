"""One command from start to end: own session, bounded output files, a time limit, no leftovers.

Invariant: when `run_process` returns or raises, no process that the command started is alive, whatever session, group or
environment it made for itself. Those that the kernel does not let go of (an uninterruptible wait) are named in the log.

The command's output goes through pipes of our own, so that a background process that keeps them open cannot hide its end.
Its input is a file rather than a pipe, so that a command that does not read it cannot hold anything up.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import marshal
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from . import keeper
from .errors import CommandNotFound
from .guard import Guard

NOT_EXECUTABLE = {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR}
DRAIN_S = 1.0
"""How long output may still arrive after everything is gone."""
GONE_S = 0.5
GONE_POLL_S = 0.005
START_S = 30.0
"""A keeper has started its command, or failed to, by then."""
ENDED_S = 2 * keeper.END_S + keeper.STOP_S + 5.0
"""A keeper has ended by then."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """`code` is the exit status, or minus the signal that ended the command. `seconds` is wall-clock time."""

    code: int
    timed_out: bool
    seconds: float


async def run_process(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdout: BinaryIO,
    stderr: BinaryIO,
    output_limit: int,
    timeout_s: float,
    grace_s: float,
    guard: Guard | None = None,
    stdin: BinaryIO | None = None,
    stop: Sequence[str] = (),
) -> ProcessEnd:
    """Run a command to its end or to its time limit, then end everything that it started.

    Past `timeout_s` its group gets SIGTERM, after `grace_s` more everything SIGKILL. Each output gets the first
    `output_limit` bytes and a closing note if there were more. All of that also happens when this process is killed.
    `guard` starts it; without one, a guard of its own does (15 ms). `stdin`: a file with a descriptor, read from its
    position; None for no input. `stop`: a command that runs last, for at most `keeper.STOP_S` seconds, also when this
    process is killed; it ends what is no child of the command, a container for example. CommandNotFound if the command
    cannot be executed, OSError where the kernel refuses to start it.
    """
    begin = time.monotonic()
    async with _Output(stdout, output_limit) as out, _Output(stderr, output_limit) as err:
        with ExitStack() as stack:
            guard = guard or stack.enter_context(Guard())
            nothing = None if stdin else stack.enter_context(open(os.devnull, "rb"))
            streams = ((stdin or nothing).fileno(), out.write_end, err.write_end)
            child = _Kept(guard.start(command, cwd, env, streams, stop))
            out.child_started()
            err.child_started()
            try:
                await _start(child, command[0])
                timed_out = await _wait(child, timeout_s, grace_s)
            finally:
                code = await child.end()
        await asyncio.wait([out.ended, err.ended], timeout=DRAIN_S)
    return ProcessEnd(code, timed_out, time.monotonic() - begin)


async def _start(child: _Kept, program: str) -> None:
    """Return when it runs."""
    await asyncio.wait([child.started], timeout=START_S)
    kind, number = child.start or (keeper.REFUSED, errno.ETIMEDOUT)
    if kind == keeper.STARTED:
        return
    if number in NOT_EXECUTABLE:
        raise CommandNotFound(f"{program!r} cannot be executed: {os.strerror(number)}")
    raise OSError(number, os.strerror(number), program)


async def _wait(child: _Kept, timeout_s: float, grace_s: float) -> bool:
    """Wait for the command, within limits; whether the time limit ended it. The caller ends what is left."""
    _, pending = await asyncio.wait([child.exited], timeout=max(timeout_s, 0.0))
    if pending:
        child.terminate()
        await asyncio.wait([child.exited], timeout=grace_s)
    return bool(pending)


class _Kept:
    """A command in the hands of its keeper. Its futures are done when the keeper said so, or was killed.

    They are waited for by `asyncio.wait`, which does not cancel them with the one who waits.
    """

    def __init__(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        self._connection = connection
        self.start: tuple[str, int] | None = None
        self.started: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[tuple[int | None, list[int], str | None] | None] = loop.create_future()
        self._reading = loop.create_task(self._read())

    async def _read(self) -> None:
        with suppress(ConnectionResetError):
            while said := await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16):
                kind, *rest = marshal.loads(said)
                if kind in (keeper.STARTED, keeper.REFUSED):
                    self.start = (kind, rest[0])
                    self.started.set_result(None)
                elif kind == keeper.EXITED:
                    self.exited.set_result(None)
                else:
                    self._ended.set_result(tuple(rest))
                    break
        for future in (self.started, self.exited, self._ended):
            if not future.done():
                future.set_result(None)

    def terminate(self) -> None:
        with suppress(OSError):
            self._connection.send(keeper.TERMINATE)

    async def end(self) -> int:
        """End the command and all it started, if they run; the command's exit code."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            await asyncio.wait([self._ended], timeout=ENDED_S)
        finally:
            self._reading.cancel()
            self._connection.close()
        if not self._ended.done() or (told := self._ended.result()) is None:
            return await self._end_without_keeper()
        code, left, failed = told
        if left:
            _log.warning("processes %s were killed and are not gone", left)
        if failed:
            _log.warning("the command that runs after a harness failed: %s", failed)
        return -signal.SIGKILL if code is None else code

    async def _end_without_keeper(self) -> int:
        """The keeper was killed. Its guard ends the command and what it started; the group ends here in any case."""
        kind, number = self.start or (keeper.REFUSED, 0)
        deadline = time.monotonic() + GONE_S
        while kind == keeper.STARTED and _kill_group(number) and time.monotonic() < deadline:
            await asyncio.sleep(GONE_POLL_S)
        return -signal.SIGKILL


def _kill_group(group: int) -> bool:
    """Whether the group had a member to signal."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class _Output(asyncio.Protocol):
    """One pipe from the child into a file, up to a limit. `ended` is done at end-of-file."""

    def __init__(self, file: BinaryIO, limit: int):
        self._file, self._room = file, limit
        self._truncated = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> _Output:
        read_end, self.write_end = os.pipe()
        pipe = os.fdopen(read_end, "rb", buffering=0)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        self._holds_write_end = True
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.child_started()
        self._transport.close()
        if self._truncated:
            self._file.write(b"\n[output above the limit is not kept]\n")

    def child_started(self) -> None:
        """The child holds the write end now; ours would keep the pipe open."""
        if self._holds_write_end:
            os.close(self.write_end)
            self._holds_write_end = False

    def data_received(self, data: bytes) -> None:
        kept = data[: self._room]
        self._room -= len(kept)
        self._truncated = self._truncated or len(kept) < len(data)
        if not self._file.closed:
            self._file.write(kept)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
