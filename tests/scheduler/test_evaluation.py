"""Assessment: a failure is never a zero, and a valid zero is a score."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gyre_scheduler.errors import EvaluatorNotFound, SettingsError, TemplateError
from gyre_scheduler.evaluation import Assessment, Evaluator, Intermediate
from gyre_scheduler.executions import ExecutionFolder

TASK = {"id": "t", "prompt": "p", "weight": 0.5}
EMPTY = f"sha256:{hashlib.sha256().hexdigest()}"
"""What the digest of an empty workspace is called."""


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
    found = assess(folder, "evaluators:reads_the_workspace")
    assert found == Assessment("valid", 0.25, None, 1, found.artifact)
    assert found.artifact.startswith("sha256:") and found.artifact != EMPTY


def test_an_exception_is_unresolved_after_all_attempts(folder):
    found = assess(folder, "evaluators:raises", attempts=3)
    assert found == Assessment("unresolved", None, "ValueError: a test broke", 3, EMPTY)


def test_a_crash_is_retried_against_the_same_workspace_and_zero_is_a_score(folder):
    assert assess(folder, "evaluators:fails_once") == Assessment("valid", 0.0, None, 2, EMPTY)


def test_a_crash_is_unresolved(folder):
    assert assess(folder, "evaluators:crashes").status == "unresolved"


def test_a_hanging_function_is_ended_and_the_next_one_gets_a_new_worker(folder):
    found = assess(folder, "evaluators:hangs", timeout_s=0.2)
    assert found == Assessment("unresolved", None, "the evaluator ran longer than 0.2 s", 2, EMPTY)


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


def command(program):
    return ["{python}", "-c", program, "{workspace}"]


MEETS_OTHERS = """
import json, pathlib, sys, time
workspace, task = pathlib.Path(sys.argv[1]), json.load(sys.stdin)
from evaluators import meets_others
print(json.dumps({"score": meets_others(workspace, task)}))
"""


def assess_many(tmp_path, spec, count, budget_s=60.0, task=TASK, **options):
    """The assessments of `count` workspaces asked for at once."""

    async def all_of_them():
        folders = [ExecutionFolder.create(tmp_path / str(number), TASK) for number in range(count)]
        async with Evaluator(spec, **options) as evaluator:
            deadline = time.monotonic() + budget_s
            return await asyncio.gather(*(evaluator.assess(folder, task, deadline) for folder in folders))

    return asyncio.run(all_of_them())


@pytest.fixture(params=["function", "command"])
def meets_others(request, monkeypatch):
    """An evaluator of either kind that ends once as many run at a time as the task says, and scores how many did."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return "evaluators:meets_others" if request.param == "function" else command(MEETS_OTHERS)


def test_by_default_two_evaluations_run_at_a_time(tmp_path, meets_others):
    task = {**TASK, "place": str(tmp_path / "here"), "expected": 2}
    found = assess_many(tmp_path, meets_others, count=4, task=task, attempts=1)
    assert [each.score for each in found] == [0.2] * 4


def test_no_more_evaluations_run_than_allowed(tmp_path, meets_others):
    task = {**TASK, "place": str(tmp_path / "here"), "expected": 1}
    found = assess_many(tmp_path, meets_others, count=3, task=task, workers=1)
    assert [each.score for each in found] == [0.1] * 3


@pytest.mark.parametrize("spec", ["evaluators:hangs", ["sleep", "600"]])
def test_waiting_for_an_evaluator_counts_against_the_budget(tmp_path, spec):
    begin = time.monotonic()
    found = assess_many(tmp_path, spec, count=3, budget_s=1.0, timeout_s=60.0, workers=1)
    assert time.monotonic() - begin < 20
    assert {each.status for each in found} == {"unresolved"}
    assert sorted(each.attempt for each in found) == [0, 0, 1]
    assert found[1].detail == "no evaluator was free within the execution's budget"


