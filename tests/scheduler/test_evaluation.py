"""Assessment: a failure is never a zero, and a valid zero is a score."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from gyre_scheduler.errors import EvaluatorNotFound
from gyre_scheduler.evaluation import Assessment, Evaluator
from gyre_scheduler.executions import ExecutionFolder

TASK = {"id": "t", "prompt": "p", "weight": 0.5}


@pytest.fixture(autouse=True)
def evaluators_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def folder(tmp_path):
    return ExecutionFolder.create(tmp_path / "execution", TASK)


def assess(folder, spec, task=TASK, budget_s=60.0, **options):
    async def once():
        async with Evaluator(spec, **options) as evaluator:
            return await evaluator.assess(folder, task, time.monotonic() + budget_s)

    return asyncio.run(once())


def test_a_function_scores_the_workspace(folder):
    (folder.workspace / "result").write_text("0.5")
    assert assess(folder, "evaluators:reads_the_workspace") == Assessment("valid", 0.25, None, 1)


def test_an_exception_is_unresolved_after_all_attempts(folder):
    found = assess(folder, "evaluators:raises", attempts=3)
    assert found == Assessment("unresolved", None, "ValueError: a test broke", 3)


def test_a_crash_is_retried_against_the_same_workspace_and_zero_is_a_score(folder):
    assert assess(folder, "evaluators:fails_once") == Assessment("valid", 0.0, None, 2)


def test_a_crash_is_unresolved(folder):
    assert assess(folder, "evaluators:crashes").status == "unresolved"


def test_a_hanging_function_is_ended_and_the_next_one_gets_a_new_worker(folder):
    found = assess(folder, "evaluators:hangs", timeout_s=0.2)
    assert found == Assessment("unresolved", None, "the evaluator ran longer than 0.2 s", 2)


def test_the_budget_bounds_the_attempts(folder):
    begin = time.monotonic()
    found = assess(folder, "evaluators:hangs", budget_s=0.5, timeout_s=60.0, attempts=5)
    assert (found.status, found.attempt) == ("unresolved", 1)
    assert time.monotonic() - begin < 20


def test_without_time_no_attempt_is_made(folder):
    found = assess(folder, "evaluators:gives", budget_s=-1.0)
    assert (found.status, found.attempt) == ("unresolved", 0)


@pytest.mark.parametrize("gives", ["nan", "inf", "-0.1", "1.5"])
def test_a_number_that_is_no_score_is_unresolved(folder, gives):
    found = assess(folder, "evaluators:gives", {**TASK, "gives": gives}, attempts=1)
    assert (found.status, found.score) == ("unresolved", None)
    assert "outside [0, 1]" in found.detail


def test_text_is_no_score(folder):
    found = assess(folder, "evaluators:gives", {**TASK, "gives": "text"}, attempts=1)
    assert found.status == "unresolved" and "ValueError" in found.detail


def test_assessments_run_in_as_many_workers_as_allowed(tmp_path):
    async def three():
        folders = [ExecutionFolder.create(tmp_path / str(number), TASK) for number in range(3)]
        async with Evaluator("evaluators:gives", workers=2) as evaluator:
            deadline = time.monotonic() + 60
            tasks = [{**TASK, "gives": str(number / 10)} for number in range(3)]
            return await asyncio.gather(
                *(
                    evaluator.assess(folder, task, deadline)
                    for folder, task in zip(folders, tasks, strict=True)
                )
            )

    assert [found.score for found in asyncio.run(three())] == [0.0, 0.1, 0.2]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("evaluators", "module:function"),
        ("no_such_module:evaluate", "No module named"),
        ("evaluators:missing", "no attribute 'missing'"),
        ("evaluators:NOT_A_FUNCTION", "not a function"),
        (["/nowhere/evaluate", "{workspace}"], "'/nowhere/evaluate' does not exist"),
        ([], "does not exist"),
    ],
)
def test_an_evaluator_that_cannot_be_loaded_is_one_line(folder, spec, words):
    with pytest.raises(EvaluatorNotFound) as refused:
        assess(folder, spec)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def command(program):
    return ["{python}", "-c", program, "{workspace}", "{task_file}"]


def test_a_command_gives_its_score_on_the_last_line_and_sees_the_whole_task(folder):
    program = (
        "import json, sys; task = json.load(open(sys.argv[2])); print('noise')\n"
        "print(json.dumps({'score': task['expect'] / 4}))"
    )
    assert assess(folder, command(program), {**TASK, "expect": 1}) == Assessment("valid", 0.25, None, 1)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('0.5')", "last line"),
        ('print(\'{"score": "high"}\')', "not a number"),
        ("print('{\"score\": NaN}')", "outside [0, 1]"),
        ("", "last line"),
        ("import sys; sys.exit('no disk')", "status 1: no disk"),
    ],
)
def test_a_command_without_a_score_is_unresolved(folder, program, words):
    found = assess(folder, command(program), attempts=1, timeout_s=60.0)
    assert found.status == "unresolved" and found.score is None
    assert words in found.detail


def test_a_command_that_hangs_is_ended(folder):
    found = assess(folder, ["sleep", "600"], attempts=1, timeout_s=0.2)
    assert found == Assessment("unresolved", None, "the evaluator ran longer than 0.2 s", 1)


def test_workers_end_when_their_input_ends(folder):
    import subprocess
    import sys

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.run(
        [sys.executable, "-m", "gyre_scheduler.evaluation_worker", "evaluators:gives"],
        input=json.dumps({"workspace": str(folder.workspace), "task": {"gives": "1"}}) + "\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert worker.stdout == '{}\n{"score": 1.0}\n'
