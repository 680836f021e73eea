"""The tools with which a judge reads a workspace, bounded in what one call and what one attempt gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from .evaluation_answers import parsed, shown
from .evaluation_files import Entry, Files, Unreadable

CALLS = 16
"""Calls of one turn that are carried out."""
LISTED = 400
"""Entries of one listing."""
READ = 16 << 10
"""Bytes of a file, or characters of a listing, that one call gives."""
READ_IN_ALL = 512 << 10
"""Characters that all calls of an attempt give."""
SPENT = "Error: no more can be read; call submit_score now."


def _tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    _tool(
        "list_files",
        "Files and folders below a folder of the workspace, with sizes in bytes.",
        [],
        path={"type": "string", "description": "Relative to the workspace, which is the default."},
    ),
    _tool(
        "read_file",
        f"Text of a file, at most {READ} bytes.",
        ["path"],
        path={"type": "string", "description": "Relative to the workspace."},
        offset={"type": "integer", "minimum": 0, "description": "The byte to begin at, 0 by default."},
    ),
    _tool(
        "submit_score",
        "Submit the assessment, once, at the end.",
        ["score", "reason"],
        score={"type": "number", "minimum": 0, "maximum": 1},
        reason={"type": "string"},
    ),
]


class Reading:
    """Carries out the reading calls of one attempt. Unreadable if the workspace itself is gone."""

    def __init__(self, workspace: Path):
        self._workspace = workspace
        self._room = READ_IN_ALL

    async def results(self, functions: list[dict[str, Any]]) -> list[str]:
        """One text for each call of a turn; a fault is a text that begins with "Error"."""
        read = [await self._result(function) for function in functions[:CALLS]]
        return read + [f"Error: at most {CALLS} calls are carried out at a time"] * (len(functions) - CALLS)

    async def _result(self, function: dict[str, Any]) -> str:
        if self._room <= 0:
            return SPENT
        text = (await asyncio.to_thread(self._carried_out, function))[: self._room]
        self._room -= len(text)
        return text

    def _carried_out(self, function: dict[str, Any]) -> str:
        name, arguments = function["name"], parsed(function["arguments"])
        path, offset = arguments.get("path", ""), arguments.get("offset", 0)
        if not isinstance(path, str):
            return "Error: path must be text"
        if not isinstance(offset, int) or offset < 0:
            return "Error: offset must be a whole number, 0 or more"
        # Opened here and not once for all: a call that is given up goes on in its thread and must own what it uses.
        with Files.of(self._workspace) as files:
            try:
                if name == "list_files":
                    return _listing(*files.entries(path, LISTED))
                if name == "read_file":
                    return _text(*files.read(path, offset, READ), offset)
            except (Unreadable, OSError) as reason:
                return f"Error: {reason}"
        return f"Error: there is no tool {shown(name)}"


def _listing(entries: list[Entry], whole: bool) -> str:
    lines, room = [], READ
    for entry in entries:
        lines.append(_line(entry))
        room -= len(lines[-1])
        if room < 0:
            whole = False
            break
    if not whole:
        lines.append("... and more: list a folder of these")
    return "\n".join(lines) or "(empty)"


def _line(entry: Entry) -> str:
    path = entry.path if entry.path.isprintable() else repr(entry.path)
    match entry.kind:
        case "folder":
            return f"{path}/"
        case "file":
            return f"{path}  {entry.size}"
        case "link":
            return f"{path}  symbolic link to {entry.target!r}, not followed"
    return f"{path}  not a file"


def _text(content: bytes, size: int, offset: int) -> str:
    if not content:
        return f"(nothing from byte {offset} on: the file has {size} bytes)"
    if b"\0" in content:
        return f"(binary; the file has {size} bytes)"
    text = content.decode(errors="replace")
    end = offset + len(content)
    return text if end - offset == size else f"(bytes {offset} to {end} of {size})\n{text}"
