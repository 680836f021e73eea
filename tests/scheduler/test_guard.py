"""A guard ends process groups when, and only when, their driver dies; and commands that it started, whole."""

from __future__ import annotations

import asyncio
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from io import BytesIO

import pytest
from gyre_scheduler import keeper, processes
from gyre_scheduler.guard import Guard
from gyre_scheduler.processes import run_process

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


KEEPING_DRIVER = """
import asyncio, io, os, sys
from pathlib import Path
from gyre_scheduler.guard import Guard
from gyre_scheduler.processes import run_process

script = "setsid sleep 600 & echo $! > daemon; echo $$ > own; wait"
async def main():
    with Guard() as guard:
        await run_process(
            ["/bin/sh", "-c", script], cwd=Path(sys.argv[1]), env=os.environ, stdout=io.BytesIO(), stderr=io.BytesIO(),
            output_limit=0, timeout_s=600, grace_s=0, guard=guard, stop=["/bin/sh", "-c", "echo $PPID > stopped"],
        )
asyncio.run(main())
"""


def test_a_killed_driver_takes_commands_and_their_daemons_along(tmp_path):
    driver = subprocess.Popen([sys.executable, "-c", KEEPING_DRIVER, str(tmp_path)])
    pids = [int(said(tmp_path / name)) for name in ("daemon", "own")]
    watches = [os.pidfd_open(pid) for pid in pids]
    driver.kill()
    driver.wait()
    assert all(ended(watch) for watch in watches)
    keeper = int(said(tmp_path / "stopped"))
    with suppress(ProcessLookupError):
        assert ended(os.pidfd_open(keeper))


def said(path, timeout_s: float = 20.0) -> str:
    """The line in a file, once it is whole."""
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"nothing in {path} within {timeout_s} s"
        time.sleep(0.01)
    return path.read_text()


def test_a_command_whose_keeper_is_killed_ends_with_its_daemons(tmp_path):
    script = "setsid sh -c 'echo $$ > daemon; sleep 600' & while [ ! -s daemon ]; do sleep 0.01; done; kill -9 $PPID; wait"

    async def run():
        with Guard() as guard:
            end = await command(tmp_path, script, guard)
            return end, ended(os.pidfd_open(int(said(tmp_path / "daemon")))) if alive(tmp_path) else True

    end, gone = asyncio.run(run())
    assert end.code == -signal.SIGKILL and not end.timed_out
    assert gone


def test_who_waits_for_a_start_may_be_cancelled():
    """What the keeper says afterwards is heard: its end is waited for, and no longer than that."""

    async def run():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = processes._Kept(ours)
        start = asyncio.create_task(processes._start(child, "agent"))
        await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait([start])
        with theirs:
            for words in ((keeper.STARTED, 7), (keeper.EXITED, 3), (keeper.ENDED, 3, [], None)):
                theirs.send(marshal.dumps(words))
            async with asyncio.timeout(20):
                return await child.end()

    assert asyncio.run(run()) == 3


def test_a_keeper_shows_nothing_of_the_drivers_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_SECRET", "do not show")

    async def run():
        with Guard() as guard:
            return await command(tmp_path, "cat /proc/$PPID/environ > seen", guard)

    assert asyncio.run(run()).code == 0
    assert b"OUR_SECRET" not in (tmp_path / "seen").read_bytes()


def alive(folder) -> bool:
    return os.path.exists(f"/proc/{int(said(folder / 'daemon'))}")


def command(folder, script, guard):
    return run_process(
        ["/bin/sh", "-c", script],
        cwd=folder,
        env=os.environ,
        stdout=BytesIO(),
        stderr=BytesIO(),
        output_limit=1000,
        timeout_s=30.0,
        grace_s=0.0,
        guard=guard,
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_was_killed_or_stopped_is_replaced(tmp_path, monkeypatch, how):
    monkeypatch.setattr("gyre_scheduler.guard.ANSWER_S", 0.2)

    async def run():
        with Guard() as guard:
            first = guard._process.pid
            running = asyncio.create_task(command(tmp_path, "echo > begun; read x < fifo; exit $x", guard))
            await asyncio.to_thread(said, tmp_path / "begun")
            os.kill(first, how)
            other = await command(tmp_path, "echo 4 > fifo; exit 3", guard)
            assert guard._process.pid != first
            return (await running).code, other.code

    os.mkfifo(tmp_path / "fifo")
    assert asyncio.run(run()) == (4, 3)


def ended(watch: int, timeout_s: float = 20.0) -> bool:
    """Whether the process behind a pidfd ended in time; its new parent may not have reaped it."""
    readable, _, _ = select.select([watch], [], [], timeout_s)
    return bool(readable)
