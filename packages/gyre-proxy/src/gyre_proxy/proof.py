"""Owns the proof that a chat template's suffixes are stable, kind of message by kind of message.

The proof compares, on probe conversations, the text that follows an answer in the whole rendering with the rendering
of the new messages alone. Probes cover what templates are known to look back at: how many messages there were, whether
there were tools, calls or results before, the last question, the end of the list, the answer's own kind, and every word
that the template itself compares texts with (switches such as "/no_think"). Invariant: a kind of message is proved
only if no probe made of proved kinds fails.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from gyre_proxy.conversation import Message, Role, ToolCall
from gyre_proxy.errors import BadRequest
from gyre_proxy.template import ChatTemplate

WORDS = 64
"""Words of a template that are tried."""

_END = "lastwordoftheanswer"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "d",
        "parameters": {"type": "object", "properties": {"k": {"type": "string", "description": "d"}}},
    },
}

_KINDS: tuple[tuple[Role, str], ...] = (
    ("assistant", "turns of an assistant that were not sampled here"),
    ("system", "system messages in mid-conversation"),
    ("tool", "tool results"),
    ("user", "user messages"),
)
"""In the order in which a proof gives them up."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a template's suffixes."""

    roles: frozenset[Role]
    """New messages of these roles may be rendered alone."""
    reason: str | None
    """Why others may not, None when there are none."""
    suffixes: tuple[str, ...]
    """Suffixes of the proved probes; the first is that of a user message."""


def prove(template: ChatTemplate) -> Proof:
    """Try every probe, then keep the most kinds that go together."""
    template = template.at(datetime.now())
    failures: list[tuple[frozenset[Role], str]] = []
    suffixes: list[tuple[frozenset[Role], str]] = []
    news = {name: (new, _suffix(template, new)) for name, new in _NEW.items()}
    for new, suffix in news.values():
        if isinstance(suffix, str):
            suffixes.append((roles_of(new), suffix))
    for history_name, history in _HISTORIES.items():
        for tools in ((), (_TOOL,)):
            name = history_name + (" with tools on offer" if tools else "")
            failures += _failures(template, name, history, tools, news)
    brief = {name: news[name] for name in ("a user message", "a tool result")}
    for word in template.words()[:WORDS]:
        for history_name, history in _worded(word).items():
            failures += _failures(template, history_name, history, (), brief)
    roles = next(
        (kinds for kinds in _choices() if not any(failed <= kinds for failed, _ in failures)), frozenset()
    )
    proved = tuple(text for kinds, text in suffixes if kinds <= roles)
    return Proof(roles, _reason(roles, failures), proved)


def _choices() -> Iterator[frozenset[Role]]:
    """Sets of kinds that hold "user", the preferred ones first."""
    names = [role for role, _ in _KINDS[:-1]]
    masks = sorted(range(1 << len(names)), key=lambda mask: (mask.bit_count(), mask))
    for mask in masks:
        yield frozenset(("user", *(name for i, name in enumerate(names) if not mask >> i & 1)))


def _reason(roles: frozenset[Role], failures: Sequence[tuple[frozenset[Role], str]]) -> str | None:
    if not failures:
        return None
    if not roles:
        return next(line for kinds, line in failures if kinds == {"user"})
    missing = ", ".join(words for role, words in _KINDS if role not in roles)
    line = min(failures, key=lambda failure: len(failure[0] - roles))[1]
    return f"requests with {missing} are encoded whole: {line}"


def _suffix(template: ChatTemplate, new: Sequence[Message]) -> str | BadRequest:
    try:
        return template.suffix(new)
    except BadRequest as refusal:
        return refusal


