"""Evaluators for the tests of evaluation, loaded by worker processes."""

import os
import time


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


def fails_once(workspace, task):
    seen = workspace / "seen"
    if not seen.exists():
        seen.touch()
        os._exit(1)
    return 0.0


NOT_A_FUNCTION = 3
