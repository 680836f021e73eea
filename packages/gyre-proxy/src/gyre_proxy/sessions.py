"""Owns what is known of one execution: its recorded calls as nodes, and which node a new request extends.

Invariants: a request attaches to the deepest node whose whole conversation (tools, messages, answer) is a
prefix of the request's, compared by meaning (paper 5.1): tool calls by their recorded payload, calls and results
of one turn in any order, assistant text without white space at its ends, thinking ignored. Only `remember`
changes what is recorded, and only after the call is durable. The cost of a match is one pass over the request,
less where it repeats one of the last ones; the memory of a session is its tokens and the text of those requests.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_

import numpy as np
import orjson

from gyre_proxy.conversation import Conversation, Message, ToolCall
from gyre_proxy.dialects.readings import Readings

WALKS = 4
"""Ways that are kept: agents of one execution speak in turns."""

HEADS = 8
"""Roots whose tools and system prompt are kept to explain the next root."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One recorded call."""

    id: str
    parent: "Node | None"
    ids: np.ndarray
    """int32 [n]: input tokens after the parent's path, then the output tokens."""
    json: bytes
    """`ids` as JSON without brackets: a path goes to an engine with every turn, and is written out only once."""
    length: int
    """Tokens of the whole path."""
    call_ids: tuple[str, ...]
    reasoning: str

    def path(self) -> "list[Node]":
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_tokens(self) -> np.ndarray:
        """int32 [length]: every token from the root to the end of this node's output."""
        return np.concatenate([node.ids for node in self.path()])


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a call asks an engine: a recorded path, reused as it is, and the tokens after it."""

    parent: Node | None
    new: np.ndarray
    """int32 [n]: tokens after the parent's path; the whole prompt without a parent."""
    prefill_length: int = 0
    """How many of them, the last ones, are the beginning of the answer (prefill, a forced tool call)."""

    @property
    def question(self) -> np.ndarray:
        """int32 [n - prefill_length]: the new tokens that the answer, its beginning included, comes after."""
        return self.new[: len(self.new) - self.prefill_length]

    @property
    def prefill(self) -> np.ndarray:
        """int32 [prefill_length]: the beginning of the answer."""
        return self.new[len(self.new) - self.prefill_length :]

    def __len__(self) -> int:
        return len(self.new) + (self.parent.length if self.parent else 0)

    def json(self, more: Sequence[int]) -> bytes:
        """The tokens of the prompt and `more` as one JSON list."""
        parts = [node.json for node in self.parent.path()] if self.parent else []
        parts += [ids_json(ids) for ids in (self.new, np.asarray(more, np.int32)) if len(ids)]
        return b"[" + b",".join(parts) + b"]"


