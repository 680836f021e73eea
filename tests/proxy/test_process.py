"""The proxy as a process of its own: ready line, end with its parent, full disk, one-line errors."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from gyre_proxy.__main__ import main
from gyre_trajtree import Call, read_run_log
from proxy_stage import ADMIN, DEADLINE_S

BODY = {"model": "m", "messages": [{"role": "user", "content": "go"}]}


@pytest.fixture
def start():
    """start(*arguments) -> the running process; killed with its group at the end."""
    processes = []

    def begin(*arguments, **more):
        command = [sys.executable, "-m", "gyre_proxy", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **more,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


def test_the_process_says_its_url_serves_and_ends_with_its_parent(
    start, stage, codec, tokenizer_dir, tmp_path
):
    engine = stage.engine(codec, ["Hello."])
    record = tmp_path / "run.jsonl"
    process = start(
        "--tokenizer", tokenizer_dir, "--record", record, "--engine", engine.url, "--exit-with-parent"
    )
    facts = json.loads(process.stdout.readline())
    assert facts["mode"] == "suffix" and facts["context_length"] == 4096
    answer = httpx.post(f"{facts['url']}/x/e/v1/chat/completions", json=BODY, timeout=DEADLINE_S).json()
    assert answer["choices"][0]["message"]["content"] == "Hello."
    process.stdin.close()
    process.stdin = None
    assert process.wait(DEADLINE_S) == 0
    assert sum(isinstance(r, Call) for r in read_run_log(record)) == 1


BLOCKED = """
import asyncio, threading, time
from gyre_proxy import service

async def main():
    service.PARENT_GRACE_S = 0.2
    service._watch_parent(asyncio.Event(), threading.Event())
    print("watching", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def test_the_process_ends_with_its_parent_also_when_its_loop_is_blocked():
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"watching\n"
        process.stdin.close()
        try:
            assert process.wait(DEADLINE_S) == 1
        finally:
            process.kill()


def test_a_stopped_proxy_records_the_calls_in_flight(start, stage, codec, tokenizer_dir, tmp_path):
    engine = stage.engine(codec, ["Hello, world and all."])
    engine.hold_after = 3
    record = tmp_path / "run.jsonl"
    process = start("--tokenizer", tokenizer_dir, "--record", record, "--engine", engine.url)
    url = json.loads(process.stdout.readline())["url"] + "/x/e/v1/messages"
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=DEADLINE_S) as stream,
    ):
        for _ in stream.iter_lines():
            process.terminate()
    assert process.wait(DEADLINE_S) == 0
    (call,) = [r for r in read_run_log(record) if isinstance(r, Call)]
    assert (call.finish, len(call.output_ids)) == ("abort", 3)


