"""Demonstrations for the tiny model's warm start: the real harness, run under an imperfect demonstrator.

The demonstrator stands in for the harness's model service. It is sloppy on purpose (shares below): a model
that imitates it acts in the right form and is mostly wrong where it matters, which leaves reinforcement
learning a way up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_scheduler.executions import ExecutionFolder, harness_view

from gyre_cli.quickstart import harness_path
from gyre_cli.quickstart.tasks import WORDS
from gyre_cli.quickstart.tokenizer import END, chat_renderer

STUB = 0.20
"""Share of writes that leave the placeholder "todo" in the file."""
WRONG = 0.03
"""Share of writes with a random word."""
UNREAD = 0.60
"""Share of `read` items answered by writing the key itself."""
UNDELEGATED = 0.60
"""Share of `task` items written directly, which the harness denies."""
EARLY = 0.04
"""Share of turns that stop although items are left."""
MALFORMED = 0.05
"""Share of turns with a tool call that does not parse."""
LAZY_SUMMARY = 0.45
"""Share of summaries that forget the pending item."""


@dataclass
class Transcript:
    """One model context: its tokens, and for each whether the model has to produce it."""

    ids: list[int]
    produced: list[bool]


@dataclass
class Demonstrator:
    """Model service of one harness run. `transcripts` grows by one for each context the harness opens."""

    tokenizer: Any
    rng: random.Random
    render: Any = field(default_factory=chat_renderer)
    transcripts: list[Transcript] = field(default_factory=list)

    def chat(self, messages: list[dict], tools: list[dict]) -> tuple[dict, bool, int]:
        """The next message, as `Client.chat` of the harness gives it."""
        reply = self._reply(messages, [tool["function"]["name"] for tool in tools])
        prompt = self._encode(self.render(messages, tools))
        output = self._encode(self.render_reply(reply))
        self._record(prompt, output)
        return reply, False, len(prompt) + len(output)

    @staticmethod
    def render_reply(reply: dict) -> str:
        """The text that a model has to emit for this message, end mark included."""
        calls = (call["function"] for call in reply.get("tool_calls", []))
        return (reply["content"] or "") + "".join(call_text(c["name"], c["arguments"]) for c in calls) + END

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _record(self, prompt: list[int], output: list[int]) -> None:
        """Extend the context that this prompt continues, or begin one."""
        for transcript in self.transcripts:
            known = len(transcript.ids)
            if prompt[:known] == transcript.ids:
                break
        else:
            known, transcript = 0, Transcript([], [])
            self.transcripts.append(transcript)
        transcript.ids += prompt[known:] + output
        transcript.produced += [False] * (len(prompt) - known) + [True] * len(output)

    def _reply(self, messages: list[dict], tools: list[str]) -> dict:
        if messages[-1]["content"] == "summary":
            item = messages[-2]["content"].splitlines()[-1]
            return _text("empty" if self._happens(LAZY_SUMMARY) else item)
        kind, _, assignment = messages[-1]["content"].splitlines()[-1].partition(" ")
        path, _, word = assignment.partition("=")
        if not word or self._happens(EARLY):
            return _text("done")
        if self._happens(MALFORMED):
            return _text(call_text("write", f'{{"path": "{path}", "content": "{word}'))
        if kind == "read" and not self._happens(UNREAD):
            return _call("read", key=word)
        if kind == "task" and not self._happens(UNDELEGATED):
            return _call("task", path=path, content=word)
        return _call("write", path=path, content=self._content(word))

    def _content(self, word: str) -> str:
        draw = self.rng.random()
        if draw < STUB:
            return "todo"
        return self.rng.choice(WORDS) if draw < STUB + WRONG else word

    def _happens(self, share: float) -> bool:
        return self.rng.random() < share


def call_text(name: str, arguments: str) -> str:
    """A tool call as a model emits it, byte for byte what the chat template renders."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def _text(content: str) -> dict:
    return {"role": "assistant", "content": content}


def _call(name: str, **arguments: str) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": "0", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def load_harness():
    """The quickstart's harness as a module."""
    spec = importlib.util.spec_from_file_location("gyre_quickstart_harness", harness_path())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def demonstrations(tasks: Iterator[dict[str, Any]], tokenizer: Any, seed: int) -> Iterator[list[Transcript]]:
    """For each task the transcripts of one demonstrated run of the harness."""
    harness = load_harness()
    rng = random.Random(f"gyre-demonstrator-{seed}")
    render = chat_renderer()
    for task in tasks:
        demonstrator = Demonstrator(tokenizer, rng, render)
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
            folder = ExecutionFolder.create(Path(scratch) / "execution", task)
            harness.work(demonstrator, harness.Workspace(folder.workspace), harness_view(task))
        yield demonstrator.transcripts
