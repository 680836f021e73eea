"""Owns how pi is driven: Chat Completions, tools one after another, images in a user message after the tool's result."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from harness_adapter import Harness, json_lines
from harness_policy import Use


class Pi(Harness):
    name = "pi"
    abilities = frozenset(("image",))
    compaction = MappingProxyType({"window": 26_000})
    compacts_between_prompts = True
    compacted = MappingProxyType({"summary": None, "main.4": None})
    summary_request = r"^<conversation>"

    def program(self) -> Sequence[str]:
        return self.by_node("@mariozechner/pi-coding-agent/dist/cli.js")

    def shell(self, command: str) -> Use:
        return Use("bash", {"timeout": 60, "command": command})

    def image(self, path: str) -> Use:
        return Use("read", {"path": path})

    def final(self, output: str, folder: Path) -> str:
        ends = [line for line in json_lines(output) if line.get("type") == "agent_end"]
        assert ends, "no agent_end line"
        last = ends[-1]["messages"][-1]
        assert last["role"] == "assistant" and last["stopReason"] == "stop", json.dumps(last)[:500]
        return "".join(part["text"] for part in last["content"] if part["type"] == "text")
