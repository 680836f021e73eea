"""The real proxy process in front of the real SGLang server, and of it and the other engines together."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conformance_engines import WAIT_S, Engine, until
from conformance_model import TURN_END
from gyre_trajtree import Call, read_run_log

TOKEN = "admin-secret"
LONG = 2500
"""Tokens of an answer that a test cuts."""

MOVED = 1500
"""Tokens of an answer that is still under way when a test has read how it begins."""


class Proxy:
    """`python -m gyre_proxy` in a process group of its own."""

    def __init__(self, tokenizer: Path, record: Path) -> None:
        self.record = record
        command = [sys.executable, "-m", "gyre_proxy", "--tokenizer", tokenizer, "--record", record]
        command += ["--admin-token-stdin", "--exit-with-parent", "--max-new-tokens", "16"]
        self.errors = record.with_suffix(".stderr").open("wb")
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        self.process.stdin.write(TOKEN + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, record.with_suffix(".stderr").read_text()
        headers = {"authorization": f"Bearer {TOKEN}"}
        self._admin = httpx.Client(
            base_url=json.loads(line)["url"], headers=headers, timeout=WAIT_S, verify=False
        )
        self.client = httpx.Client(base_url=json.loads(line)["url"], timeout=WAIT_S, verify=False)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=WAIT_S)
        self.errors.close()

    def admin(self, method: str, path: str, **body: object) -> dict:
        answer = self._admin.request(method, f"/admin/{path}", json=body or None)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def serve(self, *engines: Engine) -> None:
        """Make these the engines, each at the version it says it has."""
        table = [{"url": e.url, "admitting": True, "version": int(e.version)} for e in engines]
        self.admin("PUT", "engines", engines=table)

    def start_at(self, execution: str, engine: Engine) -> None:
        self.admin("POST", "executions", id=execution, engine=engine.url)

    def post(self, execution: str, path: str, **body: object) -> dict:
        answer = self.client.post(f"/x/{execution}/v1/{path}", json={"model": "m", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, execution: str, path: str, **body: object):
        return self.client.stream(
            "POST", f"/x/{execution}/v1/{path}", json={"model": "m", "stream": True, **body}
        )

    def in_flight(self, engine: Engine) -> int:
        return self.admin("GET", "status")["engines"][engine.url]["in_flight"]

    def calls(self) -> list[Call]:
        return [record for record in read_run_log(self.record) if isinstance(record, Call)]


@pytest.fixture
def proxy(models: dict[str, Path], tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(models["1"], tmp_path / "run.jsonl")
    yield proxy
    proxy.stop()


@pytest.fixture
def server(sglang: Engine, models: dict[str, Path]) -> Iterator[Engine]:
    """The real server, whose weights are those of `models`."""
    if sglang.models is None:
        pytest.skip("these tests compare log-probs: they need a server of their own")
    yield sglang
    sglang.restore()


def path_of(calls: list[Call], call: Call) -> list[int]:
    """The whole prompt of a call: what its parents read and sampled, then its own suffix."""
    if call.parent is None:
        return call.input_ids.tolist()
    parent = next(other for other in calls if other.id == call.parent)
    return path_of(calls, parent) + parent.output_ids.tolist() + call.input_ids.tolist()


def check_exact(calls: list[Call], references: dict) -> None:
    """Each recorded log-prob is that of the recorded token after the recorded path, by the weights that are named."""
    for call in calls:
        prompt, ids = path_of(calls, call), call.output_ids.tolist()
        assert call.versions[0][1] == 0 and call.versions[-1][2] == len(ids)
        for version, start, end in call.versions:
            truth = references[str(version)].logprobs(prompt + ids[:start], ids[start:end])
            assert call.logprobs[start:end].tolist() == pytest.approx(truth, abs=2e-4)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def say(path: str, conversation: list[dict], new: int) -> dict:
    """The body of one request in the protocol of `path`."""
    if path == "responses":
        return {"input": conversation, "max_output_tokens": new}
    return {"messages": conversation, "max_tokens": new}


def echo(path: str, answer: dict) -> list[dict]:
    """What a client sends back of an answer."""
    if path == "responses":
        return answer["output"]
    if path == "messages":
        return [{"role": "assistant", "content": answer["content"]}]
    return [answer["choices"][0]["message"]]


@pytest.mark.parametrize("path", ["messages", "chat/completions", "responses"])
def test_a_conversation_is_recorded_token_for_token(server, proxy, references, path):
    proxy.serve(server)
    conversation = [user("The quick brown fox")]
    for turn in range(3):
        answer = proxy.post("e", path, **say(path, conversation, 20 + turn))
        conversation += [*echo(path, answer), user(f"jumps over {turn}")]
    calls = proxy.calls()
    assert [len(call.output_ids) for call in calls] == [20, 21, 22]
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id]
    assert all(call.versions == [[1, 0, len(call.output_ids)]] and call.finish == "length" for call in calls)
    check_exact(calls, references)


@pytest.mark.parametrize("path", ["messages", "chat/completions", "responses"])
def test_a_stream_is_recorded_token_for_token(server, proxy, references, path):
    proxy.serve(server)
    with proxy.stream("e", path, **say(path, [user("The lazy dog")], 30)) as response:
        assert response.status_code == 200
        text = b"".join(response.iter_raw())
    assert text.count(b"data: ") > 3
    (call,) = proxy.calls()
    assert (len(call.output_ids), call.versions) == (30, [[1, 0, 30]])
    check_exact([call], references)


def test_tools_and_parallel_conversations(server, proxy, references):
    proxy.serve(server)
    tool = {"name": "shell", "description": "runs", "input_schema": {"type": "object", "properties": {}}}
    texts = [f"task {n}" for n in range(6)]
    bodies = [say("messages", [user(text)], 12) | {"tools": [tool]} for text in texts]
    streams = [proxy.stream(f"e{n}", "messages", **body) for n, body in enumerate(bodies)]
    responses = [stream.__enter__() for stream in streams]
    for stream, response in zip(streams, responses, strict=True):
        assert response.status_code == 200 and b"message_stop" in response.read()
        stream.__exit__(None, None, None)
    calls = proxy.calls()
    assert sorted(call.execution for call in calls) == [f"e{n}" for n in range(6)]
    check_exact(calls, references)


def test_the_cache_is_kept_by_weight_version(server, proxy):
    proxy.serve(server)
    server.flush()
    proxy.post("e", "chat/completions", **say("chat/completions", [user("The quick brown fox jumps")], 8))
    (call,) = proxy.calls()
    prompt = call.input_ids.tolist()

    def cached(**key: object) -> int:
        return server.answer(1, input_ids=prompt, **key)["meta_info"]["cached_tokens"]

    assert cached() == 0 and cached(extra_key="2") == 0
    assert cached(extra_key="1") == len(prompt) - 1


def begun(response: httpx.Response, events: int = 12) -> Iterator[str]:
    """The lines of a stream, some of which were read."""
    assert response.status_code == 200
    lines = response.iter_lines()
    for _ in range(events):
        next(lines)
    return lines


def test_an_update_in_the_middle_of_an_answer_is_two_spans(server, proxy, models, references):
    proxy.serve(server)
    with proxy.stream("e", "messages", **say("messages", [user("go on")], MOVED)) as response:
        lines = begun(response)
        server.pause("retract")
        server.update(model_path=str(models["2"]), weight_version="2", flush_cache=True)
        server.go_on()
        assert any("message_stop" in line for line in lines)
    (call,) = proxy.calls()
    assert [version for version, _, _ in call.versions] == [1, 2] and len(call.output_ids) == MOVED
    check_exact([call], references)


def test_a_client_that_leaves_ends_the_call_at_the_server(server, proxy):
    proxy.serve(server)
    with proxy.stream("e", "chat/completions", **say("chat/completions", [user("go on")], LONG)) as response:
        begun(response, events=1)  # on a busy machine a dozen may be most of the answer
        assert proxy.in_flight(server) == 1
    until(lambda: proxy.in_flight(server) == 0)
    until(lambda: server.post("/flush_cache").status_code == 200)  # which is refused while anything runs
    (call,) = proxy.calls()
    assert call.finish == "abort" and 0 < len(call.output_ids) < LONG


@pytest.mark.parametrize(
    ("path", "back"),
    [("messages", False), ("chat/completions", False), ("responses", False), ("messages", True)],
)
def test_an_answer_moves_between_the_real_server_and_the_embedded_engine(
    server, embedded, proxy, references, path, back
):
    source, destination = (embedded, server) if back else (server, embedded)
    proxy.serve(source, destination)
    proxy.start_at("e", source)
    with proxy.stream("e", path, **say(path, [user("go on")], MOVED)) as response:
        lines = begun(response)
        moved = proxy.admin(
            "POST", "reroute", source=source.url, moves={"e": destination.url}, deadline_s=WAIT_S
        )
        assert moved == {"moved": 1, "continued": 1}
        rest = "".join(lines)
    assert any(mark in rest for mark in ("message_stop", "[DONE]", "response.incomplete"))
    (call,) = proxy.calls()
    assert (len(call.output_ids), call.finish, call.engine) == (MOVED, "length", destination.url)
    assert TURN_END not in call.output_ids and call.versions == [[1, 0, MOVED]]
    check_exact([call], references)


def test_a_call_that_is_not_streamed_moves_too(server, scripted, proxy):
    proxy.serve(server, scripted)
    proxy.start_at("e", server)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(proxy.post, "e", "messages", **say("messages", [user("go on")], LONG))
        until(lambda: proxy.in_flight(server) == 1)
        proxy.admin("POST", "reroute", source=server.url, moves={"e": scripted.url}, deadline_s=WAIT_S)
        assert answer.result(WAIT_S)["usage"]["output_tokens"] == LONG
    (call,) = proxy.calls()
    assert len(call.output_ids) == len(call.logprobs) == LONG and call.engine == scripted.url
