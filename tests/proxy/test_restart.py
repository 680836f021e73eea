"""A proxy that starts on a log goes on where the one that wrote it was."""

import json
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import pytest
from gyre_trajtree import Execution, RunLogWriter, Tree, executions, read_run_log
from proxy_clients import Talker
from proxy_lives import Lives
from proxy_stage import DEADLINE_S, FakeEngine, Proxy, wait_until

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


class Sayer(FakeEngine):
    """Says something that depends on the prompt, of 1 to 17 tokens and more."""

    def _plan(self, given):
        return self.said(given["input_ids"]), "stop"

    def said(self, prompt: list[int]) -> list[int]:
        text = "The lazy dog jumps. " * (1 + sum(prompt) % 4) + str(sum(prompt))
        return [*self.codec._tokenizer.encode(text, add_special_tokens=False).ids, self.codec.turn_end]


class Fate:
    """One log, four agents, and a proxy that is killed at moments that chance decides."""

    def __init__(self, seed: int, settings: dict) -> None:
        self.chance, self.settings, self.record = random.Random(seed), settings, settings["record"]
        self.talkers = [
            Talker(f"f{seed}-{kind}-{stream}", kind, stream)
            for kind, stream in (("chat", False), ("chat", True), ("messages", True), ("responses", True))
        ]
        self.lines = b""
        """Whole lines of the log at the last death."""
        self.lives = Lives()

    def run(self, kills: int) -> None:
        try:
            for _ in range(kills):
                self.live()
            self.live(turns=1)
        finally:
            self.lives.close()
            for talker in self.talkers:
                talker.client.close()

    def live(self, turns: int | None = None) -> None:
        """One life; with `turns` it ends after that many of each agent."""
        moments = (self.starting, self.some_time, self.an_answer, self.a_line, self.a_stream)
        moment = self.chance.choice(moments) if turns is None else None
        self.lives.begin(**self.settings)
        if moment == self.starting:
            self.starting()
            self.lives.kill()
        else:
            url = self.lives.ready()
            kept = self.record.read_bytes()
            assert kept.startswith(self.lines) and kept.endswith(b"\n"), "a start tore the log"
            with ThreadPoolExecutor(len(self.talkers)) as pool:
                try:
                    talks = [pool.submit(talker.talk, url, turns) for talker in self.talkers]
                    if moment is None:
                        wait(talks, DEADLINE_S)
                    else:
                        moment()
                finally:
                    self.lives.kill()
                for talk in talks:
                    talk.result(DEADLINE_S)
        if self.record.exists():
            content = self.record.read_bytes()
            self.lines = content[: content.rfind(b"\n") + 1]

    def starting(self) -> None:
        """Somewhere between the fork and the ready line, or a little later."""
        threading.Event().wait(self.chance.uniform(0, 0.1))

    def some_time(self) -> None:
        threading.Event().wait(self.chance.uniform(0, 0.2))

    def an_answer(self) -> None:
        """Right after one of the next answers arrived."""
        wanted = self.answered() + self.chance.randint(1, 12)
        wait_until(lambda: self.answered() >= wanted)

    def a_line(self) -> None:
        """The log just grew: the line is written, its answer may not have gone out."""
        for _ in range(self.chance.randint(1, 12)):
            size = self.record.stat().st_size
            end = time.monotonic() + DEADLINE_S
            while self.record.stat().st_size == size:
                assert time.monotonic() < end, f"no line was written within {DEADLINE_S} s"
                time.sleep(0.0002)  # to be there before the answer is out

    def a_stream(self) -> None:
        """The first bytes of a streamed answer arrived, its end did not."""
        wanted = self.begun() + self.chance.randint(1, 8)
        wait_until(lambda: self.begun() >= wanted)

    def answered(self) -> int:
        return sum(talker.answered for talker in self.talkers)

    def begun(self) -> int:
        return sum(talker.begun for talker in self.talkers)


def check_fate(fate: Fate, engine: Sayer) -> int:
    """What was answered is in the log once, as it was answered, in trees of the tokens that the engine saw.

    Returns how many calls are in the log.
    """
    recorded = executions(read_run_log(fate.record))
    prompts = {request["rid"].partition("-")[0]: request["input_ids"] for request in engine.requests}
    count = 0
    for talker in fate.talkers:
        calls = recorded[talker.name].calls
        count += len(calls)
        by_id = {call.id: call for call in calls}
        assert len(by_id) == len(calls)
        tree = Tree.from_calls(calls)
        for conversation in talker.conversations:
            for id, text in conversation:
                assert engine.codec.decode(by_id[id].output_ids.tolist()) == text
            path = [node.id for node in tree.path(tree[conversation[-1][0]])] if conversation else []
            assert path == [id for id, _ in conversation]
        for node in tree.nodes:
            prompt = tree.path_tokens(node)[: node.output_start].tolist()
            assert prompt == prompts[node.id]
            assert by_id[node.id].finish != "stop" or by_id[node.id].output_ids.tolist() == engine.said(
                prompt
            )
    return count


def test_a_hundred_kills_lose_no_answered_call(loop_thread, codec, tokenizer_dir, tmp_path):
    """kill -9 at moments that chance decides; sessions go on where they were, on the recorded tokens."""
    engine = Sayer(codec, [])
    loop_thread.do(engine.start())
    settings = {"engines": [engine.url], "tokenizer": tokenizer_dir, "context_length": 100_000}
    fates = [
        Fate(seed, settings | {"record": tmp_path / f"{seed}.jsonl", "flush": "process" if seed else "disk"})
        for seed in range(4)
    ]
    try:
        with ThreadPoolExecutor(len(fates)) as pool:
            list(pool.map(lambda fate: fate.run(25), fates))
    finally:
        loop_thread.do(engine.stop())
    for fate in fates:
        assert check_fate(fate, engine) >= fate.answered() > 0
