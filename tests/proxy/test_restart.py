"""A proxy that starts on a log goes on where the one that wrote it was."""

import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from gyre_trajtree import Execution, RunLogWriter, Tree, executions, read_run_log
from proxy_stage import DEADLINE_S, Proxy, wait_until

USER = {"role": "user", "content": "look around"}
TOOLS = [
    {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}
]
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "shell", "arguments": {"cmd":  "ls"}}\n</tool_call>'


def body(*messages):
    return {"model": "m", "messages": list(messages), "tools": TOOLS}


@pytest.fixture
def start(stage, codec, tokenizer_dir, tmp_path):
    """start(script) -> (proxy, engine), on one log each time; the proxy before is stopped."""

    def begin(script):
        stage.clear()
        engine = stage.engine(codec, script)
        settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", "engines": [engine.url]}
        return stage.proxy(**settings), engine

    yield begin
    stage.clear()


def said(answer: httpx.Response) -> dict:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def turn(proxy: Proxy, *messages) -> dict:
    return said(proxy.post("chat/completions", body(*messages)))


def result(message: dict) -> dict:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a"}


def test_a_conversation_goes_on_after_a_restart_with_its_tokens(start):
    proxy, _ = start([CALL])
    first = turn(proxy, USER)
    first["tool_calls"][0]["function"]["arguments"] = '{"cmd":"ls"}'  # as a harness writes it anew
    del first["reasoning_content"]
    proxy, engine = start([CALL, "Done."])
    second = turn(proxy, USER, first, result(first))
    assert turn(proxy, USER, first, result(first), second, result(second))["content"] == "Done."
    tree = Tree.from_calls(proxy.calls())
    assert [call.parent for call in proxy.calls()] == [None, *[call.id for call in proxy.calls()[:2]]]
    for node, request in zip(tree.nodes[1:], engine.requests, strict=True):
        assert request["input_ids"] == tree.path_tokens(node)[: node.output_start].tolist()


def test_branches_and_other_protocols_find_their_nodes_again(start):
    proxy, _ = start([CALL, "One.", "Two."])
    first = turn(proxy, USER)
    for content in ("a", "b"):
        turn(proxy, USER, first, result(first) | {"content": content})
    proxy, _ = start(["Three."])
    blocks = [
        {"type": "tool_use", "id": first["tool_calls"][0]["id"], "name": "shell", "input": {"cmd": "ls"}}
    ]
    messages = [
        USER,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": blocks[0]["id"], "content": "b"}
        ]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    tools = [{"name": "shell", "input_schema": TOOLS[0]["function"]["parameters"]}]
    answer = proxy.post("messages", {"model": "m", "max_tokens": 50, "messages": messages, "tools": tools})
    assert answer.status_code == 200, answer.text
    calls = proxy.calls()
    assert [calls.index(c) for c in calls if c.id == calls[3].parent] == [2]


def test_a_retry_after_a_restart_is_an_attempt_of_the_call_that_failed(start):
    proxy, engine = start(["Hello."])
    engine.hold_after = 2
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{proxy.url}/x/e/v1/chat/completions", json=body(USER), timeout=0.5)
    proxy, _ = start(["Hello."])
    turn(proxy, USER)
    aborted, retried = proxy.calls()
    assert aborted.finish == "abort" and retried.attempt_of == aborted.id


def test_an_execution_that_was_closed_stays_closed(start, tmp_path):
    proxy, _ = start(["Hello."])
    turn(proxy, USER)
    with RunLogWriter(tmp_path / "run.jsonl") as log:
        log.append(Execution("e", "closed", termination="completed"))
    proxy, _ = start(["Hello."])
    answer = proxy.post("chat/completions", body(USER))
    assert answer.status_code == 410, answer.text
    assert proxy.post("chat/completions", body(USER), execution="other").status_code == 200


