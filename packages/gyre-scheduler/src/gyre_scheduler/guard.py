"""Ends harness process groups when the driver dies without a chance to do it (SIGKILL, out of memory).

A guard is a small child process that reads the groups in use from a pipe. The end of the pipe means that the driver is gone:
the guard then kills every group that was not taken back, and ends. It imports nothing of ours, so it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

END_S = 5.0


class Guard:
    """`with Guard() as guard: with guard.watching(group): ...`. For one thread."""

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def watching(self, group: int) -> Iterator[None]:
        """Kill this process group if the driver dies inside the block."""
        self._say(f"+{group}\n")
        try:
            yield
        finally:
            self._say(f"-{group}\n")

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # a guard that was killed protects no more; the run goes on
            os.write(self._process.stdin.fileno(), line.encode())


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
