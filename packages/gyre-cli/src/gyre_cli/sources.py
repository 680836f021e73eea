"""Where tasks come from: a `module:function` called with the seed, or a JSON Lines file in a seeded order, repeated.

A task is a JSON object with the strings `id` and `prompt`, and optionally the objects `files` (initial workspace files by
relative path) and `harness` (settings of the harness's own). The harness gets id, prompt and the members of `harness`; the
evaluator gets the whole task, and any other key (`expect`, say) is for it alone. The same seed gives the same tasks.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from gyre_cli.errors import MisuseError

Task = dict[str, Any]


def load_function(reference: str, purpose: str) -> Callable[..., Any]:
    """The callable that `module:function` names. Raises MisuseError with one line if there is none."""
    module_name, _, name = reference.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a module of the user's may do anything while it is imported
        raise MisuseError(f"{purpose} {reference!r} cannot be loaded: {error!r}") from None
    if not callable(function):
        raise MisuseError(f"{purpose} {reference!r} is not a function")
    return function


def load_tasks(source: str, seed: int) -> Iterator[Task]:
    """An endless iterator of checked tasks."""
    if ":" in source and not Path(source).exists():
        return map(_checked, _called(source, seed))
    return map(_checked, _repeat(_read_tasks(Path(source)), seed))


def _called(source: str, seed: int) -> Iterator[Any]:
    function = load_function(source, "task.source")
    try:
        return iter(function(seed))
    except Exception as error:
        raise MisuseError(f"task.source {source!r} gives no tasks: {error!r}") from None


def _read_tasks(path: Path) -> list[Task]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise MisuseError(f"task.source {path} cannot be read: {error.strerror}") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tasks.append(_checked(orjson.loads(line)))
        except orjson.JSONDecodeError as error:
            raise MisuseError(f"task.source {path}, line {number} is not JSON: {error}") from None
    if not tasks:
        raise MisuseError(f"task.source {path} holds no task")
    return tasks


def _checked(task: Any) -> Task:
    if (
        not isinstance(task, dict)
        or not isinstance(task.get("id"), str)
        or not isinstance(task.get("prompt"), str)
    ):
        raise MisuseError(f"a task is an object with the strings id and prompt, not {str(task)[:80]!r}")
    for part in ("files", "harness"):
        if not isinstance(task.get(part, {}), dict):
            raise MisuseError(f"task {task['id']}: {part} is an object, not {str(task[part])[:80]!r}")
    for name, text in task.get("files", {}).items():
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise MisuseError(f"task {task['id']}: file {name!r} lies outside the workspace")
        if not isinstance(text, str):
            raise MisuseError(f"task {task['id']}: file {name!r} must hold a string, not {str(text)[:80]!r}")
    return task


def _repeat(tasks: list[Task], seed: int) -> Iterator[Task]:
    order = random.Random(seed)
    while True:
        yield from order.sample(tasks, len(tasks))
