"""Run logs for the tests of `gyre tree`: a long execution as harnesses make them, and an odd one."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from gyre_trajtree import Assessment, Call, Execution, RunLogWriter

TASK = "Rewrite the parser so that nested comments are allowed, and test it thoroughly."


def gyre(*arguments: object, **options) -> subprocess.CompletedProcess:
    """The command, run as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "gyre_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


class LongExecution:
    """Appends the calls of an agent with sub-agents, aborted attempts, changed histories and compactions."""

    def __init__(self, log: RunLogWriter, name: str, given: int, sampled: int) -> None:
        self._log, self.name, self._given, self._sampled = log, name, given, sampled
        self._random = random.Random(0)
        self.calls = 0

    def call(
        self, parent=None, text="", asked=TASK, system="agent", spawns=(), tools=1, finish="stop", **fields
    ):
        """One call; returns its id."""
        identity = f"call-{self.calls:05d}"
        output = [self._random.randrange(500) for _ in range(self._sampled)]
        start = 1_700_000_000.0 + 3 * self.calls
        self.calls += 1
        self._log.append(
            Call(
                identity,
                self.name,
                [self._random.randrange(500) for _ in range(self._given)],
                output,
                parent=parent,
                logprobs=[-self._random.expovariate(2) for _ in output],
                versions=[[3, 0, len(output)]],
                finish=finish,
                time={"start": start, "first": start + 0.5, "end": start + 2.5},
                evidence={
                    "system": system,
                    "tools": f"{system}'s tools" if tools else None,
                    "first_user": asked,
                    "last_user": asked,
                    "text": text,
                    "spawns": list(spawns),
                    "tool_calls": tools,
                },
                **fields,
            )
        )
        return identity

    def work(self, calls: int) -> None:
        """Go on until that many calls are recorded, in contexts of forty calls each."""
        self.call(system="title", tools=0, text="Parser rewrite")
        opening = TASK
        while self.calls < calls:
            end, at = min(self.calls + 40, calls), self.call(asked=opening, text="I look at the code first.")
            while self.calls < end:
                at = self._step(at, opening)
            summary = f"State {self.calls}: the lexer is done, nesting works, {self.calls} tests still fail."
            self.call(at, asked="Summarise the conversation so far.", text=summary, tools=0)
            opening = f"{TASK} {summary}"

    def _step(self, at: str, opening: str) -> str:
        kind = self._random.random()
        if kind < 0.08:
            brief = f"Find every caller of function number {self.calls} and report file and line."
            at = self.call(at, asked=opening, text="I delegate this.", spawns=[brief])
            inner = self.call(asked=brief, system="sub", text="Searching.")
            for _ in range(3):
                inner = self.call(inner, asked=brief, system="sub", text="Next file.")
            return at
        if kind < 0.14:
            lost = self.call(at, asked=opening, finish="abort")
            return self.call(at, asked=opening, text="Again.", attempt_of=lost)
        if kind < 0.18:
            self.call(at, asked=opening, text="A step that is taken back.")
        return self.call(at, asked=opening, text="I edit the next file and run its tests.")


def long_log(path: Path, calls: int, given: int = 8, sampled: int = 4, name: str = "x-long") -> Path:
    """A log of one closed, rewarded execution of at least `calls` calls."""
    with RunLogWriter(path, packed=True) as log:
        log.append(Execution(name, "opened", group="g7", task="rewrite-the-parser", harness="agent"))
        LongExecution(log, name, given, sampled).work(calls)
        log.append(Assessment(name, "valid", 0.625))
        log.append(Execution(name, "closed", termination="completed"))
    return path


def two_executions(path: Path) -> Path:
    """A log of "one-a" (two leaves, rewarded) and "one-b" (unresolved), each of a few calls."""
    with RunLogWriter(path) as log:
        log.append(Execution("one-a", "opened", group="g"))
        log.append(Call("a", "one-a", [1, 2, 3], [4, 5], logprobs=[-1.0, -2.0]))
        log.append(Call("b", "one-a", [6], [7], parent="a", logprobs=[-1.0]))
        log.append(Call("c", "one-a", [8], [9], parent="a", logprobs=[None]))
        log.append(Call("n", "one-b", [1], [2], logprobs=[-1.0]))
        log.append(Assessment("one-a", "valid", 0.5))
        log.append(Assessment("one-b", "unresolved"))
        log.append(Execution("one-a", "closed", termination="completed"))
    return path
