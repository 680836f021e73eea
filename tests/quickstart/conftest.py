"""Fixtures of the quickstart's tests: the harness as a module, and a scripted model service for it."""

import contextlib
import copy
import io
import json

import pytest
from gyre_cli.quickstart.demonstrations import load_harness


@pytest.fixture(scope="session")
def harness():
    return load_harness()


@pytest.fixture
def agent_run(harness, tmp_path):
    """Run the harness: (task, replies or a function of (messages, tools)) -> list of requests."""

    def run(task, replies, used=0, folder=tmp_path):
        script = Script(replies, used)
        for path, content in task.get("files", {}).items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(content)
        with contextlib.redirect_stdout(io.StringIO()):
            harness.work(script, harness.Workspace(str(folder)), task)
        return script.requests

    return run


class Script:
    """Answers with the given messages in turn and keeps the requests as (messages, tool names)."""

    def __init__(self, replies, used):
        self.reply = replies if callable(replies) else iter(replies).__next__
        self.scripted = not callable(replies)
        self.used = used
        self.requests = []

    def chat(self, messages, tools):
        self.requests.append((copy.deepcopy(messages), [tool["function"]["name"] for tool in tools]))
        reply = self.reply() if self.scripted else self.reply(messages, tools)
        return reply, False, self.used


def call(name, **arguments):
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call-{name}", "type": "function", "function": function}],
    }


def say(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def tool_call():
    return call


@pytest.fixture
def text():
    return say
