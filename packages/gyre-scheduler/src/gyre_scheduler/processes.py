"""One child process from start to end: own session, bounded output files, a time limit, no leftovers.

Invariant: when `run_process` returns or raises, no process of the child's group is alive. A descendant that
made a session of its own is outside the group and not followed.

The child's output goes through pipes of our own rather than asyncio's, so that a background process that
keeps them open cannot hide the child's end. Its input is a file rather than a pipe, so that a child that does
not read it cannot hold anything up.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import CommandNotFound
from .guard import Guard

NOT_EXECUTABLE = {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR}
DRAIN_S = 1.0
"""How long output may still arrive after the group is gone."""
GONE_S = 0.5
GONE_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """`code` is the exit status, or minus the signal that ended the child. `seconds` is wall-clock time."""

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
) -> ProcessEnd:
    """Run a command to its end or to its time limit, then end its whole group.

    Past `timeout_s` the group gets SIGTERM, after `grace_s` more SIGKILL. Each output gets the first
    `output_limit` bytes and a closing note if there were more. With a `guard` the group also ends when this process is
    killed. `stdin`: a file with a descriptor, read from its position; None for no input. CommandNotFound if the command
    cannot be executed.
    """
    begin = time.monotonic()
    async with _Output(stdout, output_limit) as out, _Output(stderr, output_limit) as err:
        child = await _start(command, cwd, env, stdin, out.write_end, err.write_end)
        out.child_started()
        err.child_started()
        with guard.watching(child.pid) if guard else nullcontext():
            try:
                timed_out = await _wait(child, timeout_s, grace_s)
            finally:
                await _kill_group(child)
        await asyncio.wait([out.ended, err.ended], timeout=DRAIN_S)
    return ProcessEnd(child.returncode or 0, timed_out, time.monotonic() - begin)


async def _start(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    stdin: BinaryIO | None,
    stdout: int,
    stderr: int,
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    except OSError as error:
        if error.errno not in NOT_EXECUTABLE:
            raise
        raise CommandNotFound(f"{command[0]!r} cannot be executed: {error.strerror}") from None


async def _wait(child: asyncio.subprocess.Process, timeout_s: float, grace_s: float) -> bool:
    """Wait for the child, within limits; whether the time limit ended it. The caller kills what is left."""
    try:
        async with asyncio.timeout(max(timeout_s, 0.0)):
            await child.wait()
        return False
    except TimeoutError:
        _signal_group(child.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await child.wait()
    return True


async def _kill_group(child: asyncio.subprocess.Process) -> None:
    """SIGKILL to every member, then wait until the child, and for GONE_S the rest, is gone.

    Members that nobody reaps remain as zombies; they hold nothing.
    """
    left = _signal_group(child.pid, signal.SIGKILL)
    await child.wait()
    deadline = time.monotonic() + GONE_S
    while left and time.monotonic() < deadline:
        left = _signal_group(child.pid, 0)
        await asyncio.sleep(GONE_POLL_S if left else 0)


def _signal_group(group: int, number: int) -> bool:
    """Whether the group had a member to signal."""
    try:
        os.killpg(group, number)
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