def _failures(
    template: ChatTemplate,
    history_name: str,
    history: Sequence[Message],
    tools: Sequence[dict],
    news: dict[str, tuple[tuple[Message, ...], str | BadRequest]],
) -> list[tuple[frozenset[Role], str]]:
    """(roles of the new messages, what differs) for each probe that fails after one history."""
    if template.form.single_calls and any(len(m.tool_calls) > 1 for m in history):
        return []
    calls = {call.id for call in history[-1].tool_calls}
    failed: list[tuple[frozenset[Role], str]] = []
    accepted, leads = 0, {}
    for name, (new, suffix) in news.items():
        if new[:1] and new[0].role == "tool" and not calls:
            continue  # a result without a call
        where = f"{name} after {history_name}"
        try:
            full = template.render((*history, *new), tools)
        except BadRequest as refusal:
            if isinstance(suffix, str):
                failed.append((roles_of(new), f"{where}: {refusal}"))
            continue
        accepted += 1
        if isinstance(suffix, BadRequest):
            failed.append((roles_of(new), f"{where}: {suffix}"))
            continue
        _, end, rest = full.rpartition(_END)
        rest = rest if end else full
        if not suffix or not rest.endswith(suffix):
            failed.append((roles_of(new), f"{where}: {_difference(rest, suffix)}"))
        elif end:
            leads.setdefault(rest[: len(rest) - len(suffix)], (new, where))
    if not accepted:
        return []  # such a conversation never gets here
    plain = not calls and bool(history[-1].text)
    for lead, (new, where) in leads.items():
        if (plain and lead) or len(leads) > 1:
            words = f"{where}: between the answer and the new messages the template writes {lead[-60:]!r}"
            failed.append((roles_of(new), words if lead else f"{words}, elsewhere more"))
    return failed


def _difference(whole: str, suffix: str) -> str:
    """Where two texts that should end alike differ, seen from the end."""
    if not suffix:
        return "the template does not show the answer"
    same = 0
    while same < min(len(whole), len(suffix)) and whole[-1 - same] == suffix[-1 - same]:
        same += 1
    got, alone = (text[max(0, len(text) - same - 40) : len(text) - same + 20] for text in (whole, suffix))
    return f"the whole rendering has {got!r} where the new messages alone give {alone!r}"


def roles_of(messages: Sequence[Message]) -> frozenset[Role]:
    """The kinds of new messages; none at all ask for a turn after a turn, as an assistant's own do."""
    return frozenset(message.role for message in messages) or frozenset(("assistant",))


def _call(text: str, *values: str, reasoning: str = "") -> Message:
    calls = tuple(
        ToolCall(f"callprob{i}", f"probe{i}", f'{{"k": "{value}"}}') for i, value in enumerate(values)
    )
    return Message("assistant", text, reasoning, calls)


def _worded(word: str) -> dict[str, tuple[Message, ...]]:
    """Conversations in which a word stands where the template may look for it."""
    said = Message("assistant", _END)
    return {
        f"a system prompt with {word!r}": (Message("system", word), _USER, said),
        f"a question with {word!r}": (Message("user", word), said),
        f"an answer with {word!r}": (_USER, Message("assistant", word), _USER, _call("t", _END)),
    }


_USER = Message("user", "hello")
_SAID = Message("assistant", "a")
_FIRST = Message("tool", "result", call_id="callprob0")
_SECOND = Message("tool", " another\n", call_id="callprob1")
_LATE = Message("system", "late")
_HISTORIES = {
    "one turn": (_USER, Message("assistant", _END)),
    "a system prompt and a turn": (Message("system", "s"), _USER, Message("assistant", _END)),
    "an empty answer": (_USER, Message("assistant", "")),
    "a thought": (_USER, Message("assistant", _END, "thought")),
    "a tool call": (_USER, _call("", _END)),
    "a system prompt and a tool call": (Message("system", "s"), _USER, _call("t", _END)),
    "a thought and two tool calls": (_USER, _call("t", "x", _END, reasoning="thought")),
    "two rounds of tools": (
        _USER,
        _call("", "x"),
        _FIRST,
        _call("", "y", reasoning="thought"),
        _FIRST,
        _call("", _END),
    ),
    "a turn after tools": (_USER, _call("t", "x"), _FIRST, Message("assistant", _END, "thought")),
    "three turns": (_USER, _SAID, _USER, _call("t", "x"), _FIRST, _SAID, _USER, Message("assistant", _END)),
    "a late system message": (Message("system", "s"), _USER, _SAID, _LATE, _USER, Message("assistant", _END)),
}
_NEW = {
    "a user message": (_USER,),
    "a user message with white space": (Message("user", "\n hello \n"),),
    "two user messages": (_USER, Message("user", "again")),
    "a tool result": (_FIRST,),
    "two tool results": (_FIRST, _SECOND),
    "two tool results and a user message": (_FIRST, _SECOND, _USER),
    "a system message": (_LATE,),
    "a system message and a user message": (_LATE, _USER),
    "a tool result and a system message": (_FIRST, _LATE),
    "no message": (),
    "a foreign turn": (_USER, Message("assistant", "other", "thought"), _USER),
    "a foreign tool call": (_USER, _call("t", "z", reasoning="thought"), _FIRST),
    "a foreign round of tools": (_FIRST, _call("", "z", reasoning="thought"), _FIRST),
}
