"""A user's own tasks, harness and evaluator, and what happens when they misbehave."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gyre_trajtree import executions, read_run_log

ONE_GROUP = (
    "schedule.steps=1",
    "schedule.mu=1",
    "schedule.phi=0",
    "schedule.groups_per_step=1",
    "schedule.group_size=2",
)

HANGS_AFTER_HALF = """
import json, os, pathlib, sys, time
task = json.load(open(os.environ["GYRE_TASK_FILE"]))
assert set(task) == {"id", "prompt"} and not [name for name in os.environ if name.startswith("SECRET")]
pathlib.Path("half.txt").write_text(task["prompt"])
time.sleep(600)
"""

COUNTS_FILES = """
import json, pathlib, sys
workspace, task = pathlib.Path(sys.argv[1]), json.load(sys.stdin)
print(json.dumps({"score": sum((workspace / name).exists() for name in task["expect"]) / len(task["expect"])}))
"""


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """Assignments of a run with a task file, a harness that hangs and an evaluator command."""
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"id": "a", "prompt": "p", "expect": ["half.txt", "rest.txt"]}) + "\n"
    )
    (tmp_path / "hangs.py").write_text(HANGS_AFTER_HALF)
    (tmp_path / "score.py").write_text(COUNTS_FILES)
    score = ["{python}", str(tmp_path / "score.py"), "{workspace}"]
    return [
        *ONE_GROUP,
        f"task.source={tmp_path / 'tasks.jsonl'}",
        f"harness.command={json.dumps(['{python}', str(tmp_path / 'hangs.py')])}",
        f"task.evaluator={json.dumps(score)}",
    ]


def test_a_timed_out_execution_is_scored_for_what_it_left(start, own, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")
    run = start(*own, "harness.timeout_s=1")
    summary = run.summary()
    assert summary["steps"] == 1
    assert summary["outcomes"] == {"timeout": 2, "unassessed": 0}
    assert summary["rewards"] == [0.5]
    assert summary["sampled_tokens"] == summary["trained_tokens"] == 0


def test_a_crashing_evaluator_ends_the_run_with_its_reason(start, own, tmp_path):
    (tmp_path / "score.py").write_text("raise RuntimeError('no score today')\n")
    run = start(*own, "harness.timeout_s=0.5", "task.evaluation_attempts=1")
    code, _, err = run.finish()
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("gyre: ") and "Traceback" not in err, err
    recorded = executions(read_run_log(run.log))
    assert recorded and all(each.reward is None for each in recorded.values())
    details = [each.assessments[-1].detail for each in recorded.values() if each.assessments]
    assert details and all("no score today" in detail for detail in details)
    assert "no score today" in last


def test_a_killed_driver_takes_a_hanging_harness_along(start, own):
    run = start(*own)
    run.wait_for("a harness", lambda: bool(run.processes("hangs.py")))
    run.process.kill()
    run.process.communicate()
    deadline = time.monotonic() + 30
    while run.processes("gyre_proxy", "gyre_trainer", "hangs.py"):
        assert time.monotonic() < deadline, "processes outlived their driver"
        time.sleep(0.1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for the start of a run and little more."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a full disk needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_ends_the_run_with_one_line_and_a_readable_log(start, small_disk):
    run = start("schedule.groups_per_step=4", name="disk/run")
    code, _, err = run.finish()
    assert code == 1
    assert err.splitlines()[-1].startswith("gyre: ") and "Traceback" not in err, err
    assert "No space left" in err.splitlines()[-1] or "full" in err.splitlines()[-1]
    assert sum(len(each.calls) for each in executions(read_run_log(run.log)).values()) > 0
    assert run.processes("gyre_proxy", "gyre_trainer", "harness") == []


def test_an_evaluator_that_cannot_be_loaded_is_refused(start, own):
    run = start(*own[:-1], "task.evaluator=no_such_module:score")
    code, _, err = run.finish()
    assert code == 2 and "no_such_module" in err.splitlines()[-1]
    assert run.processes("gyre_proxy", "gyre_trainer") == []
