"""Owns what an answer's text means: reasoning, visible text, tool calls.

Pure. Invariants: nothing the model wrote is lost; a malformed call stays in the text, character for character; calls
inside of thinking are thinking. What `Segmenter` lets out while the answer grows is a prefix of what `parse` finds in
the whole.
"""

from dataclasses import dataclass, field

from gyre_proxy.tool_formats import TOOL_PARSERS, Block, Call, ToolFormat, beginning
from gyre_proxy.tool_types import Types, tool_types

__all__ = [
    "REASONINGS",
    "TOOL_PARSERS",
    "AnswerFormat",
    "Parsed",
    "Reasoning",
    "Segmenter",
    "parse",
    "tool_types",
]

MALFORMED = 64
"""Malformed calls after which no more are looked for: each may cost a pass over the answer."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags around a model's thinking."""

    opening: str
    closing: str


REASONINGS = (Reasoning("<think>", "</think>"), Reasoning("<|channel>thought\n", "<channel|>"))


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes an answer."""

    reasoning: Reasoning | None = None
    """None: it does not think aloud, all is text."""
    in_reasoning: bool = False
    """The prompt already opened the thinking."""
    tools: ToolFormat | None = None
    """None: tool calls are not looked for."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parts of an answer."""

    reasoning: str
    text: str
    calls: tuple[Call, ...] = ()
    malformed: int = field(default=0, compare=False)
    """Beginnings of calls that could not be read; they are in the text."""


def parse(text: str, form: AnswerFormat, types: Types | None) -> Parsed:
    """The parts of a whole answer. `types`: those of the tools on offer; None when there were none, then calls are text."""
    reasoning, visible = _split_reasoning(text, form)
    if types is None or form.tools is None:
        return Parsed(reasoning, visible)
    pieces: list[str] = []
    calls: list[Call] = []
    end = 0
    blocks, malformed = _blocks(visible, form.tools, types)
    for start, block in blocks:
        pieces.append(visible[end:start])
        calls += block.calls
        end = block.end
    if not calls:
        return Parsed(reasoning, visible, (), malformed)
    pieces.append(visible[end:])
    kept = "".join(piece for piece in pieces if piece.strip())
    return Parsed(reasoning, kept.rstrip(), tuple(calls), malformed)


def _blocks(text: str, form: ToolFormat, types: Types) -> tuple[list[tuple[int, Block]], int]:
    """(start, block) of each well-formed block of calls, and how many are malformed.

    A malformed one hides none after or inside of it.
    """
    out: list[tuple[int, Block]] = []
    position = malformed = 0
    while malformed < MALFORMED and (start := form.begin(text, position, position == 0)) >= 0:
        block = form.read(text, start, types)
        if block is None:
            malformed += 1
            position = start + 1
        else:
            out.append((start, block))
            position = block.end
    return out, malformed


def _split_reasoning(text: str, form: AnswerFormat) -> tuple[str, str]:
    if form.reasoning is None:
        return "", text
    stripped = text.lstrip()
    if stripped.startswith(form.reasoning.opening):
        stripped = stripped[len(form.reasoning.opening) :]
    elif not form.in_reasoning:
        return "", text
    reasoning, closed, visible = stripped.partition(form.reasoning.closing)
    return reasoning.strip(), visible.lstrip("\n") if closed else ""


class Segmenter:
    """Splits growing text into pieces that are safe to send; holds back what a call or a tag might follow."""

    def __init__(self, form: AnswerFormat, with_tools: bool) -> None:
        self._reasoning_tags = form.reasoning or Reasoning("", "")
        if form.reasoning is None:
            self._state = "text"
        else:
            self._state = "reasoning" if form.in_reasoning else "start"
        self._tools = form.tools if with_tools else None
        self._buffer = ""
        self._fresh = True
        self._thought = self._state == "reasoning"
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
        opening = self._reasoning_tags.opening
        stripped = self._buffer.lstrip()
        if len(stripped) < len(opening) and opening.startswith(stripped):
            return False
        if stripped.startswith(opening):
            self._buffer = stripped[len(opening) :]
            self._state, self._thought, self._may_open = "reasoning", True, False
        else:
            self._state = "text"
        return True

    def _reasoning(self, out: list[tuple[str, str]]) -> bool:
        opening, closing = self._reasoning_tags.opening, self._reasoning_tags.closing
        if self._fresh:
            self._buffer = self._buffer.lstrip()
            if self._may_open:
                if len(self._buffer) < len(opening) and opening.startswith(self._buffer):
                    return False
                self._buffer = self._buffer.removeprefix(opening).lstrip()
                self._may_open = False
        head, closed, tail = self._buffer.partition(closing)
        safe = (head if closed else head[: len(head) - beginning(head, closing)]).rstrip()
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
        held = len(self._buffer) if self._tools is None else self._tools.before(self._buffer, self._fresh)
        safe = self._buffer[:held].rstrip()
        if safe:
            out.append(("text", safe))
            self._fresh = False
        self._buffer = self._buffer[len(safe) :]
        if self._tools is not None and self._tools.begin(self._buffer, 0, self._fresh) >= 0:
            self._state = "held"
