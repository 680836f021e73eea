"""Owns what a record says beside the tokens: evidence for role inference, hints from headers.

Pure. Hints are what harnesses send about sessions and agents; they are recorded, never trusted for the tree.
"""

from collections.abc import Iterator, Mapping, Sequence

import orjson

from gyre_proxy.conversation import Conversation, ToolCall
from gyre_proxy.sessions import text_digest

TEXT_LIMIT = 2000
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
    return kind if isinstance(kind, str) else None


def evidence(
    conversation: Conversation,
    tools: str | None,
    text: str,
    calls: Sequence[ToolCall],
    kind: str | None,
) -> dict:
    """The `evidence` object of a call record. `tools` is the digest of the tool list."""
    messages = conversation.messages
    users = [m.text for m in messages if m.role == "user"]
    return {
        "system": text_digest(messages[0].text) if messages[0].role == "system" else None,
        "tools": tools,
        "first_user": users[0][:TEXT_LIMIT] if users else None,
        "last_user": users[-1][:TEXT_LIMIT] if users else None,
        "messages": len(messages),
        "spawns": [s for call in calls for s in _spawns(call)],
        "text": text[:TEXT_LIMIT],
        "kind": kind,
    }


def _spawns(call: ToolCall) -> Iterator[str]:
    spawning = call.name.lower() in SPAWNING_TOOLS
    for text in _strings(call.parsed()):
        if spawning or SPAWN_MINIMUM <= len(text) <= TEXT_LIMIT:
            yield text[:TEXT_LIMIT]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
