"""Harness processes: what they see, how they end, what they leave behind."""

import asyncio
import json
import os
import sys
import time
from io import BytesIO

import pytest
from gyre_scheduler.errors import HarnessNotFound, SettingsError, TaskError, TemplateError
from gyre_scheduler.executions import ExecutionFolder, Harness, harness_view, last_line, run_harness

TASK = {
    "id": "t",
    "prompt": "do it",
    "harness": {"budget": 7, "id": "another"},
    "expect": {"a": "b"},
    "solution": "the-answer",
    "files": {"notes/x": "hello"},
}


def python(program, **options):
    return Harness((sys.executable, "-I", "-S", "-c", program), **options)


def execute(tmp_path, harness, timeout_s=20.0, task=TASK):
    folder = ExecutionFolder.create(tmp_path / "execution", task)
    end = asyncio.run(run_harness(harness, folder, task, "http://127.0.0.1:1/x/e", "secret-key", timeout_s))
    return end, folder


def alive(process):
    """Whether a process exists and is more than a zombie."""
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_harness_sees_its_own_world_and_nothing_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_SECRET", "do not show")
    program = "import json, os; print(json.dumps([dict(os.environ), os.getcwd(), os.listdir()]))"
    end, folder = execute(tmp_path, python(program, env={"EXTRA": "{base_url}/v1", "JSON": '{"k": 1}'}))
    environment, cwd, listing = json.loads(folder.stdout.read_text())
    environment.pop("LC_CTYPE", None)
    assert environment == {
        "PATH": os.environ["PATH"],
        "HOME": str(folder.home),
        "LANG": "C.UTF-8",
        "GYRE_BASE_URL": "http://127.0.0.1:1/x/e",
        "GYRE_API_KEY": "secret-key",
        "GYRE_TASK_FILE": str(folder.task_file),
        "EXTRA": "http://127.0.0.1:1/x/e/v1",
        "JSON": '{"k": 1}',
    }
    assert (cwd, listing) == (str(folder.workspace), ["notes"])
    assert end.termination == "completed" and end.error is None


def test_only_what_is_meant_for_the_harness_reaches_it(tmp_path):
    folder = ExecutionFolder.create(tmp_path / "execution", TASK)
    shown = b"".join(path.read_bytes() for path in folder.path.rglob("*") if path.is_file())
    assert json.loads(folder.task_file.read_text()) == harness_view(TASK)
    assert harness_view(TASK) == {"id": "t", "prompt": "do it", "budget": 7}
    assert b"expect" not in shown and b"the-answer" not in shown
    assert (folder.workspace / "notes/x").read_text() == "hello"


def test_a_harness_part_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(TaskError, match=r"must be an object, not '\[1\]'"):
        ExecutionFolder.create(tmp_path / "execution", {**TASK, "harness": [1]})


@pytest.mark.parametrize("bad", [{"grace_s": -1}, {"grace_s": float("nan")}, {"output_limit": -1}])
def test_a_harness_refuses_numbers_it_cannot_use(bad):
    with pytest.raises(SettingsError, match="0 or more"):
        python("", **bad)


def test_placeholders_are_filled_in_the_command(tmp_path):
    harness = Harness(("{python}", "-c", "import sys; print(sys.argv[1:])", "{prompt}", "{own}"))
    harness = Harness(harness.command, placeholders={"own": "value"})
    _, folder = execute(tmp_path, harness)
    assert folder.stdout.read_text().strip() == "['do it', 'value']"


def test_a_failing_harness_says_how_in_one_line(tmp_path):
    end, _ = execute(tmp_path, python("import sys; sys.exit('first\\nno answer from the service')"))
    assert (end.termination, end.code) == ("failed", 1)
    assert end.error == "exit status 1: no answer from the service"


def test_a_harness_killed_by_a_signal_failed(tmp_path):
    end, _ = execute(tmp_path, python("import os; os.kill(os.getpid(), 9)"))
    assert (end.termination, end.error) == ("failed", "signal 9")


def shell(script, **options):
    return Harness(("/bin/sh", "-c", script), **options)


