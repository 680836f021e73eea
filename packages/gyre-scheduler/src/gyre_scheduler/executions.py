"""One harness execution: a folder with a fresh workspace and a fresh HOME, and the harness command run in it.

The harness knows a base URL, a key and a task, and nothing else of ours: its environment holds PATH, HOME,
LANG, GYRE_BASE_URL, GYRE_API_KEY, GYRE_TASK_FILE and what the settings add. Of a task it gets the id, the
prompt, the files and what stands under `harness`; nothing else of it is ever written into the folder.

    folder/  workspace/  home/  task.json  stdout.txt  stderr.txt
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from .errors import CommandNotFound, HarnessNotFound, SettingsError, TaskError, TemplateError
from .events import Termination
from .guard import Guard
from .processes import ProcessEnd, run_process

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
UNFIT = {errno.E2BIG, errno.EINVAL}
"""A prompt that is no argument of a command: longer than 128 KiB, or with a zero character."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Harness:
    """A command template with its environment and files, and what goes around it.

    Placeholders: {python} {workspace} {home} {base_url} {key} {task_file} {prompt} {name}, and `placeholders`' own.
    {name} is one that no other execution on the machine has; a container can be called so.
    The command runs with the workspace as its current folder, so paths in it must be absolute.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    placeholders: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Written into HOME before the start: {path below it: template}."""
    prefix: tuple[str, ...] = ()
    """Command of a sandbox or container, put in front of `command`. Its part "{env}" becomes `--env NAME` for each variable
    of the environment but PATH: docker and podman take the value from their own, so that no list of processes shows it."""
    stop: tuple[str, ...] = ()
    """Command that runs when every process of the harness is gone, however that came; for what is no process below it."""
    grace_s: float = 2.0
    """Seconds between SIGTERM and SIGKILL when the time is up."""
    output_limit: int = 1 << 20
    """Bytes kept of standard output and of standard error each."""

    def __post_init__(self):
        if not 0 <= self.grace_s < math.inf or self.output_limit < 0:
            raise SettingsError(
                "a harness needs a grace_s of 0 or more seconds and an output_limit of 0 or more"
            )

    def check(self) -> None:
        """HarnessNotFound, TemplateError or TaskError now rather than at the first launch.

        Where there is a prefix, the command is looked up by it, perhaps in an image, so only the prefix is looked up here.
        """
        names = dict.fromkeys(("workspace", "home", "base_url", "key", "task_file", "prompt", "name"), "")
        self.render_env(names)
        self.render_files(names)
        command, stop = self.render_command(names), self.render_stop(names)
        if not any(command[:1]):
            raise HarnessNotFound("the harness command '' does not exist; set harness.command")
        if prefix := self.render_prefix(names):
            self._find(prefix[0], "prefix")
        else:
            self._find(command[0], "command")
        if stop:
            self._find(stop[0], "stop")

    def _find(self, program: str, setting: str) -> None:
        if shutil.which(program, path=self.env.get("PATH", _search_path())) is None:
            raise HarnessNotFound(
                f"harness {setting} {program!r} does not exist or is not executable; set harness.{setting}"
            )

    def render_command(self, values: Mapping[str, str]) -> list[str]:
        return [render(part, {**self._always(), **values}) for part in self.command]

    def render_prefix(self, values: Mapping[str, str]) -> list[str]:
        names = [name for name in self.render_env(values) if name != "PATH"]
        parts = []
        for part in self.prefix:
            parts += [option for name in names for option in ("--env", name)] if part == "{env}" else [part]
        return [render(part, {**self._always(), **values}) for part in parts]

    def render_stop(self, values: Mapping[str, str]) -> list[str]:
        return [render(part, {**self._always(), **values}) for part in self.stop]

    def render_env(self, values: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of one execution."""
        return {
            "PATH": _search_path(),
            "HOME": values["home"],
            "LANG": "C.UTF-8",
            "GYRE_BASE_URL": values["base_url"],
            "GYRE_API_KEY": values["key"],
            "GYRE_TASK_FILE": values["task_file"],
            **{name: render(value, {**self._always(), **values}) for name, value in self.env.items()},
        }

    def render_files(self, values: Mapping[str, str]) -> dict[Path, str]:
        """{path below HOME: text}."""
        return {
            _inside(name): render(text, {**self._always(), **values}) for name, text in self.files.items()
        }

    def _always(self) -> dict[str, str]:
        return {"python": sys.executable, **self.placeholders}


@dataclass(frozen=True, slots=True)
class HarnessEnd:
    """How a harness ended. `error` is one line unless it completed."""

    termination: Termination
    code: int
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class ExecutionFolder:
    """The files of one execution."""

    path: Path

    @classmethod
    def create(cls, path: Path, task: Mapping[str, Any]) -> ExecutionFolder:
        """Lay out a task: its `files` in the workspace, the harness's view of it in task.json.

        TaskError for a file outside the workspace or a view that is no object; OSError as it comes (a full
        disk, an existing folder).
        """
        folder = cls(path)
        for made in (path, folder.workspace, folder.home):
            made.mkdir(parents=made is path)
        for name, text in task.get("files", {}).items():
            write_below(folder.workspace, _inside(name), text)
        folder.task_file.write_text(json.dumps(harness_view(task)))
        return folder

    @property
    def workspace(self) -> Path:
        return self.path / "workspace"

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def task_file(self) -> Path:
        return self.path / "task.json"

    @property
    def stdout(self) -> Path:
        return self.path / "stdout.txt"

    @property
    def stderr(self) -> Path:
        return self.path / "stderr.txt"

    def values(self, task: Mapping[str, Any], base_url: str, key: str) -> dict[str, str]:
        """What the placeholders of a harness stand for."""
        digest = hashlib.sha256(os.fsencode(self.path.absolute())).hexdigest()[:12]
        return {
            "workspace": str(self.workspace.absolute()),
            "home": str(self.home.absolute()),
            "base_url": base_url,
            "key": key,
            "task_file": str(self.task_file.absolute()),
            "prompt": str(task.get("prompt", "")),
            "name": f"gyre-{re.sub('[^A-Za-z0-9_.-]', '-', self.path.name)}-{digest}",
        }

    def discard(self) -> None:
        """Remove everything of the execution from the disk."""
        shutil.rmtree(self.path)


async def run_harness(
    harness: Harness,
    folder: ExecutionFolder,
    task: Mapping[str, Any],
    base_url: str,
    key: str,
    timeout_s: float,
    guard: Guard | None = None,
) -> HarnessEnd:
    """Start the harness, wait for it, end everything it started.

    A harness that runs into `timeout_s` is ended, and what it left in its workspace can be assessed as usual.
    HarnessNotFound if the command cannot be executed.
    """
    values = folder.values(task, base_url, key)
    try:
        write_files(harness, folder.home, values)
        with folder.stdout.open("wb", buffering=0) as out, folder.stderr.open("w+b", buffering=0) as err:
            end = await run_process(
                [*harness.render_prefix(values), *harness.render_command(values)],
                cwd=folder.workspace,
                env=harness.render_env(values),
                stdout=out,
                stderr=err,
                output_limit=harness.output_limit,
                timeout_s=timeout_s,
                grace_s=harness.grace_s,
                guard=guard,
                stop=harness.render_stop(values),
            )
            return _harness_end(end, last_line(err), timeout_s)
    except CommandNotFound as missing:
        raise HarnessNotFound(f"harness command {missing}; set harness.command") from None
    except OSError as refused:
        if refused.errno not in UNFIT:
            raise
        return HarnessEnd("failed", -1, f"the harness cannot be started with this task: {refused}", 0.0)


def harness_view(task: Mapping[str, Any]) -> dict[str, Any]:
    """What a harness may see of its task: id, prompt, and the members of its object `harness`, if it has one.

    An allowlist, so that what only the evaluator should know needs no name that this package knows.
    """
    view = task.get("harness", {})
    if not isinstance(view, Mapping):
        raise TaskError(f"the task's harness part must be an object, not {str(view)[:80]!r}")
    return {**view, **{name: task[name] for name in ("id", "prompt") if name in task}}


def write_files(harness: Harness, home: Path, values: Mapping[str, str]) -> None:
    """Write what a harness wants to find in its HOME."""
    for path, text in harness.render_files(values).items():
        write_below(home, path, text)


def write_below(folder: Path, path: Path, text: str) -> None:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def render(template: str, values: Mapping[str, str]) -> str:
    """Replace each {name}; TemplateError for one without a value."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = " ".join(f"{{{name}}}" for name in sorted(values))
            raise TemplateError(f"{template!r} names {match[0]}, which is none of {known}")
        return values[match[1]]

    return PLACEHOLDER.sub(value, template)


def _harness_end(end: ProcessEnd, said: str, timeout_s: float) -> HarnessEnd:
    if end.timed_out:
        return HarnessEnd("timeout", end.code, f"ended after {round(timeout_s, 1):g} s", end.seconds)
    if end.code == 0:
        return HarnessEnd("completed", 0, None, end.seconds)
    how = f"exit status {end.code}" if end.code > 0 else f"signal {-end.code}"
    return HarnessEnd("failed", end.code, ": ".join(filter(None, (how, said))), end.seconds)


def last_line(file: BinaryIO, limit: int = 4096) -> str:
    """The last line of a text file that is not blank, at most `limit` bytes; empty if there is none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - limit))
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _inside(name: str) -> Path:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise TaskError(f"the file {name!r} lies outside the folder that it belongs to")
    return path


def _search_path() -> str:
    return os.environ.get("PATH", DEFAULT_PATH)
