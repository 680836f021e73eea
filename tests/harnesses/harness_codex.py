"""Owns how Codex is driven: OpenAI Responses, sub-agents as threads that it is told to wait for, images by view_image."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from harness_adapter import Harness, json_lines
from harness_policy import Step, Use


class Codex(Harness):
    name = "codex"
    abilities = frozenset(("image", "background", "fork"))

    compaction = MappingProxyType({"window": 60_000})
    compacted = MappingProxyType({"summary": None, "main.4": None})
    sub_compacted = MappingProxyType({"summary": None, "first.5": None})
    gives_up = "ran out of room in the model's context window"
    summary_request = r"CONTEXT CHECKPOINT COMPACTION"

    def program(self) -> Sequence[str]:
        return (str(next(self.installed.glob("node_modules/@openai/codex-linux-x64/vendor/*/bin/codex"))),)

    def shell(self, command: str) -> Use:
        return Use("exec_command", {"yield_time_ms": 30000, "cmd": command})

    def image(self, path: str) -> Use:
        return Use("view_image", {"path": path})

    def delegate(self, brief: str, how: str) -> Use:
        return Use("spawn_agent", {"message": brief, "fork_context": how == "fork"})

    def collect(self, how: str, names: Sequence[str]) -> list[Step]:
        # It waits for whichever of several ends first, so each is waited for on its own.
        back = range(len(names), 0, -1)
        return [
            Step(f"I wait for {name}.", [partial(_wait, back=n)]) for n, name in zip(back, names, strict=True)
        ]

    def final(self, output: str, folder: Path) -> str:
        lines = list(json_lines(output))
        assert not [line for line in lines if line.get("type") == "turn.failed"], "a turn failed"
        items = [line["item"] for line in lines if line.get("type") == "item.completed"]
        return [item["text"] for item in items if item["type"] == "agent_message"][-1]


def _wait(prompt: str, back: int) -> Use:
    """Wait for the agent that was started `back` agents ago."""
    agents = re.findall(r'"agent_id":\s*"([^"]+)"', prompt)
    return Use("wait_agent", {"timeout_ms": 60000, "targets": [agents[-back]]})
