"""Owns the proxy as a process of its own that a test can kill and start again on the same port and log."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from proxy_stage import ADMIN, DEADLINE_S, Proxy

_TOKEN = ADMIN["authorization"].removeprefix("Bearer ")


class ProxyProcess(Proxy):
    """`python -m gyre_proxy --strict`; `start` it before use, `kill` it at the end."""

    def __init__(self, tokenizer: Path, record: Path) -> None:
        super().__init__("", {}, record)
        self._tokenizer, self._errors = tokenizer, record.with_name("proxy.stderr")
        self._port = 0
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Returns when it serves; its engines are those of the admin API, none at first."""
        command = [
            sys.executable,
            "-m",
            "gyre_proxy",
            "--strict",
            "--admin-token-stdin",
            "--exit-with-parent",
        ]
        command += [
            "--tokenizer",
            str(self._tokenizer),
            "--record",
            str(self.record),
            "--port",
            str(self._port),
        ]
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        self._process.stdin.write(f"{_TOKEN}\n".encode())
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if ready else b""
        assert line, f"no proxy within {DEADLINE_S} s: {self._errors.read_text(errors='replace')[-2000:]}"
        self.facts = json.loads(line)
        self.url = self.facts["url"]
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """End it at once, as the kernel would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate(timeout=DEADLINE_S)
        self._process = None
