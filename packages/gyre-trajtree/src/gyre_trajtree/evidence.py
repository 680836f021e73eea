"""Owns the texts that travel between contexts: what one call wrote that opens a later context.

Two links exist. A spawn: a tool argument of one call is found in the first user message of a later root
(delegation, paper appendix C.1). A continuation: a leaf's visible text is found in the user message that
opens a later root (compaction, appendix C.2). Texts are compared without the wrappers and spacing that
harnesses change; recorded texts are cut, so a beginning counts as the whole. Pure functions over recorded
evidence.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
    """User texts of the first call of a root, ready for comparison."""

    root: Node
    first_user: str
    last_user: str


@dataclass(slots=True, frozen=True)
class Spawn:
    """Texts that a call gave to tools and, once matched, whether they are long enough to be sure."""

    caller: Node
    texts: tuple[str, ...]
    sure: bool = True


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


def opening(root: Node) -> Opening:
    return Opening(root, plain(text_of(root.call, "first_user")), plain(text_of(root.call, "last_user")))


def spawns_of(tree: Tree) -> list[Spawn]:
    """Every call's tool arguments, in the order of the log."""
    found = []
    for node in tree.nodes:
        recorded = node.call.evidence.get("spawns")
        if isinstance(recorded, list) and recorded:
            found.append(Spawn(node, tuple(plain(text) for text in recorded if isinstance(text, str))))
    return found


def spawned_by(opened: Opening, spawns: Sequence[Spawn]) -> Spawn | None:
    """The earlier call whose tool arguments the context's first user message carries, with those arguments.

    One long argument suffices; short ones (a path, a colour) must all be there as words, and are not sure.
    """
    unsure: Spawn | None = None
    for spawn in spawns:
        if spawn.caller.index >= opened.root.index:
            break
        long = tuple(t for t in spawn.texts if len(t) >= LONG_TEXT and carries(opened.first_user, t))
        if long:
            return Spawn(spawn.caller, long)
        if spawn.texts and all(_has_words(opened.first_user, text) for text in spawn.texts):
            unsure = Spawn(spawn.caller, spawn.texts, sure=False)
    return unsure


def continued_leaf(opened: Opening, leaves: Sequence[Node], spawn: Spawn | None) -> Continuation | None:
    """The latest earlier leaf whose text opens this context.

    Not a continuation: a text that the leaf copied from its own prompt, or one that a spawn brought here.
    """
    for leaf in reversed(leaves):
        if leaf.index >= opened.root.index:
            continue
        text = plain(text_of(leaf.call, "text"))[:PROBE]
        if len(text) < SHORT_TEXT or not (text in opened.first_user or text in opened.last_user):
            continue
        copied = text in plain(text_of(leaf.call, "first_user")) or text in plain(
            text_of(leaf.call, "last_user")
        )
        if copied or (spawn and any(text in passed for passed in spawn.texts)):
            continue
        return Continuation(leaf, opened.root, sure=len(text) >= LONG_TEXT)
    return None


def carries(message: str, text: str) -> bool:
    """Whether `message` holds `text`, or is its beginning because the record was cut."""
    return bool(text) and (text in message or (len(message) >= LONG_TEXT and text.startswith(message)))


def _has_words(message: str, words: str) -> bool:
    return words in message and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", message) is not None
