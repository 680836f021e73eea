"""Owns how opencode is driven: the protocol of whichever provider package, its task tool, images by its read tool.

Beside the agents' work it asks for a title when it starts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from gyre_scheduler.harnesses import KnownHarness, opencode
from harness_adapter import Harness, json_lines
from harness_policy import Use

_OUTPUT = 8192
"""What it reserves for an answer; it compacts when less is left of the window."""


class OpenCode(Harness):
    name = "opencode"
    abilities = frozenset(("image", "foreground", "compaction"))
    asides = MappingProxyType({"title": "auxiliary"})
    compaction = MappingProxyType({"window": 44_000 + _OUTPUT})
    compacted = MappingProxyType({"summary": None, "main.4": None})
    overflow = 45_000
    complains = True
    overflowed = MappingProxyType({"summary": None, "main.3": None})
    # It begins the summary's request with the whole transcript, as a text.
    summary_request = r"Create a new anchored summary"
    title_request = r"title generator"

    def __init__(self, provider: str = "@ai-sdk/openai-compatible") -> None:
        """`provider`: one of the packages that it carries with it; it says which protocol is spoken."""
        self._provider = provider

    @property
    def preset(self) -> KnownHarness:
        return opencode(self._provider)

    def program(self) -> Sequence[str]:
        return (str(self.installed / "node_modules/opencode-linux-x64/bin/opencode"),)

    def shell(self, command: str) -> Use:
        # It writes the number as 60000.
        return Use("bash", {"timeout": 60000.0, "command": command, "description": "café ☃"})

    def image(self, path: str) -> Use:
        return Use("read", {"filePath": path})

    def delegate(self, brief: str, how: str) -> Use:
        return Use("task", {"subagent_type": "general", "prompt": brief, "description": "look"})

    def final(self, output: str, folder: Path) -> str:
        lines = list(json_lines(output))
        errors = [line["error"] for line in lines if line["type"] == "error"]
        errors = [error for error in errors if error["name"] != "ContextOverflowError"]
        assert not errors, json.dumps(errors)[:500]
        return [line["part"]["text"] for line in lines if line["type"] == "text"][-1]