def test_a_worker_that_cannot_start_again_leaves_the_score_unresolved(folder, tmp_path, monkeypatch):
    module = tmp_path / "vanishing.py"
    module.write_text("import os\ndef score(workspace, task): os._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def twice():
        async with Evaluator("vanishing:score", workers=1, attempts=2) as evaluator:
            module.write_text("raise OSError('the disk is gone')\n")
            return await evaluator.assess(folder, TASK, time.monotonic() + 60)

    found = asyncio.run(twice())
    assert (found.status, found.attempt) == ("unresolved", 2)
    assert "cannot be loaded" in found.detail and "the disk is gone" in found.detail


def test_a_command_that_vanishes_leaves_the_score_unresolved(folder, tmp_path):
    script = tmp_path / "score"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)

    async def vanish():
        async with Evaluator([str(script)], attempts=1) as evaluator:
            script.unlink()
            return await evaluator.assess(folder, TASK, time.monotonic() + 60)

    found = asyncio.run(vanish())
    assert found.status == "unresolved" and "cannot be started" in found.detail


def test_a_command_runs_where_the_driver_does(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "score"
    script.write_text("#!/bin/sh\necho '{\"score\": 1}'\n")
    script.chmod(0o755)
    assert assess(folder, ["./score"]).score == 1.0


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"attempts": 0}, {"workers": 0}]
)
def test_an_evaluator_refuses_numbers_it_cannot_use(options):
    with pytest.raises(SettingsError, match="an evaluator needs"):
        Evaluator("evaluators:gives", **options)


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


def test_a_command_gives_its_score_on_the_last_line_and_sees_the_whole_task(folder):
    program = (
        "import json, sys; task = json.load(sys.stdin); print('noise')\n"
        "print(json.dumps({'score': task['expect'] / 4}))"
    )
    assert assess(folder, command(program), {**TASK, "expect": 1}) == Assessment(
        "valid", 0.25, None, 1, EMPTY
    )


def test_a_command_need_not_read_its_task(folder):
    big = {**TASK, "expect": "x" * 1_000_000}
    assert assess(folder, command("print('{\"score\": 1}')"), big).score == 1.0


def test_a_task_file_is_not_for_evaluators(folder):
    with pytest.raises(TemplateError, match=r"\{task_file\}.*\{workspace\}"):
        assess(folder, [*command(""), "{task_file}"])


LOOKS_AROUND = """
import json, os, pathlib, sys
answer = json.load(sys.stdin)["expect"]
print(answer, file=sys.stderr)
folder = pathlib.Path(sys.argv[1]).parent
seen = [path.read_text() for path in folder.rglob("*") if path.is_file()] + sys.argv + list(os.environ.values())
print(answer)
print(json.dumps({"score": 1 - any(answer in text for text in seen)}))
"""


def test_what_is_expected_never_lies_where_the_harness_of_a_sibling_could_read_it(folder):
    answer = "".join(map(chr, range(97, 110)))
    assert assess(folder, command(LOOKS_AROUND), {**TASK, "expect": answer}).score == 1.0
    left = [path.read_text() for path in folder.path.rglob("*") if path.is_file()]
    assert left and not any(answer in text for text in left)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('0.5')", "not an object"),
        ("print('score: 0.5')", "last line"),
        ("print('{\"score\": true}')", "not a number but true"),
        ("print('{\"score\": 1' + '0' * 400 + '}')", "outside [0, 1]"),
        ('print(\'{"score": 0.5, "artifact": 7}\')', "artifact is not text"),
        ('print(\'{"score": 0.5, "intermediate": {}}\')', "intermediate must be a list"),
        ("print('[' * 100_000)", "last line"),
        ("print('{\"score\":' + '[' * 900 + ']' * 900 + '}')", "not a number"),
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


DRIVER = """
import asyncio, sys, time
from pathlib import Path
from gyre_scheduler.evaluation import Evaluator
from gyre_scheduler.executions import ExecutionFolder
from gyre_scheduler.guard import Guard

async def assess():
    place = sys.argv[2]
    command = ["sh", "-c", f"echo $$ > {place}.partial; mv {place}.partial {place}; sleep 600"]
    with Guard() as guard:
        async with Evaluator(command, timeout_s=600, guard=guard) as evaluator:
            await evaluator.assess(ExecutionFolder(Path(sys.argv[1])), {}, time.monotonic() + 600)

asyncio.run(assess())
"""


