"""Owns what an answer's text means: reasoning, visible text, tool calls.

Invariants: nothing the model wrote is lost; a malformed call stays in the text, character for character. What
`Segmenter` lets out while the answer grows is a prefix of what `parse` finds in the whole.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from gyre_proxy.nesting import too_deep

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"

_BLOCK = re.compile(re.escape(OPEN_CALL) + r"(.*?)" + re.escape(CLOSE_CALL), re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parts of an answer; calls are (name, JSON text of an object)."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()


def hermes(block: str) -> tuple[str, str] | None:
    """(name, arguments) of one {"name": ..., "arguments": {...}} block, None when it is malformed."""
    try:
        call = json.loads(block)
        name, arguments = call["name"], call.get("arguments", {})
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return (name, text) if _encodable(name + text) and not too_deep(arguments) else None


TOOL_PARSERS: dict[str, Callable[[str], tuple[str, str] | None]] = {"hermes": hermes}


def parse(text: str, parser: str, in_reasoning: bool, with_tools: bool) -> Parsed:
    """The parts of a whole answer.

    `in_reasoning`: the prompt already opened the thinking block. `with_tools`: calls are looked for only when
    tools were offered.
    """
    reasoning, visible = _split_reasoning(text, in_reasoning)
    if not with_tools:
        return Parsed(reasoning, visible)
    pieces, calls, position = [], [], 0
    for found in _BLOCK.finditer(visible):
        call = TOOL_PARSERS[parser](found[1])
        if call is not None:
            pieces.append(visible[position : found.start()])
            calls.append(call)
            position = found.end()
    pieces.append(visible[position:])
    if not calls:
        return Parsed(reasoning, visible)
    kept = "".join(piece for piece in pieces if piece.strip())
    return Parsed(reasoning, kept.rstrip(), tuple(calls))


def _split_reasoning(text: str, in_reasoning: bool) -> tuple[str, str]:
    stripped = text.lstrip()
    if stripped.startswith(OPEN_THINK):
        stripped = stripped[len(OPEN_THINK) :]
    elif not in_reasoning:
        return "", text
    reasoning, closed, visible = stripped.partition(CLOSE_THINK)
    return reasoning.strip(), visible.lstrip("\n") if closed else ""


def _encodable(text: str) -> bool:
    """Whether the text has no lone surrogate, which JSON escapes can smuggle in and UTF-8 cannot carry."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


class Segmenter:
    """Splits growing text into pieces that are safe to send; holds back what a call or a tag might follow."""

    def __init__(self, in_reasoning: bool, with_tools: bool) -> None:
        self._state = "reasoning" if in_reasoning else "start"
        self._with_tools = with_tools
        self._buffer = ""
        self._fresh = True
        self._thought = in_reasoning
        self._may_open = True  # only one opening tag is structure; what follows is thinking

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Pieces ("reasoning" or "text", text) that the new text makes safe."""
        self._buffer += text
        out: list[tuple[str, str]] = []
        while self._advance(out):
            pass
        return out

    def _advance(self, out: list[tuple[str, str]]) -> bool:
        """One step; True when the state changed and the rest of the buffer wants another look."""
        if self._state == "start":
            return self._start()
        if self._state == "reasoning":
            return self._reasoning(out)
        if self._state == "text":
            self._text(out)
        return False

    def _start(self) -> bool:
        stripped = self._buffer.lstrip()
        if OPEN_THINK.startswith(stripped[: len(OPEN_THINK)]) and len(stripped) < len(OPEN_THINK):
            return False
        if stripped.startswith(OPEN_THINK):
            self._buffer = stripped[len(OPEN_THINK) :]
            self._state, self._thought, self._may_open = "reasoning", True, False
        else:
            self._state = "text"
        return True

    def _reasoning(self, out: list[tuple[str, str]]) -> bool:
        if self._fresh:
            self._buffer = self._buffer.lstrip()
            if self._may_open:
                if OPEN_THINK.startswith(self._buffer):
                    return False
                self._buffer = self._buffer.removeprefix(OPEN_THINK).lstrip()
                self._may_open = False
        head, closed, tail = self._buffer.partition(CLOSE_THINK)
        safe = head.rstrip() if closed else _safe(head, CLOSE_THINK)
        if safe:
            out.append(("reasoning", safe))
            self._fresh = False
        self._buffer = tail if closed else self._buffer[len(safe) :]
        if closed:
            self._state, self._fresh = "text", True
        return bool(closed)

    def _text(self, out: list[tuple[str, str]]) -> None:
        if self._fresh and self._thought:
            self._buffer = self._buffer.lstrip("\n")
        head, found, _ = self._buffer.partition(OPEN_CALL) if self._with_tools else (self._buffer, "", "")
        safe = head.rstrip() if found else _safe(head, OPEN_CALL if self._with_tools else "")
        if safe:
            out.append(("text", safe))
            self._fresh = False
        self._buffer = self._buffer[len(safe) :]
        if found:
            self._state = "held"


def _safe(text: str, tag: str) -> str:
    """The text without white space at its end and without what may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            text = text[:-length]
            break
    return text.rstrip()