def ids_json(ids: np.ndarray) -> bytes:
    """Token ids as JSON without brackets."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request attaches."""

    node: Node | None
    messages: tuple[Message, ...]
    """All messages of the request, payloads restored."""
    known: int
    """Messages up to and including the node's answer; 0 without a node."""
    digest: bytes
    """Identity of the whole prompt: equal digests ask the model the same."""
    tools: str | None
    """Digest of the tool list, None when there are no tools."""
    offer: str
    """Identity of what the template gets beside messages: tools and arguments."""
    running: "hashlib._Hash"
    """The hash of the prompt, to be continued with the answer."""
    way: "hashlib._Hash"
    """The hash up to the node's answer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
    """How a request that found a node came there, so that the next one need not go the same way again."""

    offer: str
    given: tuple[Message, ...]
    """Its messages up to the node's answer, as they were sent."""
    messages: tuple[Message, ...]
    """The same, payloads restored."""
    running: "hashlib._Hash"
    """Their hash."""

    def leads(self, offer: str, given: tuple[Message, ...]) -> bool:
        return self.offer == offer and given[: len(self.given)] == self.given


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A recorded answer with tool calls, as requests may repeat it."""

    prompt: bytes
    """Identity of what it answered."""
    ids: frozenset[str]
    text: str
    meaning: bytes


@dataclass(slots=True, eq=False)
class Session:
    """The recorded calls of one execution."""

    execution: str
    deadline: float | None = None
    """Unix seconds after which no call may run."""
    calls: int = 0
    in_flight: int = 0
    used: float = 0.0
    """Unix seconds of the last request."""
    closed: bool = False
    readings: Readings = field(default_factory=Readings)
    """What was read of its last requests."""
    _nodes: dict[bytes, list[Node]] = field(default_factory=dict)
    _payloads: dict[str, tuple[ToolCall, bytes, str]] = field(default_factory=dict)
    """Recorded tool calls by id, each with its meaning and the id of the call that made it."""
    _turns: dict[str, _Turn] = field(default_factory=dict)
    """Recorded answers with tool calls, by the id of their call."""
    _failed: dict[bytes, str] = field(default_factory=dict)
    _extended: set[str] = field(default_factory=set)
    """Calls that others extend."""
    _heads: "OrderedDict[tuple[str, Message | None], None]" = field(default_factory=OrderedDict)
    """Offers and system prompts of the last roots, to tell why a new one is none of them."""
    _tool_lists: list[tuple[tuple[dict, ...], str]] = field(default_factory=list)
    _walks: list[_Walk] = field(default_factory=list)
    """Of the agents that spoke last, the latest first."""

    def match(self, conversation: Conversation) -> Match:
        """The deepest recorded node that the conversation extends."""
        tools = self._tools_digest(conversation.tools) if conversation.tools else None
        offer = tools or ""
        if conversation.template_arguments:
            offer += orjson.dumps(conversation.template_arguments, option=orjson.OPT_SORT_KEYS).decode()
        found = self._find(offer, tools, conversation.messages)
        if found.node is not None:
            given = conversation.messages[: found.known]
            walk = _Walk(offer, given, found.messages[: found.known], found.way)
            others = [w for w in self._walks if not w.leads(offer, given)]
            self._walks = [walk, *others][:WALKS]
        return found

    def _find(self, offer: str, tools: str | None, given: tuple[Message, ...]) -> Match:
        start = _Walk(offer, (), (), hashlib.blake2b(_bytes(offer), digest_size=16))
        known_ways = (w for w in self._walks if w.leads(offer, given))
        walk = max(known_ways, key=lambda w: len(w.given), default=start)
        end, way = len(walk.given), walk.running
        messages = walk.messages + tuple(self._restore(m) for m in given[end:])
        running = way.copy()
        nodes = self._nodes.get(running.digest(), [])
        first = end
        while first < len(messages):
            last = self._take(running, messages, first)
            if messages[first].role == "assistant" and (known := self._nodes.get(running.digest())):
                nodes, end, way = known, last, running.copy()
            first = last
        if not nodes:
            return Match(None, messages, 0, running.digest(), tools, offer, running, way)
        node = _closest(nodes, messages[end - 1])
        return Match(node, messages, end, running.digest(), tools, offer, running, way)

    def _take(self, running: "hashlib._Hash", messages: tuple[Message, ...], first: int) -> int:
        """Hash the unit of comparison that begins at `first`; returns where it ends.

        A unit is a message, a run of tool results, or what the call ids say is a recorded turn.
        """
        if messages[first].role == "assistant":
            last, meaning = self._repeated(messages, first, running.digest())
            running.update(meaning if meaning else self._meaning(messages[first]))
            return last
        last = first + 1
        if messages[first].role == "tool":
            while last < len(messages) and messages[last].role == "tool":
                last += 1
        self._update(running, messages[first:last])
        return last

    def _repeated(self, messages: tuple[Message, ...], first: int, prompt: bytes) -> tuple[int, bytes]:
        """(end, meaning) of the recorded turn that the messages repeat; (first + 1, b"") when they repeat none.

        Its ids say which it is, in any order, with its text beside them or in messages of its own before them. A turn
        whose text is another or missing was rewritten: forks do that, and it is another context.
        """
        text = ""
        for last, message in enumerate(messages[first:], first + 1):
            if message.role != "assistant":
                break
            text += message.text
            if message.tool_calls:
                recorded = self._payloads.get(message.tool_calls[0].id)
                turn = self._turns.get(recorded[2]) if recorded else None
                ids = {call.id for call in message.tool_calls}
                if turn and turn.prompt == prompt and turn.ids == ids and text.strip() == turn.text:
                    return last, turn.meaning
                break
        return first + 1, b""

    def attachment(self, match: Match, parent: Node | None) -> str:
        """How a call attaches, in one word for people who wonder about their trees; notes it for the next one.

        "extended", or "branched" where the parent was extended before; for a root the reason: "first", other
        "tools" (or template arguments) or another "system" prompt than a context that it otherwise extends,
        "rendering" where the template rewrote the past, else "history".
        """
        if parent is not None:
            seen = parent.id in self._extended
            self._extended.add(parent.id)
            return "branched" if seen else "extended"
        cause = "rendering" if match.node is not None else self._root_cause(match)
        head = match.messages[0] if match.messages[0].role == "system" else None
        self._heads[match.offer, head] = None
        self._heads.move_to_end((match.offer, head))
        while len(self._heads) > HEADS:
            self._heads.popitem(last=False)
        return cause

    def _root_cause(self, match: Match) -> str:
        if not self._nodes:
            return "first"
        given = match.messages
        for offer, head in reversed(self._heads):
            if offer != match.offer and self._find(offer, None, given).node is not None:
                return "tools"
            headed = given[0].role == "system" and head not in (None, given[0])
            if headed and self._find(match.offer, None, (head, *given[1:])).node is not None:
                return "system"
        return "history"

    def context(self, match: Match, answer: Message) -> bytes:
        """Identity of a prompt and its answer: what a request must begin with to extend that call."""
        running = match.running.copy()
        self._update(running, (answer,))
        return running.digest()

    def remember(
        self,
        call_id: str,
        prompt: bytes,
        context: bytes,
        node: Node | None,
        tool_calls: Sequence[ToolCall],
        failed: bool,
        text: str = "",
    ) -> None:
        """Know a durable call that answered with `text` and `tool_calls`, by the identity of its `prompt` and its `context`.

        Its node, when it has output, can be extended by later requests.
        """
        self.calls += 1
        if failed:
            self._failed[prompt] = call_id
        elif self._failed.get(prompt) != call_id:
            self._failed.pop(prompt, None)
        if node is not None:
            self._payloads.update((call.id, (call, _call_meaning(call), call_id)) for call in tool_calls)
            self._nodes.setdefault(context, []).append(node)
            if tool_calls:
                meaning = self._meaning(Message("assistant", text, tool_calls=tuple(tool_calls)))
                ids = frozenset(call.id for call in tool_calls)
                self._turns[call_id] = _Turn(prompt, ids, text.strip(), meaning)

    def note_failed(self, prompt: bytes, call_id: str) -> None:
        """Know an attempt whose answer reaches nobody, also before it is recorded."""
        self._failed[prompt] = call_id

    def failed_attempt(self, digest: bytes) -> str | None:
        """Call id of the last failed attempt at the same prompt, None when there is none."""
        return self._failed.get(digest)

    def echoes(self, messages: Iterable[Message]) -> list[str]:
        """Ids of the recorded calls whose tool calls the messages repeat, in their order, each once."""
        made = (
            self._payloads[call.id][2] for m in messages for call in m.tool_calls if call.id in self._payloads
        )
        return list(dict.fromkeys(made))

    def _tools_digest(self, tools: tuple[dict, ...]) -> str:
        """`tools_digest`, looked up for the lists of the last requests: they are long, and of the same objects."""
        for known, digest in self._tool_lists:
            if len(known) == len(tools) and all(map(is_, known, tools)):
                return digest
        digest = tools_digest(tools)
        self._tool_lists = [(tools, digest), *self._tool_lists][:WALKS]
        return digest

    def _restore(self, message: Message) -> Message:
        """The message with recorded tool-call payloads under the incoming ids."""
        if not message.tool_calls or not any(call.id in self._payloads for call in message.tool_calls):
            return message
        calls = tuple(
            self._payloads[call.id][0] if call.id in self._payloads else call for call in message.tool_calls
        )
        return Message(message.role, message.text, message.reasoning, calls)

    def _update(self, running: "hashlib._Hash", messages: Sequence[Message]) -> None:
        if len(messages) > 1:
            messages = sorted(messages, key=lambda m: m.call_id)
        for message in messages:
            running.update(self._meaning(message))

    def _meaning(self, message: Message) -> bytes:
        """What two messages of equal meaning have in common; no other message's bytes begin with these."""
        text = message.text.strip() if message.role == "assistant" else message.text
        parts = [message.role.encode(), _bytes(text), _bytes(message.call_id)]
        for call in message.tool_calls:
            recorded = self._payloads.get(call.id)
            parts.append(recorded[1] if recorded else _call_meaning(call))
        return _joined(parts)


def tools_digest(tools: Sequence[dict]) -> str:
    """Short digest of a tool list; the order of keys does not matter, the order of tools does."""
    return hashlib.blake2b(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def text_digest(text: str) -> str:
    """Short digest of a text."""
    return hashlib.blake2b(_bytes(text), digest_size=8).hexdigest()


def _call_meaning(call: ToolCall) -> bytes:
    value = call.parsed()
    arguments = _bytes(value) if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return _joined((_bytes(call.name), arguments))


def _joined(parts: Sequence[bytes]) -> bytes:
    """The parts and their lengths."""
    return b"%s:%s" % (",".join([str(len(part)) for part in parts]).encode(), b"".join(parts))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _closest(nodes: list[Node], message: Message) -> Node:
    """Among answers of equal meaning the one with these call ids, else this thinking, else the last."""
    ids = tuple(call.id for call in message.tool_calls)
    reasoning = message.reasoning.strip()
    same_ids = [node for node in nodes if node.call_ids == ids]
    same_thinking = [node for node in same_ids if node.reasoning == reasoning]
    return (same_thinking or same_ids or nodes)[-1]
