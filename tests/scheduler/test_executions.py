"""Harness processes: what they see, how they end, what they leave behind."""

import asyncio
import json
import os
import shutil
import subprocess
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


DAEMON = """
import os, sys, time
begun, forgotten = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 3)
        open("pid", "w").write(str(os.getpid()))
        os.write(forgotten, b".")
        if sys.argv[1:]:
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
        time.sleep(600)
    os._exit(0)
os.read(begun, 1)
"""
"""Leaves a process in a session of its own, with none of our descriptors; with an argument, without our environment too."""


@pytest.mark.parametrize("arguments", [(), ("without its environment",)])
def test_a_daemon_ends_with_its_harness(tmp_path, arguments):
    end, folder = execute(tmp_path, Harness((sys.executable, "-I", "-S", "-c", DAEMON, *arguments)))
    assert end.termination == "completed", end.error
    assert not alive(int((folder.workspace / "pid").read_text()))


def test_daemons_of_daemons_end_at_a_timeout(tmp_path):
    script = (
        "for n in 1 2 3; do setsid sh -c 'trap \"\" TERM; echo $$ >> pids; setsid sleep 600 & wait' & done\n"
        "while [ $(wc -l < pids) -lt 3 ]; do sleep 0.01; done; touch ready; wait"
    )
    end, folder = execute(tmp_path, shell(f"touch pids; {script}", grace_s=0.1), timeout_s=2.0)
    assert end.termination == "timeout" and (folder.workspace / "ready").exists()
    pids = (folder.workspace / "pids").read_text().split()
    assert len(pids) == 3 and not any(alive(int(pid)) for pid in pids)


def test_a_harness_may_leave_many_daemons_behind_while_it_works(tmp_path):
    """Those that end by themselves are not kept as zombies by whoever took them in."""
    script = (
        "for n in $(seq 20); do (setsid true &); done\n"
        "until ! grep -qs '^State:.Z' $(cat /proc/$PPID/task/$PPID/children | sed 's|[0-9]*|/proc/&/status|g')\n"
        "do sleep 0.01; done"
    )
    end, _ = execute(tmp_path, shell(script))
    assert end.termination == "completed", end.error


def test_a_harness_has_three_descriptors_and_no_ignored_signals(tmp_path):
    end, folder = execute(
        tmp_path,
        shell("ls -l /proc/self/fd | grep -c '[0-2] ->'; ls /proc/self/fd | wc -l; cat /proc/self/status"),
    )
    lines = folder.stdout.read_text().splitlines()
    assert lines[:2] == ["3", "4"]  # `ls` opens the folder
    ignored = next(line for line in lines if line.startswith("SigIgn:"))
    assert int(ignored.split()[1], 16) == 0


def test_a_prefix_goes_in_front_of_the_command(tmp_path):
    harness = shell("echo $IN $(nice); pwd", prefix=("/usr/bin/env", "IN={workspace}", "nice", "-n", "3"))
    harness.check()
    end, folder = execute(tmp_path, harness)
    assert end.termination == "completed", end.error
    assert folder.stdout.read_text().split() == [str(folder.workspace), "3", str(folder.workspace)]


def test_a_prefix_may_put_the_harness_into_a_namespace_that_ends_with_it(tmp_path):
    script = "echo $$ > own; setsid sleep 600 & wait"
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this machine gives no namespaces: unshare --pid is missing or refused")
    end, folder = execute(tmp_path, shell(script, prefix=unshare, grace_s=0.1), timeout_s=3.0)
    assert end.termination == "timeout" and (folder.workspace / "own").read_text() == "1\n"
    assert not processes_in(folder.workspace)


def processes_in(workspace):
    """Processes whose current folder this is."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{entry}/cwd") == str(workspace):
                found.append(entry)
        except OSError:
            continue
    return found


def test_a_container_is_told_the_environment_without_its_values(tmp_path):
    harness = Harness(
        ("agent", "{prompt}"),
        env={"EXTRA": "{key}"},
        prefix=("docker", "run", "--name", "{name}", "{env}", "--volume", "{workspace}:{workspace}", "image"),
    )
    folder = ExecutionFolder(tmp_path / "e 1")
    values = folder.values(TASK, "http://127.0.0.1:1/x/e", "secret-key")
    prefix = harness.render_prefix(values)
    told = [name for option, name in zip(prefix, prefix[1:], strict=False) if option == "--env"]
    assert told == ["HOME", "LANG", "GYRE_BASE_URL", "GYRE_API_KEY", "GYRE_TASK_FILE", "EXTRA"]
    assert "secret-key" not in " ".join(prefix)
    assert prefix[:3] == ["docker", "run", "--name"] and prefix[3].startswith("gyre-e-1-")
    other = ExecutionFolder(tmp_path / "other" / "e 1").values(TASK, "", "")
    assert other["name"] != values["name"]


@pytest.mark.parametrize("script", ["exit 0", "exit 3", "sleep 600"])
def test_the_stop_command_runs_when_all_of_the_harness_is_gone(tmp_path, script):
    stop = (
        "/bin/sh",
        "-c",
        "kill -0 $(cat pid) 2> /dev/null || touch stopped; setsid sleep 600 & echo {name} $!",
    )
    harness = shell(f"setsid sleep 600 & echo $! > pid; {script}", stop=stop, grace_s=0.1)
    harness.check()
    _, folder = execute(tmp_path, harness, timeout_s=1.0)
    assert (folder.workspace / "stopped").exists()
    assert not processes_in(folder.workspace)


def test_a_stop_command_that_fails_is_reported_and_is_no_failure_of_the_harness(tmp_path, caplog):
    end, _ = execute(tmp_path, shell("exit 0", stop=("/bin/sh", "-c", "echo no such container; exit 5")))
    assert end.termination == "completed"
    assert "exit status 5: no such container" in caplog.text
    execute(tmp_path / "again", shell("exit 0", stop=("/no/such/program",)))
    assert "No such file" in caplog.text


def test_a_prefix_and_a_stop_command_are_looked_up_at_the_start():
    with pytest.raises(HarnessNotFound, match="'/no/docker'.*set harness.prefix"):
        Harness(("known in the image only",), prefix=("/no/docker", "run")).check()
    with pytest.raises(HarnessNotFound, match="'/no/docker'.*set harness.stop"):
        Harness(("{python}",), stop=("/no/docker", "rm", "{name}")).check()
    Harness(("known in the image only",), prefix=("/bin/sh",)).check()
    with pytest.raises(TemplateError):
        Harness(("{python}",), prefix=("env", "{nope}")).check()


def test_files_stand_in_home_before_the_start(tmp_path):
    harness = shell("cat ~/.agent/config.json", files={".agent/config.json": '{"url": "{base_url}/v1"}'})
    _, folder = execute(tmp_path, harness)
    assert json.loads(folder.stdout.read_text()) == {"url": "http://127.0.0.1:1/x/e/v1"}
    with pytest.raises(TaskError, match="outside"):
        shell("", files={"../x": ""}).check()


def test_a_prompt_that_is_no_argument_fails_one_execution(tmp_path):
    harness = Harness(("{python}", "-c", "", "{prompt}"))
    for number, prompt in enumerate(("x" * 200_000, "zero \0")):
        end, _ = execute(tmp_path / str(number), harness, task={**TASK, "prompt": prompt})
        assert end.termination == "failed" and "cannot be started with this task" in end.error


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
    with pytest.raises(TaskError, match="outside the folder"):
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
