"""Evaluators for the tests of evaluation, loaded by worker processes."""

import os
import time
from pathlib import Path


def reads_the_workspace(workspace, task):
    print("noise on standard output")
    return float((workspace / "result").read_text()) * task["weight"]


def raises(workspace, task):
    raise ValueError("a test\nbroke")


def hangs(workspace, task):
    time.sleep(600)


def crashes(workspace, task):
    os._exit(7)


def gives(workspace, task):
    return float(task["gives"]) if task["gives"] != "text" else "many"


def gives_an_answer(workspace, task):
    return task["gives"]


def fails_once(workspace, task):
    seen = workspace / "seen"
    if not seen.exists():
        seen.touch()
        os._exit(1)
    return 0.0


NOT_A_FUNCTION = 3


def meets_others(workspace, task):
    """Wait until `expected` evaluations are here at once, then a while for one more; a tenth for each seen."""
    place = Path(task["place"])
    place.mkdir(exist_ok=True)
    mine = place / workspace.parent.name
    mine.touch()
    most, deadline = 0, time.monotonic() + 15
    while most < task["expected"] and time.monotonic() < deadline:
        most = max(most, len(list(place.iterdir())))
        time.sleep(0.01)
    for _ in range(20):
        most = max(most, len(list(place.iterdir())))
        time.sleep(0.01)
    mine.unlink()
    return most / 10
