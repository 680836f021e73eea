"""The rollout engine of one cell, as a child process that speaks SGLang's HTTP API.

Owns the process: start, readiness, health, restart on the SAME port, weights, end. Invariants:
- the engine runs in its own process group, which is killed whole, and ends by itself when this process dies
  (its standard input reaches end of file);
- after `load`, `resume` or a restart returns, the engine reports exactly the promised weight version;
- while released (the cell trains) a dead engine stays down; `resume` starts it again;
- no model directory is read but the newest one given: older ones may be gone.
No torch here.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gyre_trainer.errors import EngineError
from gyre_trainer.settings import EngineSettings

HOST = "127.0.0.1"
START_ATTEMPTS = 3
RELEASE_WAIT_S = 60.0
"""Longest wait for an engine to become idle. Its calls have been moved away before, so this is generous."""
PING_WAIT_S = 2.0
"""Least time an engine has to answer a health check."""
MISSED_CHECKS = 5
"""Health checks missed in a row until an engine that still runs counts as dead."""
TELL_INTERVAL_S = 0.5
"""Time between two signs of progress while an engine that runs gets ready."""

Notice = Callable[[dict[str, Any]], None]


class EngineProcess:
    """One engine and its supervisor thread. Methods block and may be called from any thread.

    `notice` is called with {"engine": "restarted" | "lost", "url", "version", "reason"}, and `progress` between
    the parts of long operations, each of at most `request_timeout_s`, and again and again while an engine gets
    ready, for at most `start_timeout_s`.
    """

    def __init__(
        self,
        model: Path,
        version: int,
        settings: EngineSettings,
        log: Path,
        notice: Notice,
        progress: Callable[[], None] = lambda: None,
    ):
        self.model, self.version = Path(model), version
        self.url: str | None = None
        self._settings = settings
        self._log = log
        self._notice = notice
        self._progress = progress
        self._process: subprocess.Popen | None = None
        self._lock = threading.RLock()
        self._released = False
        self._closed = threading.Event()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def pid(self) -> int | None:
        """The engine's process, which is also its process group; None while it is down."""
        process = self._process
        return process.pid if process else None

    # -- life
    def start(self) -> None:
        """Start the process without waiting; `wait_ready` follows. Raises EngineError."""
        with self._lock:
            self._spawn()

    def wait_ready(self) -> None:
        """Wait until the engine serves its version, then supervise it. Raises EngineError."""
        with self._lock:
            self._wait_ready()
        threading.Thread(target=self._supervise, name="engine", daemon=True).start()

    def close(self) -> None:
        """End the process group."""
        self._closed.set()
        with self._lock:
            self._end()

    # -- weights and memory
    def load(self, model: Path, version: int) -> bool:
        """Serve `model` as `version`; requests in flight go on under it.

        False when the engine is released: `resume` will bring it to weights. Raises EngineError.
        """
        with self._lock:
            self.model, self.version = Path(model), version
            if not self._released:
                self._serve(occupy=False)
            return not self._released

    def release(self) -> None:
        """Give up the engine's memory; it must be idle, or become so within RELEASE_WAIT_S.

        Raises EngineError when it stays busy. One that does not answer at all is ended: it holds nothing then.
        """
        with self._lock:
            if self._released:
                return
            deadline = time.monotonic() + RELEASE_WAIT_S
            while self._process is not None and self._process.poll() is None:
                try:
                    self._request("POST", "/release_memory_occupation", {})
                    self._released = True
                    return
                except EngineError:
                    if not self._answers():
                        break
                    if time.monotonic() > deadline:
                        raise
                    self._progress()
                    self._closed.wait(0.05)
            self._progress()
            self._end()
            self._released = True

    def resume(self, model: Path, version: int) -> None:
        """Take the memory back and serve `model` as `version`. Raises EngineError."""
        with self._lock:
            self.model, self.version = Path(model), version
            occupy, self._released = self._released and self._process is not None, False
            self._serve(occupy)

    def served_version(self) -> str:
        """The weight version the engine reports."""
        return str(self._request("GET", "/get_model_info").get("weight_version"))

    # -- inside
    def _spawn(self) -> None:
        port = urlsplit(self.url).port if self.url else 0
        settings = self._settings
        command = [
            *(sys.executable, "-m", settings.module, "--model", str(self.model), "--host", HOST),
            *("--port", str(port), "--max-running", str(settings.max_running), "--exit-with-parent"),
            *("--context-length", str(settings.context_length), "--threads", str(settings.threads)),
            *("--weight-version", str(self.version)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}
        self._lines = queue.SimpleQueue()
        try:
            with open(self._log, "ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"the engine could not be started: {error}") from None
        self._process = process
        threading.Thread(target=_read_lines, args=(process, self._lines), daemon=True).start()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._settings.start_timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                line = self._lines.get(timeout=min(max(0.0, left), TELL_INTERVAL_S))
            except queue.Empty:
                if left > 0:
                    self._progress()
                    continue
                self._end()
                wait = self._settings.start_timeout_s
                raise EngineError(f"the engine was not ready within {wait:g} s; see {self._log}") from None
            if not line:
                code = self._process.wait()
                raise EngineError(f"the engine ended with code {code} before it was ready; see {self._log}")
            if "url" in (ready := _json_object(line)):
                self.url = ready["url"]
                break
        self._verify()

    def _serve(self, occupy: bool) -> None:
        """Update the engine to the current model, or else restart it. Raises EngineError."""
        try:
            self._update(occupy)
        except EngineError as error:
            if self._closed.is_set():
                raise
            self._restart(str(error))

    def _update(self, occupy: bool) -> None:
        """Paused by retraction: the recipe under which SGLang too changes weights without losing requests.

        A released engine gets its weights before its memory, so that it does not load its former ones again.
        """
        self._request("POST", "/pause_generation", {"mode": "retract"})
        body = {"model_path": str(self.model), "weight_version": str(self.version), "flush_cache": True}
        self._request("POST", "/update_weights_from_disk", {**body, "abort_all_requests": False})
        self._progress()
        if occupy:
            self._request("POST", "/resume_memory_occupation", {})
        self._request("POST", "/continue_generation", {})
        self._verify()

    def _verify(self) -> None:
        served = self.served_version()
        if served != str(self.version):
            raise EngineError(f"the engine serves weight version {served}, not {self.version}")

    def _restart(self, reason: str) -> None:
        """Replace the process on the same port, serving the current model. Raises EngineError."""
        for attempt in range(START_ATTEMPTS):
            self._progress()
            self._end()
            try:
                self._spawn()
                self._wait_ready()
                break
            except EngineError as error:
                if attempt == START_ATTEMPTS - 1 or self._closed.is_set():
                    self._end()
                    raise EngineError(f"{reason}; restarting failed: {error}") from None
        self._tell("restarted", reason)

    def _supervise(self) -> None:
        missed = 0
        while not self._closed.wait(self._settings.health_interval_s):
            with self._lock:
                if self._closed.is_set() or self._process is None:
                    continue
                code = self._process.poll()
                missed = 0 if code is None and self._answers() else missed + 1
                if code is None and missed < MISSED_CHECKS:
                    continue
                reason = f"the engine ended with code {code}" if code is not None else "the engine hangs"
                if self._released:
                    self._end()  # `resume` starts it again: a training cell has no memory for it
                    continue
                try:
                    self._restart(reason)
                    missed = 0
                except EngineError as error:
                    self._tell("lost", str(error))
                    return

    def _answers(self) -> bool:
        try:
            self._request("GET", "/ping", timeout_s=max(PING_WAIT_S, self._settings.health_interval_s))
        except EngineError:
            return False
        return True

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0 if self._closed.is_set() else 0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _tell(self, state: str, reason: str) -> None:
        self._notice({"engine": state, "url": self.url, "version": self.version, "reason": reason})

    def _request(
        self, method: str, path: str, body: dict | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        if self._process is None:
            raise EngineError("the engine is down")
        address = urlsplit(self.url)
        wait = timeout_s or self._settings.request_timeout_s
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=wait)
        try:
            data = json.dumps(body).encode() if body is not None else None
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the engine at {self.url} did not answer {path}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise EngineError(
                f"the engine answered {response.status} to {path}: {text[:300].decode('utf8', 'replace')}"
            )
        return _json_object(text)


def _json_object(text: bytes | str) -> dict[str, Any]:
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _read_lines(process: subprocess.Popen, lines: queue.SimpleQueue[str]) -> None:
    """Keep the engine's standard output drained; an empty line marks its end."""
    for line in process.stdout:
        lines.put(line.decode("utf8", "replace").strip() or " ")
    lines.put("")
