"""The real proxy process in front of engines, what its clients send, and what its log must say."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conformance_engines import WAIT_S, Engine
from gyre_trajtree import Call, read_run_log

TOKEN = "admin-secret"


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


def begun(response: httpx.Response, events: int = 12) -> Iterator[str]:
    """The lines of a stream, some of which were read."""
    assert response.status_code == 200
    lines = response.iter_lines()
    for _ in range(events):
        next(lines)
    return lines
