"""Owns how mini-swe-agent is driven: Chat Completions in one piece, one tool, a command that says that all is done."""

import json
from collections.abc import Sequence
from pathlib import Path

from harness_adapter import Harness
from harness_policy import Step, Use

_TRAJECTORY = "home/trajectory.json"
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The first line of a command's output that ends the run; the rest is what is submitted."""


class MiniSweAgent(Harness):
    name = "mini-swe-agent"
    forgets = True
    streams = False
    overflow = 20_000
    gives_up = "ContextWindowExceededError"

    def program(self) -> Sequence[str]:
        return (str(self.installed / "bin/mini"),)

    def shell(self, command: str) -> Use:
        return Use("bash", {"command": command})

    def finish(self, words: str, thinking: str = "") -> Step:
        return Step(words, [self.shell(f"echo {_SUBMIT}; echo '{words}'")], thinking)

    def final(self, output: str, folder: Path) -> str:
        told = json.loads((folder / _TRAJECTORY).read_text())["info"]
        assert told["exit_status"] == "Submitted", told["exit_status"]
        return told["submission"]