def test_a_full_disk_withholds_the_answer_and_service_resumes_with_space(
    start, stage, codec, tokenizer_dir, tmp_path
):
    engine = stage.engine(codec, ["Hello, world and all."])
    record = tmp_path / "run.jsonl"

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))

    process = start(
        "--tokenizer", tokenizer_dir, "--record", record, "--engine", engine.url, preexec_fn=small_disk
    )
    url = json.loads(process.stdout.readline())["url"] + "/x/e/v1/"
    answer = httpx.post(url + "chat/completions", json=BODY, timeout=DEADLINE_S)
    assert answer.status_code == 503 and "disk is full" in answer.json()["error"]["message"]
    assert "Hello" not in answer.text
    engine.hold_after = 3
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", url + "messages", json={**BODY, "stream": True}, timeout=DEADLINE_S) as stream,
    ):
        for _ in stream.iter_lines():  # the first line tells that the answer is under way
            stage.do(engine.release())
    assert [type(r).__name__ for r in read_run_log(record)] == ["Header"]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert httpx.post(url + "chat/completions", json=BODY, timeout=DEADLINE_S).status_code == 200
    assert sum(isinstance(r, Call) for r in read_run_log(record)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokenizer", "/nonexistent"], "no tokenizer.json"),
        (["--engine", "localhost:1"], "must be a URL"),
        (["--engine", "http://[::1"], "must be a URL"),
        (["--engine", "http://x:99999"], "must be a URL"),
        (["--port", "99999"], "port must be from 0"),
        (["--port", "-1"], "port must be from 0"),
        (["--strict"], "admin token"),
        (["--admin-token-env", "GYRE_TEST_UNSET"], "GYRE_TEST_UNSET is empty"),
        (["--admin-token-env", "GYRE_TEST_SET", "--admin-token-stdin"], "not allowed with"),
        (["--record", "/nonexistent/run.jsonl"], "run.jsonl"),
        (["--host", "192.0.2.1", "--strict", "--admin-token-env", "GYRE_TEST_SET"], "cannot listen"),
        (["--host", "0.0.0.0"], "add --strict"),
        (["--host", "example.org", "--admin-token-env", "GYRE_TEST_SET"], "add --strict"),
        (["--temperature", "nan"], "temperature"),
        (["--call-deadline", "inf"], "call_deadline_s"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--top-k", "0"], "top_k"),
        (["--template-arguments", "[1]"], "not a JSON object"),
        (["--template-arguments", "{"], "not JSON"),
        (["--nonsense"], "--nonsense; see --help"),
        (["--stri"], "--stri"),
    ],
)
def test_a_mistake_gets_one_line(tokenizer_dir, tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.setenv("GYRE_TEST_SET", "token")
    usual = ["--tokenizer", str(tokenizer_dir), "--record", str(tmp_path / "run.jsonl")]
    code = main([*usual, "--engine", "http://127.0.0.1:1", *arguments])
    error = capsys.readouterr().err
    assert code == 2 and words in error and error.count("\n") == 1


def test_a_proxy_that_no_engine_could_ever_reach_is_refused(tokenizer_dir, tmp_path, capsys):
    code = main(["--tokenizer", str(tokenizer_dir), "--record", str(tmp_path / "run.jsonl")])
    assert code == 2 and "--engine" in capsys.readouterr().err


def test_the_admin_token_comes_through_standard_input_and_is_in_no_environment(
    start, tokenizer_dir, tmp_path
):
    usual = ("--tokenizer", tokenizer_dir, "--record", tmp_path / "run.jsonl")
    process = start(*usual, "--admin-token-stdin", "--exit-with-parent")
    process.stdin.write(b"very-secret\n")
    process.stdin.flush()
    url = json.loads(process.stdout.readline())["url"]
    for token, status in (("very-secret", 200), ("other", 401)):
        headers = {"authorization": f"Bearer {token}"}
        assert httpx.get(f"{url}/admin/status", headers=headers, timeout=DEADLINE_S).status_code == status
    for file in ("environ", "cmdline"):
        assert b"very-secret" not in Path(f"/proc/{process.pid}/{file}").read_bytes()
    process.stdin.close()
    process.stdin = None
    assert process.wait(DEADLINE_S) == 0


def test_standard_input_without_a_token_gets_one_line(start, tokenizer_dir, tmp_path):
    process = start("--tokenizer", tokenizer_dir, "--record", tmp_path / "run.jsonl", "--admin-token-stdin")
    process.stdin.close()
    process.stdin = None
    assert process.wait(DEADLINE_S) == 2
    error = process.stderr.read()
    assert b"standard input is empty" in error and error.count(b"\n") == 1


def test_keys_for_harnesses_elsewhere_come_with_an_address_they_can_reach(scene):
    proxy, _ = scene(["Hello."], host="0.0.0.0", strict=True)
    assert proxy.url.startswith("http://127.0.0.1:")
    headers = {**ADMIN, "host": "driver.example:8800"}
    issued = httpx.post(
        f"{proxy.url}/admin/executions", json={"id": "e1"}, headers=headers, timeout=DEADLINE_S
    )
    assert issued.json()["base_url"] == "http://driver.example:8800/x/e1"
    own = proxy.admin("POST", "executions", {"id": "e2"})
    answer = httpx.post(f"{own['base_url']}/v1/messages", json=BODY, headers={"x-api-key": own["key"]})
    assert answer.status_code == 200