def test_a_timeout_ends_the_whole_group_and_keeps_the_workspace(tmp_path):
    script = "trap '' TERM; echo done > half; sleep 600 & echo $!; wait"
    end, folder = execute(tmp_path, shell(script, grace_s=0.1), timeout_s=1.0)
    assert end.termination == "timeout" and end.error == "ended after 1 s"
    assert (folder.workspace / "half").read_text() == "done\n"
    assert not alive(int(folder.stdout.read_text()))


def test_a_harness_may_clean_up_within_the_grace_time(tmp_path):
    script = "trap 'touch cleaned; exit 0' TERM; sleep 600 & wait"
    end, folder = execute(tmp_path, shell(script, grace_s=20.0), timeout_s=1.0)
    assert end.termination == "timeout" and end.code == 0
    assert (folder.workspace / "cleaned").exists()


def test_a_background_process_left_behind_is_ended_and_does_not_delay(tmp_path):
    program = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
    )
    begin = time.monotonic()
    end, folder = execute(tmp_path, python(program))
    assert end.termination == "completed"
    assert not alive(int(folder.stdout.read_text()))
    assert time.monotonic() - begin < 10


def test_output_is_bounded_and_the_harness_still_ends(tmp_path):
    end, folder = execute(tmp_path, python("print('x' * 5_000_000)", output_limit=1000))
    kept = folder.stdout.read_bytes()
    assert end.termination == "completed"
    assert kept.startswith(b"x" * 1000) and len(kept) < 1100 and b"not kept" in kept


def test_a_cancelled_execution_leaves_no_process(tmp_path):
    program = "import os, time\nopen('pid', 'w').write(str(os.getpid()) + '.')\ntime.sleep(600)"
    folder = ExecutionFolder.create(tmp_path / "execution", TASK)
    pid = folder.workspace / "pid"

    async def cancel_once_it_runs():
        run = asyncio.create_task(run_harness(python(program), folder, TASK, "http://x", "k", 60.0))
        async with asyncio.timeout(20):
            while not (pid.exists() and pid.read_text().endswith(".")):
                await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancel_once_it_runs())
    assert not alive(int(pid.read_text().rstrip(".")))


def test_many_executions_run_at_a_time_without_leaking_descriptors(tmp_path):
    async def all_of_them():
        before = len(os.listdir("/proc/self/fd"))
        folders = [ExecutionFolder.create(tmp_path / str(number), TASK) for number in range(20)]
        ends = await asyncio.gather(
            *(run_harness(python("print(1)"), folder, TASK, "http://x", "k", 30.0) for folder in folders)
        )
        return ends, len(os.listdir("/proc/self/fd")) - before

    ends, leaked = asyncio.run(all_of_them())
    assert {end.termination for end in ends} == {"completed"}
    assert leaked <= 0


def test_a_command_that_does_not_exist_is_named_before_and_at_launch(tmp_path):
    harness = Harness(("/nowhere/agent", "--go"))
    with pytest.raises(HarnessNotFound, match="'/nowhere/agent'"):
        harness.check()
    with pytest.raises(HarnessNotFound, match="'/nowhere/agent'.*set harness.command"):
        execute(tmp_path, harness)


def test_a_file_that_is_not_executable_is_no_harness(tmp_path):
    script = tmp_path / "agent"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(HarnessNotFound):
        Harness((str(script),)).check()


def test_an_unknown_placeholder_is_refused_with_those_that_exist():
    with pytest.raises(TemplateError, match=r"\{modell\}.*\{base_url\}"):
        Harness(("{python}", "{modell}")).check()
    with pytest.raises(TemplateError):
        Harness(("{python}",), env={"X": "{nope}"}).check()


def test_an_empty_command_is_refused():
    with pytest.raises(HarnessNotFound):
        Harness(()).check()


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_a_task_cannot_write_outside_its_workspace(tmp_path, name):
    with pytest.raises(TaskError, match="outside the workspace"):
        ExecutionFolder.create(tmp_path / "execution", {**TASK, "files": {name: "x"}})


def test_discard_removes_the_folder(tmp_path):
    folder = ExecutionFolder.create(tmp_path / "execution", TASK)
    folder.discard()
    assert not folder.path.exists()


def test_the_last_line_of_a_long_file_is_found(tmp_path):
    path = tmp_path / "long"
    path.write_text("x\n" * 100_000 + "the end\n\n  \n")
    with path.open("rb") as file:
        assert last_line(file) == "the end"
    assert last_line(BytesIO()) == ""
