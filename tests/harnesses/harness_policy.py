"""Owns the model of these tests: it reads its prompt and answers as a script foresees for whoever asks.

Invariant: an answer depends on nothing but the prompt, so concurrent requests may come in any order, a repeated request gets
the same answer, and one that goes on elsewhere is finished with the words it was begun with. Progress is read from marks
such as "main.2" (step 2 of the actor "main" is done) that each answer leaves in its text or in the arguments of its calls.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

FINAL = "FINAL-ANSWER"
"""In the last words of the main agent."""

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_ACTOR = re.compile(r"actor-(\w+)")


@dataclass(frozen=True)
class Turn:
    """One message of a prompt; `role` "tool" for results, which the template shows as a user's."""

    role: str
    text: str


def turns(prompt: str) -> list[Turn]:
    """The messages of a rendered prompt."""
    found = [Turn(role, text) for role, text in _TURN.findall(prompt)]
    return [Turn("tool", t.text) if t.text.lstrip().startswith("<tool_response>") else t for t in found]


@dataclass(frozen=True)
class Use:
    """One tool call of an answer."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class Step:
    """One answer. A step without text must leave its mark in the arguments of a call."""

    text: str = ""
    uses: Sequence[Use | Callable[[str], Use]] = ()
    """A tool call, or how it is made from the rendered prompt."""
    thinking: str = ""
    shows: Sequence[str] = ()
    """What the answer's tools must bring into the next prompt of its conversation."""

    def spoken(self, mark: str, prompt: str) -> str:
        """What the model samples."""
        uses = [use if isinstance(use, Use) else use(prompt) for use in self.uses]
        calls = [
            f"<tool_call>\n{json.dumps({'name': u.name, 'arguments': u.arguments})}\n</tool_call>"
            for u in uses
        ]
        text = f"{self.text} ({mark})" if self.text else ""
        said = "\n".join(filter(None, [text, *calls]))
        assert mark in said, f"step {mark} leaves no mark"
        return f"<think>\n{self.thinking}\n</think>\n\n{said}" if self.thinking else said


@dataclass(frozen=True)
class Script:
    """What each actor does, step by step, and what tells the harness's own requests."""

    steps: Mapping[str, Sequence[Step]]
    summary_request: str
    """Pattern in the last user message of a request for a summary of the conversation."""
    title_request: str
    """Pattern in the system message of a request for a title."""
    asides: Mapping[str, str] = field(default_factory=dict)
    """Mark -> role of the harness's own requests in every run."""

    def answer(self, prompt: str) -> tuple[str, str]:
        """(mark, what the model samples) for a rendered prompt; "summary" and "title" are marks too.

        Raises LookupError for a prompt that the script does not foresee.
        """
        found = turns(prompt)
        if found[0].role == "system" and re.search(self.title_request, found[0].text):
            return "title", "A scripted title"
        said = [turn.text for turn in found if turn.role == "user"]
        if re.search(self.summary_request, said[-1]):
            actor = self._actor(said) or "main"
            return "summary", _summary(actor, _done(prompt, actor))
        # After a compaction it can be the model's own summary that names somebody, and nobody else.
        actor = self._actor(said) or self._actor([turn.text for turn in found if turn.role == "assistant"])
        if actor is None:
            raise LookupError(f"nobody names an actor: {[text[:200] for text in said]}")
        number = _done(prompt, actor) + 1
        if number > len(self.steps[actor]):
            raise LookupError(f"{actor} has no step {number}; the last message is {said[-1][:500]!r}")
        mark = f"{actor}.{number}"
        return mark, self.steps[actor][number - 1].spoken(mark, prompt)

    def _actor(self, said: Sequence[str]) -> str | None:
        """Whom the messages named last."""
        names = [name for text in said for name in _ACTOR.findall(text) if name in self.steps]
        return names[-1] if names else None


def _done(prompt: str, actor: str) -> int:
    marks = re.findall(rf"\b{actor}\.(\d+)\b", prompt)
    return max(map(int, marks), default=0)


def _summary(actor: str, done: int) -> str:
    told = f"The task of actor-{actor} goes on; its last step was ({actor}.{done})."
    return f"<analysis>\nShort.\n</analysis>\n<summary>\n{told}\n</summary>\n<state_snapshot>\n{told}\n</state_snapshot>"
