"""The process that runs a Python evaluator: one JSON line in, one JSON line out, until standard input ends.

    python -m gyre_scheduler.evaluation_worker module:function

First line out: {} when the function is loaded, {"error": text} when not. Each later one: {"score": x} and what else the
function's answer holds, or {"error": text}. What the function prints goes to standard error. The process ends when its
parent does, also in the middle of an evaluation.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .evaluation_answers import KEYS

PARENT_POLL_S = 1.0


def main(spec: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        function = _load(spec)
    except Exception as error:
        answers.write(json.dumps({"error": _one_line(error)}) + "\n")
        return
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(_evaluate(function, json.loads(line)) + "\n")


def _load(spec: str) -> Callable[[Path, dict[str, Any]], Any]:
    module, separator, name = spec.partition(":")
    if not separator:
        raise ValueError("it is not of the form module:function")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function


def _evaluate(function: Callable[[Path, dict[str, Any]], Any], request: dict[str, Any]) -> str:
    try:
        found = function(Path(request["workspace"]), request["task"])
        if not isinstance(found, Mapping):
            found = {"score": found}
        answer = {key: found[key] for key in KEYS if key in found}
        return json.dumps({**answer, "score": float(found["score"])})  # a number of any library's kind
    except Exception as error:
        return json.dumps({"error": _one_line(error)})


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
