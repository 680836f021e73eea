"""Processes that die during a run: the run goes on, or ends with one line; the log is never lost, nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from gyre_trajtree import Execution, executions, read_run_log

FAULTY = ("schedule.steps=3", "schedule.groups_per_step=4", "schedule.group_size=6")


def closed(run) -> int:
    if not run.log.exists():
        return 0
    return sum(isinstance(r, Execution) and r.state == "closed" for r in read_run_log(run.log))


def kill(pids: list[int]) -> None:
    assert pids
    os.kill(pids[0], signal.SIGKILL)


def cell(run, index: int) -> list[int]:
    return [pid for pid in run.processes("gyre_trainer.cell") if f"engine{index}.log" in command(pid)]


def engine(run, index: int) -> list[int]:
    (parent,) = cell(run, index)
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_a_killed_engine_comes_back_and_no_call_is_lost(start):
    run = start(*FAULTY)
    run.wait_for("closed executions", lambda: closed(run) >= 4)
    kill(engine(run, 0))
    summary = run.summary()
    assert summary["steps"] == 3
    assert summary["outcomes"].get("failed", 0) == 0
    assert any(e["notice"].get("engine") == "restarted" for e in run.events("engine"))


def test_a_killed_satellite_comes_back(start):
    run = start(*FAULTY)
    run.wait_for("closed executions", lambda: closed(run) >= 4)
    kill(cell(run, 1))
    summary = run.summary()
    assert summary["steps"] == 3
    assert [e["cell"] for e in run.events("cell-lost")] == [1]
    assert summary["outcomes"].get("failed", 0) == 0
    assert run.processes("gyre_proxy", "gyre_trainer", "harness") == []


def test_a_killed_core_ends_the_run_with_one_line(start):
    run = start(*FAULTY)
    run.wait_for("closed executions", lambda: closed(run) >= 4)
    before = closed(run)
    kill(cell(run, 0))
    code, _, err = run.finish()
    assert code == 1
    assert err.splitlines()[-1].startswith("gyre: ") and "Traceback" not in err
    assert closed(run) >= before
    assert run.processes("gyre_proxy", "gyre_trainer", "harness") == []


def test_a_killed_harness_fails_alone(start):
    run = start(*FAULTY)
    for _ in range(3):
        run.wait_for("a harness", lambda: bool(run.processes("harness.py")))
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(run.processes("harness.py")[0], signal.SIGKILL)
    summary = run.summary()
    assert summary["steps"] == 3
    recorded = executions(read_run_log(run.log))
    ends = Counter(each.states[-1].termination for each in recorded.values())
    assert 1 <= ends["failed"] <= 3
    assert all(
        each.reward is not None for each in recorded.values() if each.states[-1].termination == "failed"
    )


def test_a_killed_driver_leaves_a_whole_log_and_no_process(start):
    run = start(*FAULTY)
    run.wait_for("closed executions", lambda: closed(run) >= 4)
    run.process.kill()
    run.process.communicate()
    deadline = time.monotonic() + 30
    while run.processes("gyre_proxy", "gyre_trainer", "harness"):
        assert time.monotonic() < deadline, "processes outlived their driver"
        time.sleep(0.1)
    recorded = executions(read_run_log(run.log))
    assert sum(each.closed for each in recorded.values()) >= 4


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_says_so_and_ends_everything(start, sign):
    run = start()
    run.wait_for("closed executions", lambda: closed(run) >= 4)
    run.process.send_signal(sign)
    code, _, err = run.finish()
    assert code == 130
    assert f"{sign.name} received" in err.splitlines()[-1]
    assert len((run.run_dir / "metrics.jsonl").read_text().splitlines()) < 24, "the run went on to its end"
    assert run.processes("gyre_proxy", "gyre_trainer", "harness") == []
    recorded = executions(read_run_log(run.log))
    assert all(each.closed for each in recorded.values() if each.states)


def test_a_proxy_that_stops_answering_ends_the_run_with_one_line(start):
    run = start("harness.timeout_s=15")
    run.wait_for("closed executions", lambda: closed(run) >= 4)
    (proxy,) = run.processes("gyre_proxy")
    os.kill(proxy, signal.SIGSTOP)
    code, _, err = run.finish()
    assert code == 1
    # it may have been stopped in the middle of a line
    assert re.match("gyre: (the proxy did not answer|.* held the run log for)", err.splitlines()[-1])
    assert "Traceback" not in err
    assert run.processes("gyre_proxy", "gyre_trainer", "harness") == []


def test_a_log_that_another_process_keeps_locked_ends_the_run_with_one_line(start):
    run = start()
    run.wait_for("closed executions", lambda: closed(run) >= 4)
    with run.log.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        code, _, err = run.finish()
    assert code == 1
    assert "held the run log for" in err.splitlines()[-1] and "Traceback" not in err
    assert run.processes("gyre_proxy", "gyre_trainer", "harness") == []