def test_a_log_of_another_tokenizer_is_refused(start, stage, tokenizer_dir, tmp_path):
    proxy, engine = start([CALL])
    turn(proxy, USER)
    stage.clear()
    log = tmp_path / "run.jsonl"
    header, _, rest = log.read_bytes().partition(b"\n")
    header = json.loads(header)
    header["meta"]["tokenizer"] = "0123"
    log.write_bytes(json.dumps(header).encode() + b"\n" + rest)
    command = [sys.executable, "-m", "gyre_proxy", "--engine", engine.url]
    command += ["--tokenizer", tokenizer_dir, "--record", log]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode != 0 and "another tokenizer" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "field", [{"context": "zz"}, {"digest": "zz"}, {"sampling": {"stop": 5}}, {"tool_ids": 1}]
)
def test_calls_that_another_writer_recorded_in_an_odd_way_are_left_as_they_are(start, tmp_path, field):
    proxy, _ = start([CALL])
    turn(proxy, USER)
    log = tmp_path / "run.jsonl"
    header, line = log.read_bytes().splitlines()
    log.write_bytes(header + b"\n" + json.dumps(json.loads(line) | field).encode() + b"\n")
    proxy, _ = start(["Hello."])
    assert turn(proxy, USER)["content"] == "Hello."


def test_the_latest_deadline_counts_after_a_restart(start, tmp_path):
    proxy, _ = start(["Hello."])
    turn(proxy, USER)
    with RunLogWriter(tmp_path / "run.jsonl") as log:
        log.append(Execution("e", "opened", deadline=1.0))
        log.append(Execution("e", "opened", deadline=9e9))
    proxy, _ = start(["Hello."])
    turn(proxy, USER)


def test_an_unreadable_line_costs_its_call_only(start, tmp_path):
    proxy, _ = start([CALL, "Done."])
    first = turn(proxy, USER)
    turn(proxy, USER, first, result(first))
    log = tmp_path / "run.jsonl"
    lines = log.read_bytes().split(b"\n")
    lines[1] = b"garbage" + lines[1]
    log.write_bytes(b"\n".join(lines))
    proxy, _ = start(["Again."])
    message = said(httpx.post(f"{proxy.url}/x/e/v1/chat/completions", json=body(USER), timeout=DEADLINE_S))
    assert message["content"] == "Again."


class Client:
    """An agent that talks in one execution until the proxy dies, and goes on with the next one."""

    def __init__(self, name: str) -> None:
        self.name, self.messages, self.answered = name, [USER], []

    def talk(self, url: str, turns: int | None = None) -> None:
        path = f"{url}/x/{self.name}/v1/chat/completions"
        while turns is None or turns > 0:
            try:
                answer = httpx.post(path, json=body(*self.messages), timeout=DEADLINE_S)
                message = said(answer)
            except httpx.TransportError:
                assert turns is None
                return
            self.answered.append(answer.json()["id"].removeprefix("chatcmpl-"))
            self.messages += [message, {"role": "user", "content": f"turn {len(self.answered)}"}]
            turns = None if turns is None else turns - 1


def test_kill_9_under_load_loses_no_answered_call(stage, codec, tokenizer_dir, tmp_path):
    """Killed at eight moments that chance decides; sessions go on where they were, on the recorded tokens."""
    engine = stage.engine(codec, ["Hello."])
    record = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "gyre_proxy", "--exit-with-parent", "--engine", engine.url]
    command += ["--tokenizer", tokenizer_dir, "--record", record]
    clients, chance = [Client(f"e{i}") for i in range(4)], random.Random(0)
    for kills_left in range(8, -1, -1):
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        with ThreadPoolExecutor(len(clients)) as pool:
            try:
                url = json.loads(process.stdout.readline())["url"]
                talks = [pool.submit(c.talk, url, None if kills_left else 1) for c in clients]
                if kills_left:
                    wanted = sum(len(c.answered) for c in clients) + chance.randint(1, 12)
                    wait_until(lambda wanted=wanted: sum(len(c.answered) for c in clients) >= wanted)
                for talk in talks:
                    if not kills_left:
                        talk.result(DEADLINE_S)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=DEADLINE_S)
            for talk in talks:
                talk.result(DEADLINE_S)
    recorded = executions(read_run_log(record))
    for client in clients:
        tree = Tree.from_calls(recorded[client.name].calls)
        path = [node.id for node in tree.path(tree[client.answered[-1]])]
        assert path == client.answered
