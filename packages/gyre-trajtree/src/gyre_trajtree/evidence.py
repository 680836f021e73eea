"""Owns the texts that travel between contexts: what one call wrote that opens a later context.

Two links exist. A spawn: a tool argument of one call is found in the first user message of a later root
(delegation, paper appendix C.1). A continuation: a leaf's visible text is found in the user message that
opens a later root (compaction, appendix C.2). Texts are compared without the wrappers and spacing that
harnesses change; recorded texts are cut, so a beginning counts as the whole. Pure functions over recorded
evidence.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre_trajtree.records import Call
from gyre_trajtree.tree import Node, Tree

LONG_TEXT = 20
"""Characters from which a text found again is no coincidence."""
SHORT_TEXT = 8
"""Characters below which a leaf's text found again says nothing."""
PROBE = 160
"""Characters of a summary that are looked for: the rest may be cut off."""

_WRAPPERS = re.compile(
    r"<system-reminder>.*?</system-reminder>|<analysis>.*?</analysis>|</?summary>", re.DOTALL
)


@dataclass(slots=True, frozen=True)
class Opening:
    """First and last user text that a call was asked with, ready for comparison."""

    node: Node
    first_user: str
    last_user: str


@dataclass(slots=True, frozen=True)
class Spawn:
    """Texts that a call gave to tools, and whether they are long enough to be sure of a match."""

    caller: Node
    texts: tuple[str, ...]
    sure: bool = True


@dataclass(slots=True, frozen=True)
class Spawns:
    """All tool arguments of a tree, so that matching costs the message's length, not the number of calls."""

    long: dict[str, list[tuple[Node, str]]] = field(default_factory=dict)
    """Long texts by their first characters, with who wrote them."""
    short: list[Spawn] = field(default_factory=list)
    """Calls whose arguments are all short, in the order of the log."""


@dataclass(slots=True, frozen=True)
class Answer:
    """The beginning of a leaf's visible text, if it is long enough and the leaf's own."""

    leaf: Node
    text: str


@dataclass(slots=True, frozen=True)
class Continuation:
    """A leaf whose text opens the context of `root`."""

    leaf: Node
    root: Node
    sure: bool


def text_of(call: Call, key: str) -> str:
    """A text of the call's evidence, "" when its writer recorded none."""
    value = call.evidence.get(key)
    return value if isinstance(value, str) else ""


def plain(text: str) -> str:
    """`text` without what harnesses wrap around it, with single spaces."""
    return " ".join((_WRAPPERS.sub(" ", text) if "<" in text else text).split())


def opening(node: Node) -> Opening:
    return Opening(node, plain(text_of(node.call, "first_user")), plain(text_of(node.call, "last_user")))


def spawns_of(tree: Tree) -> Spawns:
    """Every call's tool arguments, indexed for `spawned_by`."""
    spawns = Spawns()
    for node in tree.nodes:
        recorded = node.call.evidence.get("spawns")
        texts = (
            [plain(text) for text in recorded if isinstance(text, str)] if isinstance(recorded, list) else []
        )
        for text in texts:
            if len(text) >= LONG_TEXT:
                spawns.long.setdefault(text[:LONG_TEXT], []).append((node, text))
        if texts and all(len(text) < LONG_TEXT for text in texts):
            spawns.short.append(Spawn(node, tuple(texts), sure=False))
    return spawns


def spawned_by(opened: Opening, spawns: Spawns) -> Spawn | None:
    """The latest earlier call whose tool arguments the context's first user message carries, with those.

    One long argument suffices; short ones (a path, a colour) must all be there as words, and are not sure.
    """
    message, before = opened.first_user, opened.node.index
    starts = {message[i : i + LONG_TEXT] for i in range(len(message) - LONG_TEXT + 1)}
    found = [
        (caller, text)
        for start in starts & spawns.long.keys()
        for caller, text in spawns.long[start]
        if caller.index < before and carries(message, text)
    ]
    if found:
        latest = max((caller for caller, _ in found), key=lambda caller: caller.index)
        return Spawn(latest, tuple(sorted(text for caller, text in found if caller is latest)))
    for spawn in reversed(spawns.short):
        if spawn.caller.index < before and all(_has_words(message, text) for text in spawn.texts):
            return spawn
    return None


def answers_of(tree: Tree) -> list[Answer]:
    """Texts of leaves that a later context could open with, in the order of the log.

    A text that the leaf copied from its own prompt is left out: finding it again links nothing.
    """
    found = []
    for leaf in tree.leaves():
        text = plain(text_of(leaf.call, "text"))[:PROBE]
        asked = opening(leaf)
        if len(text) >= SHORT_TEXT and text not in asked.first_user and text not in asked.last_user:
            found.append(Answer(leaf, text))
    return found


def continued_leaf(opened: Opening, answers: Sequence[Answer], spawn: Spawn | None) -> Continuation | None:
    """The latest earlier leaf whose text opens this context, unless a spawn brought the text here."""
    for answer in reversed(answers):
        if answer.leaf.index >= opened.node.index:
            continue
        text = answer.text
        brought = spawn is not None and any(text in passed for passed in spawn.texts)
        if not brought and (text in opened.first_user or text in opened.last_user):
            return Continuation(answer.leaf, opened.node, sure=len(text) >= LONG_TEXT)
    return None


def carries(message: str, text: str) -> bool:
    """Whether `message` holds `text`, or is its beginning because the record was cut."""
    return bool(text) and (text in message or (len(message) >= LONG_TEXT and text.startswith(message)))


def _has_words(message: str, words: str) -> bool:
    return words in message and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", message) is not None
