"""Owns how Claude Code is driven: Anthropic Messages, sub-agents of every kind, images by its Read tool."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from harness_adapter import Harness, json_lines
from harness_policy import Step, Use


class ClaudeCode(Harness):
    name = "claude-code"
    abilities = frozenset(("image", "foreground", "background", "fork"))

    # A fork knows all before the answer that spawned it, and that answer with its text left out.
    origins = MappingProxyType({"copy": "Others can do this."})
    compaction = MappingProxyType({"window": 60_000})
    compacted = MappingProxyType({"summary": "main.2", "main.4": None})
    sub_compacted = MappingProxyType({"summary": "first.3", "first.5": None})
    # Of a history that is too long even for a summary it leaves out the beginning.
    overflowed = MappingProxyType({"summary": None, "main.3": None})
    reminds = True
    summary_request = r"CRITICAL: Respond with TEXT ONLY"

    def program(self) -> Sequence[str]:
        return (str(self.installed / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"),)

    def shell(self, command: str) -> Use:
        # It coerces the text to a number and gives the keys back in its schema's order.
        return Use("Bash", {"timeout": "60000", "description": "café ☃", "command": command})

    def image(self, path: str) -> Use:
        return Use("Read", {"file_path": path})

    def delegate(self, brief: str, how: str) -> Use:
        kind = {"subagent_type": "fork" if how == "fork" else "general-purpose"}
        return Use(
            "Agent",
            {"prompt": brief, "description": "look", **kind, "run_in_background": how == "background"},
        )

    def collect(self, how: str, names: Sequence[str]) -> list[Step]:
        if how == "fork":
            return []
        # Each report wakes it up, also one that comes while it answers another.
        return [Step("I wait for them."), Step("One is there.")]

    def peculiar(self) -> Sequence[Step]:
        name = "notes.txt"
        search = Use("ToolSearch", {"query": "select:NotebookEdit", "max_results": 1})
        return (
            # What is found stands in the middle of the tool list from then on.
            Step("A tool is missing.", [search], shows=["notebook_path"]),
            Step("There it is.", [Use("NotebookEdit", {"new_source": "1", "notebook_path": "none.ipynb"})]),
            Step("I write.", [Use("Write", {"content": "one\n", "file_path": name})], shows=[name]),
            # It comes back with the default of replace_all, and with the keys in another order.
            Step(
                "I edit.",
                [Use("Edit", {"new_string": "two", "old_string": "one", "file_path": name})],
                shows=[name],
            ),
        )

    def final(self, output: str, folder: Path) -> str:
        results = [line for line in json_lines(output) if line.get("type") == "result"]
        assert results, "no result line"
        assert not results[-1]["is_error"], json.dumps(results[-1])[:500]
        return results[-1]["result"]
