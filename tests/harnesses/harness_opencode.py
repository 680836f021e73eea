"""Owns how opencode is driven: the protocol of whichever provider package, its task tool, images by its read tool.

Beside the agents' work it asks for a title when it starts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from harness_adapter import Access, Harness, Launch, json_lines
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

    def launch(self, folder: Path, prompts: Sequence[str], access: Access) -> Launch:
        (prompt,) = prompts
        home = folder / "home/.config/opencode"
        home.mkdir(parents=True)
        model = {
            "name": "scripted",
            "attachment": True,
            "reasoning": True,
            "tool_call": True,
            "limit": {"context": access.window, "output": _OUTPUT},
            "modalities": {"input": ["text", "image"], "output": ["text"]},
        }
        provider = {
            "npm": self._provider,
            "name": "gyre",
            "options": {"baseURL": f"{access.base_url}/v1", "apiKey": access.key},
            "models": {"scripted": model},
        }
        config = {
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "model": "gyre/scripted",
            "provider": {"gyre": provider},
        }
        (home / "opencode.json").write_text(json.dumps(config))
        binary = self.installed / "node_modules/opencode-linux-x64/bin/opencode"
        quiet = (
            "OPENCODE_DISABLE_AUTOUPDATE",
            "OPENCODE_DISABLE_MODELS_FETCH",
            "OPENCODE_DISABLE_LSP_DOWNLOAD",
        )
        argv = [str(binary), "run", "--format", "json", "--print-logs", prompt]
        return Launch(argv, dict.fromkeys(quiet, "1"))

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
