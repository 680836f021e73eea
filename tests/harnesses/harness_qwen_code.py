"""Owns how Qwen Code is driven: Chat Completions, sub-agents of every kind, images by its read_file tool.

Its forks work in the background, with fewer tools than their parent, so their prompts begin anew.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from harness_adapter import Access, Harness, Launch, json_lines
from harness_policy import Step, Use

_READ = "read.py"
_UNTIL_READ = """\
import fcntl, struct, termios, time

def unread(fd):
    return struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))[0]

while unread(1) or unread(2):
    time.sleep(0.002)
"""
"""Ends when the other end of its output's socket has read everything."""


class QwenCode(Harness):
    name = "qwen-code"
    abilities = frozenset(("image", "foreground", "background", "fork", "compaction"))

    compaction = MappingProxyType({"window": 128_000})
    # Its reminders come again with the second prompt after a compaction, in front of the summary.
    compacted = MappingProxyType({"summary": "main.3", "main.4": None, "main.5": None})
    sub_compacted = MappingProxyType({"summary": "first.4", "first.5": None})
    overflow = 90_000
    overflowed = MappingProxyType({"summary": None, "main.3": None, "main.4": None})
    reminds = True
    # It asks to resume the cut answer, then takes that request and the cut answer out of the conversation.
    after_loss = MappingProxyType({"main.3'": "main.3", "main.4": "main.2"})
    summary_request = r"<state_snapshot> XML\.\s*$"

    def program(self) -> Sequence[str]:
        return self.by_node("@qwen-code/qwen-code/cli-entry.js")

    def launch(self, folder: Path, prompts: Sequence[str], access: Access) -> Launch:
        (folder / "home" / _READ).write_text(_UNTIL_READ)
        return super().launch(folder, prompts, access)

    def shell(self, command: str) -> Use:
        # It takes a command that has ended for done, whether or not it has read all of the output.
        waits = f"trap 'python3 \"$HOME/{_READ}\"' EXIT; {command}"
        # It writes the number as 60000.
        return Use("run_shell_command", {"timeout": 60000.0, "command": waits, "description": "café ☃"})

    def image(self, path: str) -> Callable[[str], Use]:
        return partial(_look, path=path)

    def delegate(self, brief: str, how: str) -> Use:
        kind = {"foreground": "general-purpose", "background": "Explore", "fork": "fork"}[how]
        more = {"subagent_type": kind, "run_in_background": how == "background"}
        return Use("agent", {"prompt": brief, "description": "look", **more})

    def collect(self, how: str, names: Sequence[str]) -> list[Step]:
        # Each report wakes it up.
        return [Step("I wait for them."), Step("One is there.")][: len(names)]

    def final(self, output: str, folder: Path) -> str:
        results = [line for line in json_lines(output) if line.get("type") == "result"]
        assert results, "no result line"
        assert not results[-1]["is_error"], json.dumps(results[-1])[:500]
        return results[-1]["result"]


def _look(prompt: str, path: str) -> Use:
    """Its tools want whole paths."""
    workspace = re.search(r"currently working in the directory: (.+)", prompt)[1]
    return Use("read_file", {"file_path": f"{workspace}/{path}"})