def until(what, condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within 60 s"
        time.sleep(0.02)


def lives(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_ends_with_a_driver_that_is_killed(folder, tmp_path):
    started = tmp_path / "started"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder.path), str(started)], start_new_session=True
    )
    try:
        until("evaluator", started.exists)
        command = int(started.read_text())
        assert lives(command)
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(60)
    until("end of the evaluator", lambda: not lives(command))


def test_a_command_that_hangs_is_ended(folder):
    found = assess(folder, ["sleep", "600"], attempts=1, timeout_s=0.2)
    assert found == Assessment("unresolved", None, "the evaluator ran longer than 0.2 s", 1, EMPTY)


def test_an_answer_names_what_it_assessed_and_earlier_states_keep_their_own(folder):
    answer = {
        "score": 0.75,
        "detail": "all but one",
        "artifact": "git:b",
        "intermediate": [
            {"score": 0.5, "artifact": "git:a", "branch": "try-1"},
            {"score": 2, "artifact": "git:a2"},
            {"score": 1},
        ],
    }
    early = (
        Intermediate("valid", 0.5, None, "git:a", "try-1"),
        Intermediate("unresolved", None, "the score 2 is outside [0, 1]", None, None),
        Intermediate(
            "unresolved",
            None,
            "an intermediate assessment needs an artifact, which says what it assessed",
            None,
            None,
        ),
    )
    expected = Assessment("valid", 0.75, "all but one", 1, "git:b", early)
    task = {**TASK, "gives": answer}
    assert assess(folder, "evaluators:gives_an_answer", task) == expected
    says = "import json, sys; print(json.dumps(json.load(sys.stdin)['gives']))"
    assert assess(folder, command(says), task) == expected


def test_an_answer_of_a_function_that_is_none_is_unresolved(folder):
    for gives, words in (
        ({"detail": "forgot"}, "KeyError: 'score'"),
        ({"score": 0.5, "artifact": 7}, "not text"),
    ):
        found = assess(folder, "evaluators:gives_an_answer", {**TASK, "gives": gives}, attempts=1)
        assert found.status == "unresolved" and words in found.detail


def test_an_endless_answer_of_a_function_is_unresolved_and_the_next_is_heard(folder):
    task = {**TASK, "gives": {"score": 1, "detail": "x" * 3_000_000}}

    async def twice():
        async with Evaluator("evaluators:gives_an_answer", attempts=1, workers=1) as evaluator:
            deadline = time.monotonic() + 60
            first = await evaluator.assess(folder, task, deadline)
            return first, await evaluator.assess(folder, {**TASK, "gives": {"score": 1}}, deadline)

    first, second = asyncio.run(twice())
    assert first.status == "unresolved" and "cannot be read" in first.detail
    assert second.score == 1.0


def test_halves_of_characters_do_not_reach_the_log(folder):
    says = r"""print('{"score": 1, "detail": "\\ud800 x", "artifact": "\\udfff"}')"""
    found = assess(folder, command(says))
    assert found.score == 1.0 and (found.detail + found.artifact).encode()


def test_without_a_workspace_there_is_nothing_to_assess(folder, tmp_path):
    folder.workspace.rmdir()
    nothing = Assessment("placeholder", 0.0, "the execution left no workspace", 0)
    assert assess(folder, "evaluators:gives") == nothing
    folder.workspace.symlink_to(tmp_path)
    assert assess(folder, "evaluators:gives") == nothing


def test_what_the_evaluator_writes_is_not_in_the_name_of_the_state(folder):
    writes = (
        "import pathlib, sys; pathlib.Path(sys.argv[1], 'cache').write_text('x'); print('{\"score\": 1}')"
    )
    assert assess(folder, command(writes)).artifact == EMPTY
    assert assess(folder, command(writes)).artifact != EMPTY


def test_workers_end_when_their_input_ends(folder):
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
