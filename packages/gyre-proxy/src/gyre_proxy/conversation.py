"""Owns the neutral form of a chat: what every dialect parses into and what the chat template renders.

Invariant: two requests that mean the same to the model have equal conversations, whatever their bytes
(string or list content, cache marks, volatile ids). Values only, no I/O.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

import orjson

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls"]


TEMPLATE_OWN = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now")
)
"""What the proxy itself gives a chat template; template arguments cannot."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an assistant message."""

    id: str
    name: str
    arguments: str
    """JSON text as the client gave it or the model's arguments re-serialised; not necessarily an object."""

    def parsed(self) -> object:
        """The arguments as a JSON value; the text itself when it is not JSON."""
        try:
            return orjson.loads(self.arguments) if self.arguments else {}
        except orjson.JSONDecodeError:
            return self.arguments


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `call_id` is set for role "tool" only; `tool_calls` and `reasoning` for "assistant" only.
    """

    role: Role
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order and the tools on offer, in the shape {"type": "function", "function": {...}}."""

    messages: tuple[Message, ...]
    tools: tuple[dict, ...] = ()
    """Tools on offer from the start: what the template shows as its tool list."""
    loaded: tuple[dict, ...] = ()
    """Tools that a message offers where it stands, as text; they may be called, and are in no tool list."""
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    """What the client gives the chat template beside messages and tools (enable_thinking, ...)."""

    @property
    def offered(self) -> tuple[dict, ...]:
        """Every tool that the answer may call."""
        return self.tools + self.loaded


@dataclass(frozen=True, slots=True)
class Request:
    """One parsed request: the conversation and how the client wants its answer."""

    conversation: Conversation
    model: str
    stream: bool
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    asked: Mapping[str, object] = field(default_factory=dict)
    """What the client says of sampling and thinking. The proxy owns both: it is recorded, not obeyed."""
    include_usage: bool = False
    echoed: Mapping[str, object] = field(default_factory=dict)
    """What the Responses protocol repeats of a request in its answer."""
    tool_kinds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tool name -> how the Responses dialect must name it in answers (namespace, custom, search)."""
    images: int = 0
    """Images of the conversation. The model sees a line of text in the place of each."""
    prefill: str = ""
    """The first words of the answer, which the client wrote; not part of the conversation."""
    forced: str | None = None
    """The tool that the answer must call, "" when it may choose which, None when it need not call any."""
    schema: Mapping[str, object] | None = None
    """JSON schema that the answer's text must satisfy, None when any text will do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer, ready for any dialect."""

    id: str
    """Call id; dialects derive message and item ids from it, so they are unique for each answer."""
    created: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    stop_string: str | None = None
    """The client's stop string that ended the answer; it is in the tokens, not in the text."""
    reused_tokens: int = 0
    """How many of the prompt tokens are those of a recorded path."""
    reasoning_tokens: int = 0
    """How many of the completion tokens are thinking; 0 also where the tokens do not tell."""
    malformed: int = 0
    """Tool calls in the text that could not be read."""
    prefilled: int = 0
    """Characters of the text that the client wrote itself and does not get again."""


def texts(messages: Iterable[Message], tools: Iterable[dict] = ()) -> Iterator[str]:
    """Every string that a chat template could show of messages and tools, keys of objects included."""
    for message in messages:
        yield message.text
        yield message.reasoning
        yield message.call_id
        for call in message.tool_calls:
            yield call.id
            yield call.name
            yield from strings(call.parsed())
    yield from strings(list(tools))


def strings(value: object, keys: bool = True) -> Iterator[str]:
    """Every string inside a JSON value, `keys` of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner, keys)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if keys:
                yield key
            yield from strings(inner, keys)


def as_read(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages as a model reads them.

    The run of system messages at the start is one, joined by blank lines. An assistant's message that says nothing,
    with another one behind it or with nothing, is what a harness kept of an answer that was cut while the model was
    thinking: it is left out.
    """
    kept = [
        message
        for message, following in zip_longest(messages, messages[1:])
        if message.role != "assistant"
        or message.text
        or message.tool_calls
        or not (following is None or following.role == "assistant")
    ] or list(messages[-1:])
    count = 0
    while count < len(kept) and kept[count].role == "system":
        count += 1
    if count < 2:
        return tuple(kept)
    head = Message("system", "\n\n".join(m.text for m in kept[:count]))
    return (head, *kept[count:])
