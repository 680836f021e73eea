"""Whole runs of `gyre train` as a user starts them: a process of its own, a run directory, one JSON object at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gyre_trajtree import Event, read_run_log

SHORT = ("schedule.steps=6", "schedule.groups_per_step=4", "schedule.group_size=6")
"""Two bursts of three steps, 26 groups: enough for every kind of action, short enough for every change."""
DEADLINE_S = 240.0


@dataclass
class Run:
    """A run in progress or ended. `events(name)` reads what is durable now."""

    process: subprocess.Popen[str]
    run_dir: Path

    @property
    def log(self) -> Path:
        return self.run_dir / "run.jsonl"

    def events(self, name: str) -> list[dict]:
        if not self.log.exists():
            return []
        return [r.fields for r in read_run_log(self.log) if isinstance(r, Event) and r.name == name]

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds; fail naming `what`, also when the run ends before."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s"
            time.sleep(0.05)

    def finish(self) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) once the run has ended."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def summary(self) -> dict:
        code, out, err = self.finish()
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    def processes(self, *modules: str) -> list[int]:
        """Living processes of this run, by its directory, whose command line names one of the modules."""
        where = str(self.run_dir)
        return [
            pid
            for pid, command, folder in living()
            if (where in command or folder.startswith(where)) and any(module in command for module in modules)
        ]


def living() -> Iterator[tuple[int, str, str]]:
    """(pid, command line, current folder) of every process that is no zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                folder = os.readlink(entry / "cwd")
            except OSError:
                continue
            if command:
                yield int(entry.name), command, folder


def start_run(run_dir: Path, *assignments: str, options: tuple[str, ...] = ()) -> Run:
    command = [sys.executable, "-m", "gyre_cli", "train", "--json", "--run-dir", str(run_dir), *options]
    for assignment in assignments:
        command += ["--set", assignment]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=run_dir.parent,
    )
    return Run(process, run_dir)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs that are killed with their group at the end of the test, whatever happened."""
    runs: list[Run] = []

    def started(*assignments: str, options: tuple[str, ...] = (), name: str = "run") -> Run:
        runs.append(start_run(tmp_path / name, *assignments, options=options))
        return runs[-1]

    yield started
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.communicate()


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict]:
    """One shortened elastic run, shared by the tests that only look at it: (run, its summary)."""
    run = start_run(tmp_path_factory.mktemp("e2e") / "short", *SHORT)
    try:
        return run, run.summary()
    finally:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
