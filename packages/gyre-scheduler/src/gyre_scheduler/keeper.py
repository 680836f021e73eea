"""The guard's process (see `guard`): starts commands, and ends all of what each of them started.

    guard                 ends the groups it watches, and orphans of keepers that were killed
    └── keeper            one for each command
        └── the command   a session of its own
            └── whatever it starts

Guard and keepers are subreapers: a process whose parent died becomes a child of the keeper, whatever session, group or
environment it made for itself. So a keeper has ended everything when it has no children left. A keeper begins that when its
command ended, when it is told to, or when the driver is gone; then it runs the command's `stop`, if there is one.

Single-threaded, imports nothing of ours: keepers are forks, which cost about a millisecond each.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

WATCH, FORGET, START = b"+", b"-", b"!"
"""Requests to the guard: a group to watch or to forget, in digits; a command, in a file among the descriptors, answered with
the same word when its keeper exists."""
TERMINATE = b"T"
"""Request to a keeper: SIGTERM to the command's group. The end of the connection means: end all of it."""
STARTED, REFUSED, EXITED, ENDED = "started", "refused", "exited", "ended"
"""What a keeper says: (STARTED, pid) or (REFUSED, errno), (EXITED, code) where the command ended by itself, and at last
(ENDED, code, pids that are left, why `stop` failed)."""

END_S = 5.0
"""How long killed processes may take to be gone; those in an uninterruptible wait may take longer."""
STOP_S = 30.0
SAID_LIMIT = 300
PR_SET_CHILD_SUBREAPER = 36


class _Signals:
    """Ends of children, as something to poll."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait(self, connection: socket.socket | None = None, timeout_s: float | None = None) -> bool:
        """Wait for an end of a child, or for the connection; whether the connection has something to read."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if connection is not None:
            poll.register(connection, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else max(0, timeout_s * 1000))}
        with suppress(BlockingIOError):
            os.read(self._read, 4096)
        return connection is not None and connection.fileno() in ready


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(requests.fileno(), False)
    _adopt_orphans()
    signals = _Signals()
    groups: set[int] = set()
    keepers: set[int] = set()
    while True:
        asked = signals.wait(requests)
        keepers.difference_update(_reaped())
        for orphan in set(_children()) - keepers:
            _kill_group_of(orphan)
        if not asked:
            continue
        message, files, *_ = socket.recv_fds(requests, 64, 5)
        for file in files:
            os.set_inheritable(file, False)
        if message == START:
            keepers.add(_fork_keeper(requests, *files))
            requests.send(START)
        elif message:
            (groups.add if message[:1] == WATCH else groups.discard)(int(message[1:]))
        else:
            break
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _fork_keeper(requests: socket.socket, *files: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            requests.close()
            _keep(*files)
        finally:
            os._exit(0)
    for file in files:
        os.close(file)
    return pid


def _keep(connection_file: int, request_file: int, *streams: int) -> None:
    """Run one command, and end all of it."""
    os.setsid()
    _adopt_orphans()
    connection, signals = socket.socket(fileno=connection_file), _Signals()
    with open(request_file, "rb") as request:
        command, stop, folder, environment = marshal.load(request)
    child, refused = _spawn(command, folder, environment, streams)
    for stream in streams:
        os.close(stream)
    _say(connection, (REFUSED, refused) if refused else (STARTED, child))
    code = None if refused else _attend(signals, connection, child)
    if code is not None:
        _say(connection, (EXITED, code))
    late, left = _end_all(signals, child)
    failed = _stop(signals, stop, folder, environment) if stop and not refused else None
    _say(connection, (ENDED, late if code is None else code, left, failed))


def _attend(
    signals: _Signals, connection: socket.socket | None, child: int, timeout_s: float | None = None
) -> int | None:
    """The exit code of the child; None where it is to be ended."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        codes = _reaped()
        if child in codes:
            return codes[child]
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return None
        if signals.wait(connection, left_s) and connection is not None:
            if connection.recv(1) != TERMINATE:
                return None
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGTERM)


def _end_all(signals: _Signals, child: int) -> tuple[int | None, list[int]]:
    """Kill children, and theirs as they come, until there are none: the child's exit code, and who did not go."""
    deadline, code = time.monotonic() + END_S, None
    while True:
        code = _reaped().get(child, code)
        children = _children()
        if not children or time.monotonic() > deadline:
            return code, children
        for pid in children:
            _kill_group_of(pid)
        signals.wait(timeout_s=0.05)


def _kill_group_of(pid: int) -> None:
    """SIGKILL to a descendant and its group, which holds descendants of ours only: it is of a session below us."""
    with suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(pid)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def _stop(
    signals: _Signals, command: Sequence[bytes], folder: bytes, environment: dict[bytes, bytes]
) -> str | None:
    """Run the command that ends what lives elsewhere; why it failed."""
    nothing, said = os.open(os.devnull, os.O_RDWR), os.memfd_create("said")
    child, refused = _spawn(command, folder, environment, (nothing, said, said))
    if refused:
        return os.strerror(refused)
    code = _attend(signals, None, child, STOP_S)
    _end_all(signals, child)
    if code == 0:
        return None
    how = f"did not end within {STOP_S:g} s" if code is None else f"exit status {code}"
    words = os.pread(said, 1 << 16, 0).decode(errors="replace").split()
    return f"{how}: {' '.join(words)[-SAID_LIMIT:]}" if words else how


def _spawn(
    command: Sequence[bytes], folder: bytes, environment: dict[bytes, bytes], streams: Sequence[int]
) -> tuple[int, int]:
    """Start a command in a session of its own: (pid, 0), or (pid, errno) where that is impossible."""
    fault, told = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        number = errno.EINVAL
        try:
            os.setsid()
            for place, stream in enumerate(streams):
                os.dup2(stream, place)
            signal.set_wakeup_fd(-1)
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)  # Python ignores them, and that would last
            os.chdir(folder)
            os.execvpe(command[0], command, environment)
        except OSError as error:
            number = error.errno or number
        finally:
            os.write(told, b"%d" % number)
            os._exit(127)
    os.close(told)
    with open(fault, "rb") as file:
        refused = file.read()
    return pid, int(refused) if refused else 0


def _reaped() -> dict[int, int]:
    """{pid: exit code} of children that ended since."""
    codes = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _children() -> list[int]:
    """Processes whose parent we are. Those that it misses while others end are found the next time."""
    own = os.getpid()
    try:
        with open(f"/proc/{own}/task/{own}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == own]


def _parent(pid: int) -> int | None:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return None


def _adopt_orphans() -> None:
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this kernel has no subreapers")


def _say(connection: socket.socket, words: tuple) -> None:
    with suppress(OSError):  # the driver is gone
        connection.send(marshal.dumps(words))


if __name__ == "__main__":
    main()
