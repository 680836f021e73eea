"""A guard ends process groups when, and only when, their driver dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from gyre_scheduler.guard import Guard

DRIVER = """
import subprocess, sys
from gyre_scheduler.guard import Guard
with Guard() as guard:
    kept = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.PIPE)
    with guard.watching(kept.pid):
        print(kept.pid, flush=True)
        sys.stdin.read()
"""


def test_a_killed_driver_takes_its_groups_along():
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    group = int(driver.stdout.readline())
    watch = os.pidfd_open(group)
    driver.kill()
    driver.wait()
    assert ended(watch)


def test_a_group_that_was_taken_back_lives_on():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with Guard() as guard, guard.watching(child.pid):
        pass
    assert child.poll() is None
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def test_a_killed_guard_does_not_harm_its_driver():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with Guard() as guard:
        guard._process.kill()
        guard._process.wait()
        with guard.watching(child.pid):
            pass
    assert child.poll() is None
    child.kill()
    child.wait()


def ended(watch: int, timeout_s: float = 20.0) -> bool:
    """Whether the process behind a pidfd ended in time; its new parent may not have reaped it."""
    readable, _, _ = select.select([watch], [], [], timeout_s)
    return bool(readable)
