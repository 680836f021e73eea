"""Owns what a record says beside the tokens: evidence for role inference, hints from headers.

Pure. Hints are what harnesses send about sessions and agents; they are recorded, never trusted for the tree.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import orjson
from gyre_trajtree.evidence import plain

from gyre_proxy.conversation import Message, ToolCall, strings
from gyre_proxy.sessions import Match, text_digest

TEXT_LIMIT = 2000
OPENING_TEXT, OPENING_LIMIT = 1000, 8000
READ_LIMIT = 1 << 16
"""Characters of a message that are looked at: reminders before the text can be long, tool output pasted by users longer."""
SPAWN_MINIMUM = 20
SPAWNING_TOOLS = frozenset(("task", "agent", "spawn_agent", "delegate"))

_HEADERS: tuple[tuple[bytes, str], ...] = (
    (b"x-claude-code-session-id", "session"),
    (b"x-claude-code-agent-id", "agent"),
    (b"x-claude-code-parent-agent-id", "parent"),
    (b"session-id", "session"),
    (b"session_id", "session"),
    (b"thread-id", "agent"),
    (b"x-codex-window-id", "window"),
    (b"x-codex-parent-thread-id", "parent"),
    (b"x-openai-subagent", "subagent"),
    (b"x-session-id", "session"),
    (b"x-parent-session-id", "parent"),
)


def hints(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Session, agent, parent, window, subagent and kind, as far as the headers tell."""
    found = {
        name: headers[header].decode("latin-1")[:200] for header, name in _HEADERS if headers.get(header)
    }
    kind = _request_kind(headers.get(b"x-codex-turn-metadata"))
    return {**found, "kind": kind} if kind else found


def _request_kind(metadata: bytes | None) -> str | None:
    if not metadata:
        return None
    try:
        kind = orjson.loads(metadata).get("request_kind")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return kind[:200] if isinstance(kind, str) else None


def evidence(
    match: Match,
    parent: str | None,
    echoes: Sequence[str],
    text: str,
    calls: Sequence[ToolCall],
    kind: str | None,
) -> dict:
    """The `evidence` object of a call record: what was asked (`match`) under which node (`parent`), which
    recorded calls it repeats (`echoes`), and the text and tool calls that were answered.
    """
    messages = match.messages
    users = [m.text for m in messages if m.role == "user"]
    asked = users[-1:]
    if parent is None and echoes:
        # A copy of another context may be told what to do in several messages, behind the turns that it repeats.
        asked = _after_tools(messages) or asked
    found = {
        "system": text_digest(messages[0].text) if messages[0].role == "system" else None,
        "tools": match.tools,
        "last_user": _cut("\n".join(asked)) if users else None,
        "messages": len(messages),
        "spawns": [s for call in calls for s in _spawns(call)],
        "text": text[:TEXT_LIMIT],
        "tool_calls": len(calls),
        "kind": kind,
    }
    if parent is None:
        found["first_user"] = _cut(users[0]) if users else None
        found["opening"] = _opening(messages)
    if echoes:
        found["echoes"] = list(echoes)
    return found


def _after_tools(messages: Sequence[Message]) -> list[str]:
    """What users say after the last message that calls a tool or brings a result."""
    last = max(i for i, m in enumerate(messages) if m.role == "tool" or m.tool_calls)
    return [m.text for m in messages[last + 1 :] if m.role == "user"]


def _opening(messages: Sequence[Message]) -> str:
    """Beginnings of what users and assistants say in a prompt, a line each. Tool results tell nothing of whose it is."""
    said = (_plain(m.text[:READ_LIMIT])[:OPENING_TEXT] for m in messages if m.role in ("user", "assistant"))
    return "\n".join(filter(None, said))[:OPENING_LIMIT]


_plain = lru_cache(maxsize=64)(plain)
"""The last user text stays for many turns, and is long to read."""


def _cut(text: str) -> str:
    """What is left of a text without the reminders of harnesses, which can be longer than the limit."""
    return _plain(text[:READ_LIMIT])[:TEXT_LIMIT]


def _spawns(call: ToolCall) -> Iterator[str]:
    spawning = call.name.lower() in SPAWNING_TOOLS
    for text in strings(call.parsed(), keys=False):
        if spawning or SPAWN_MINIMUM <= len(text) <= TEXT_LIMIT:
            yield text[:TEXT_LIMIT]
