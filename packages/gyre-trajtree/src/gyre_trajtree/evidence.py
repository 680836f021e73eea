"""Owns what a call's record says of itself beside its tokens, prepared for comparison (docs/architecture.md).

Every reading is tolerant: a missing or odd entry reads as nothing recorded, since any project may write the
log. Texts are compared without the wrappers and spacing that harnesses change.
"""

import re
from functools import cached_property

from gyre_trajtree.records import Call

_WRAPPED = {
    f"</{name}>": re.compile(rf"<{name}>.*?</{name}>", re.DOTALL) for name in ("system-reminder", "analysis")
}
"""What harnesses wrap around text, by its closing mark."""
_MARKS = re.compile(r"</?summary>")


class Evidence:
    """The evidence of one call; "" , () or None where its writer recorded nothing."""

    def __init__(self, call: Call) -> None:
        self._raw = call.evidence
        self._hints = call.hints
        self._root = call.parent is None

    @property
    def recorded(self) -> bool:
        """Whether the writer recorded any."""
        return bool(self._raw)

    @property
    def setting(self) -> tuple[str, str]:
        """Digests of system text and tool list: what a harness fixes for one agent."""
        return self._text("system"), self._text("tools")

    @cached_property
    def first_user(self) -> str:
        """The first user message."""
        return plain(self._text("first_user"))

    @cached_property
    def last_user(self) -> str:
        """The last user message: what was asked, if it is not an earlier call's."""
        return plain(self._text("last_user"))

    @cached_property
    def opening(self) -> str:
        """What a root's prompt says beside its system text, as far as it was recorded."""
        if not self._root:
            return self.last_user
        parts = (plain(self._text("opening")), self.first_user, self.last_user)
        return " \n ".join(part for part in dict.fromkeys(parts) if part)

    @cached_property
    def text(self) -> str:
        """The visible text of the output."""
        return plain(self._text("text"))

    @cached_property
    def spawns(self) -> tuple[str, ...]:
        """Texts that the output gave to tools as arguments."""
        recorded = self._raw.get("spawns")
        texts = recorded if isinstance(recorded, list) else ()
        return tuple(filter(None, (plain(text) for text in texts if isinstance(text, str))))

    @property
    def tool_calls(self) -> int | None:
        """How many tools the output called."""
        count = self._raw.get("tool_calls")
        return count if isinstance(count, int) else 1 if self._raw.get("spawns") else None

    @property
    def echoes(self) -> tuple[str, ...]:
        """Ids of earlier calls whose tool calls the new input repeats outside the parent's path."""
        recorded = self._raw.get("echoes")
        return tuple(name for name in recorded if isinstance(name, str)) if isinstance(recorded, list) else ()

    @property
    def claim(self) -> str:
        """What the harness says the call is for, in lower case letters: a kind, or headers of sub-agents."""
        claim = (
            self._text("kind")
            or self._hints.get("subagent")
            or ("subagent" if self._hints.get("parent") else "")
        )
        return re.sub(r"[^a-z]", "", str(claim).lower())

    @property
    def names_sub_agent(self) -> bool:
        """Whether a header says that a sub-agent asks, whatever it calls that."""
        return bool(self._hints.get("subagent"))

    @property
    def agent(self) -> tuple[str, str]:
        """Session and agent that headers name."""
        return str(self._hints.get("session") or ""), str(self._hints.get("agent") or "")

    def _text(self, key: str) -> str:
        value = self._raw.get(key)
        return value if isinstance(value, str) else ""


def plain(text: str) -> str:
    """`text` without what harnesses wrap around it, with single spaces."""
    if "<" in text:
        for closing, pattern in _WRAPPED.items():
            # Nothing after the last closing mark is wrapped, and a search there would run to the end in vain.
            end = text.rfind(closing) + len(closing)
            if end >= len(closing):
                text = pattern.sub(" ", text[:end]) + text[end:]
        text = _MARKS.sub(" ", text)
    return " ".join(text.split())
