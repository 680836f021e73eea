"""Owns proxies that are killed: a process that has everything imported forks one for each life.

A start by fork takes a tenth of a start from nothing, so that hundreds of deaths fit into a test. Run as a program it
is that process: for each line of settings it forks a proxy, relays its ready line, and reaps it at the next line. Lives
end with it, and it ends with its standard input.
"""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from gyre_proxy.service import serve
from gyre_proxy.settings import Settings

DEADLINE_S = 30
"""Longest wait for a proxy to start or to be gone."""


class Lives:
    """The forking process, seen from the test. One life at a time."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self.pid: int | None = None
        """Of the proxy that lives."""

    def begin(self, **settings: object) -> None:
        """Fork a proxy; it starts from here on."""
        self._tell(settings)
        self.pid = self._told()["pid"]

    def ready(self) -> str:
        """Wait for the proxy to serve. Its URL."""
        told = self._told()
        assert "url" in told, "the proxy died before it served; standard error says why"
        return told["url"]

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._tell(None)
        while "status" not in (told := self._told()):
            pass  # it became ready, or died of the signal, before anybody asked
        assert os.WTERMSIG(told["status"]) == signal.SIGKILL, f"it ended by itself: {told}"

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _tell(self, value: object) -> None:
        self._process.stdin.write(json.dumps(value, default=str).encode() + b"\n")

    def _told(self) -> dict:
        readable, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if readable else b""
        assert line, f"no word of a proxy within {DEADLINE_S} s"
        return json.loads(line)


def main() -> None:
    lifeline, held = os.pipe()  # `held` is closed by this process's death only, which ends the proxy
    while line := sys.stdin.buffer.readline():
        settings = json.loads(line)
        heard, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(held), os.close(heard)
            os.dup2(lifeline, 0)
            _live(settings, said)
        os.close(said)
        _say({"pid": pid})
        with os.fdopen(heard, "rb") as ready:
            _say(json.loads(ready.readline() or b'{"died": true}'))
        if not sys.stdin.buffer.readline():
            return os.kill(pid, signal.SIGKILL)  # the test is gone
        _say({"status": os.waitpid(pid, 0)[1]})


def _live(settings: dict, said: int) -> None:
    """Be a proxy."""
    try:
        paths = {name: Path(settings[name]) for name in ("tokenizer", "record")}
        given = Settings(**{**settings, **paths, "engines": tuple(settings["engines"])})
        serve(
            given,
            exit_with_parent=True,
            ready=lambda facts: os.write(said, json.dumps(facts).encode() + b"\n"),
        )
    finally:
        os._exit(1)


def _say(value: dict) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
