"""Executions of a run: one budget for launch, harness and evaluation, and work that is scored however the harness ended."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace

import pytest
from gyre_cli.config import load_config
from gyre_cli.errors import MisuseError
from gyre_cli.rollouts import Rollouts
from gyre_scheduler.dispatch import execution_names
from gyre_scheduler.evaluation import Evaluator
from gyre_scheduler.executions import Harness
from gyre_scheduler.guard import Guard

TASK = {"id": "t", "prompt": "p"}
NAME, *_ = execution_names(0, 2)
WORKS_ON = "open('half', 'w').write('done'); import time; time.sleep(600)"
SCORES_HALF = (
    "import json, os, sys; print(json.dumps({'score': 0.5 if os.path.exists(sys.argv[1] + '/half') else 0}))"
)
HANGS_TWICE = """
import os, sys, time
first = not os.path.exists(sys.argv[1] + "/tried")
open(sys.argv[1] + "/tried", "a").write(".")
time.sleep(600)
"""


class Proxy:
    """Takes `slow_s` to launch an execution."""

    def __init__(self, slow_s: float = 0.0):
        self.slow_s = slow_s
        self.deadline: float | None = None

    async def register(self, execution, engine, deadline):
        self.deadline = deadline
        await asyncio.sleep(self.slow_s)
        return "http://127.0.0.1:1/x/e", "key"

    async def close_execution(self, execution):
        pass


def run(tmp_path, harness: str, evaluator: str, proxy: Proxy, *assignments: str):
    """(what the run log got, seconds until the assessment, the folder of the execution)."""
    config = load_config(None, ["harness.keep_workspaces=true", *assignments])
    said = []
    record = SimpleNamespace(
        append=said.append, assessed=lambda execution, found: said.append(found), event=lambda *_, **__: None
    )

    async def execute():
        with Guard() as guard:
            async with Evaluator(
                [sys.executable, "-c", evaluator, "{workspace}"],
                config.task.evaluation_timeout_s,
                config.task.evaluation_attempts,
                guard=guard,
            ) as scorer:
                rollouts = Rollouts(
                    config=config,
                    tasks=iter([TASK]),
                    harness=Harness((sys.executable, "-c", harness), grace_s=0.1),
                    evaluator=scorer,
                    proxy=proxy,
                    routes=SimpleNamespace(url=lambda cell: "http://engine"),
                    record=record,
                    folder=tmp_path,
                    guard=guard,
                    fail=pytest.fail,
                )
                await rollouts.dispatch(0, 0, None)
                begin = time.monotonic()
                report = SimpleNamespace(
                    launched=lambda: None, terminated=lambda how: None, assessed=lambda valid: None
                )
                await rollouts.run(NAME, 0, report)
                return time.monotonic() - begin

    seconds = asyncio.run(execute())
    return said, seconds, tmp_path / NAME


def test_a_harness_that_ran_out_of_time_is_scored_for_what_it_left(tmp_path):
    (_, closed, assessment), _, _ = run(tmp_path, WORKS_ON, SCORES_HALF, Proxy(), "harness.timeout_s=1")
    assert closed.termination == "timeout"
    assert (assessment.status, assessment.score) == ("valid", 0.5)


def test_launch_harness_and_evaluation_share_one_budget(tmp_path):
    """The launch takes most of it, so the harness gets less than its own limit, and its evaluation all that it may need."""
    (opened, closed, assessment), _, _ = run(
        tmp_path,
        WORKS_ON,
        SCORES_HALF,
        proxy := Proxy(slow_s=1.0),
        *("harness.timeout_s=60", "harness.budget_s=7", "task.evaluation_timeout_s=5"),
    )
    assert (closed.termination, assessment.score) == ("timeout", 0.5)
    assert float(closed.error.removeprefix("ended after ").removesuffix(" s")) <= 1
    assert 0 < opened.deadline - closed.time < 6 and proxy.deadline > opened.deadline


def test_retries_of_an_evaluation_end_with_the_budget(tmp_path):
    (_, _, assessment), seconds, folder = run(
        tmp_path,
        "pass",
        HANGS_TWICE,
        Proxy(),
        *("harness.budget_s=3", "task.evaluation_timeout_s=2", "task.evaluation_attempts=50"),
    )
    assert assessment.status == "unresolved"
    assert len((folder / "workspace/tried").read_text()) == 2
    assert 3 <= seconds < 20


def test_without_a_budget_it_is_the_sum_of_the_limits():
    config = load_config(
        None, ["harness.timeout_s=60", "task.evaluation_timeout_s=20", "task.evaluation_attempts=3"]
    )
    assert config.execution_budget_s == 120
    assert load_config(None, ["harness.budget_s=50"]).execution_budget_s == 50


def test_a_budget_without_time_for_the_harness_is_refused():
    with pytest.raises(MisuseError, match=r"harness.budget_s 20 leaves the harness no time.*20 of it"):
        load_config(None, ["harness.budget_s=20", "task.evaluation_timeout_s=20"])
