"""Owns what links two contexts: what one call wrote or received that a later head's prompt carries.

A head is the first call of a context: a root, or a fork's first call. Three links exist. A spawn: arguments
of a tool call are what the head is asked (delegation, paper appendix C.1). A summary: a leaf's whole answer
stands in the head's opening (compaction, C.2). An echo: the head's prompt repeats turns that called tools, as
a kept tail or an edited history. Each is seen in recorded texts and call ids, or in the tokens themselves
(`runs`), which need no evidence.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre_trajtree.evidence import Evidence
from gyre_trajtree.runs import Repeats, repeats_of
from gyre_trajtree.tree import Node, Tree

LONG_TEXT = 20
"""Characters from which a text found again is no coincidence."""
SHORT_TEXT = 8
"""Characters below which a leaf's text found again says nothing."""
EXACT_TEXT = 8
"""Characters from which a brief that is the whole message is no coincidence."""
PROBE = 160
"""Characters of a summary that are looked for: the rest may be cut off."""
_TURN = 0.9
"""Share of an output from which a repeated one is the turn itself, not something it passed on."""
_ANSWER = 0.5
"""Share of an output from which its answer was passed on."""
RECENT = 64
"""Texts before a head that are looked for in it, where any of them might be there by chance."""


@dataclass(slots=True, frozen=True)
class Spawn:
    """A call whose tool arguments a head is asked."""

    caller: Node
    texts: tuple[str, ...]
    grade: str
    """"exact": an argument is the whole message. "carried": the message holds it. "words": short arguments
    are all there as words, which may be chance."""


@dataclass(slots=True, frozen=True)
class Summary:
    """A leaf whose answer opens a head's context."""

    leaf: Node
    sure: bool


@dataclass(slots=True)
class Links:
    """All links of a tree, by index of the head."""

    evidence: list[Evidence]
    """Of each call, in the order of the log."""
    heads: list[Node] = field(default_factory=list)
    """In the order of the log."""
    spawns: dict[int, Spawn] = field(default_factory=dict)
    summaries: dict[int, Summary] = field(default_factory=dict)
    echoes: dict[int, list[Node]] = field(default_factory=dict)
    """Earlier calls off the head's path whose turns its prompt repeats, in the order of the log."""


def links_of(tree: Tree) -> Links:
    """Find heads and what links them."""
    links = Links([Evidence(node.call) for node in tree.nodes])
    arguments = _Arguments(tree, links.evidence)
    for node in tree.nodes:
        if node.parent and not _branches(node, node.parent, links.evidence):
            continue
        spawn = _spawn(node, links.evidence[node.index], arguments)
        if node.parent is None or (spawn and _forks(node.parent, spawn)):
            links.heads.append(node)
            if spawn:
                links.spawns[node.index] = spawn
    repeats = repeats_of(tree, links.heads)
    answers = _Answers(tree, links.evidence)
    for head in links.heads:
        _link(tree, head, answers, repeats, links)
    return links


class _Arguments:
    """All tool arguments of a tree, so that matching costs the message's length, not the number of calls."""

    def __init__(self, tree: Tree, evidence: Sequence[Evidence]) -> None:
        self.exact: dict[str, list[Node]] = {}
        self.long: dict[str, list[tuple[Node, str]]] = {}
        """By their first characters."""
        self.short: list[tuple[Node, tuple[str, ...]]] = []
        """Calls whose arguments are all short, in the order of the log."""
        for node in tree.nodes:
            texts = evidence[node.index].spawns
            for text in texts:
                if len(text) >= EXACT_TEXT:
                    self.exact.setdefault(text, []).append(node)
                if len(text) >= LONG_TEXT:
                    self.long.setdefault(text[:LONG_TEXT], []).append((node, text))
            if texts and all(len(text) < LONG_TEXT for text in texts):
                self.short.append((node, texts))

    def short_before(self, node: Node) -> list[tuple[Node, tuple[str, ...]]]:
        """The latest of `short` before a call, the last one first: a delegation is taken up soon."""
        end = bisect_left(self.short, node.index, key=lambda argument: argument[0].index)
        return self.short[max(0, end - RECENT) : end][::-1]


def _spawn(node: Node, evidence: Evidence, arguments: _Arguments) -> Spawn | None:
    """The latest earlier call that wrote what this one is asked, by the best grade found."""
    messages = tuple(dict.fromkeys((evidence.last_user, evidence.first_user)))
    if node.parent:
        messages = messages[:1]
    exact = [(caller, message) for message in messages for caller in arguments.exact.get(message, ())]
    long = [pair for message in messages for pair in _carried(message, arguments)]
    for grade, pairs in (("exact", exact), ("carried", long)):
        if found := [pair for pair in pairs if pair[0].index < node.index]:
            latest = max((caller for caller, _ in found), key=lambda caller: caller.index)
            return Spawn(latest, tuple(sorted({text for caller, text in found if caller is latest})), grade)
    for caller, texts in arguments.short_before(node):
        if any(all(_has_words(message, text) for text in texts) for message in messages):
            return Spawn(caller, texts, "words")
    return None


def _carried(message: str, arguments: _Arguments) -> list[tuple[Node, str]]:
    starts = {message[i : i + LONG_TEXT] for i in range(len(message) - LONG_TEXT + 1)}
    return [
        (caller, text)
        for start in starts & arguments.long.keys()
        for caller, text in arguments.long[start]
        if carries(message, text)
    ]


def _branches(node: Node, parent: Node, evidence: Sequence[Evidence]) -> bool:
    """Whether a call is one of several that extend its parent, and answers a user message of its own."""
    return len(parent.children) > 1 and evidence[node.index].last_user != evidence[parent.index].last_user


def _forks(parent: Node, spawn: Spawn) -> bool:
    """Whether a branch is a fork: it is asked what a call next to it, or just above it, passed to a tool."""
    return spawn.grade != "words" and (spawn.caller is parent or spawn.caller.parent is parent)


class _Answers:
    """Beginnings of leaves' texts that a later context could open with.

    A text that the leaf copied from its own prompt is left out: finding it again links nothing. So is the
    text beside a tool call: that turn drives its context.
    """

    def __init__(self, tree: Tree, evidence: Sequence[Evidence]) -> None:
        self._found: list[tuple[Node, str]] = []
        for leaf in tree.leaves():
            own = evidence[leaf.index]
            text = own.text[:PROBE]
            if len(text) >= SHORT_TEXT and not own.tool_calls and text not in own.opening:
                self._found.append((leaf, text))

    def before(self, head: Node) -> list[tuple[Node, str]]:
        """The latest of them before a head, the last one first: what goes on from a summary begins soon after it."""
        end = bisect_left(self._found, head.index, key=lambda answer: answer[0].index)
        return self._found[max(0, end - RECENT) : end][::-1]


def _link(tree: Tree, head: Node, answers: _Answers, repeats: Repeats, links: Links) -> None:
    evidence, spawn = links.evidence, links.spawns.get(head.index)
    echoed = {tree[name].index for name in evidence[head.index].echoes if name in tree}
    passed_on = []
    for run in repeats.runs[head.index]:
        calls, source = evidence[run.source.index].tool_calls, run.source
        turn = run.begins and run.share >= _TURN and bool(source.children or calls)
        if turn or (run.share >= _ANSWER and (head.index, source.index) in repeats.asked):
            echoed.add(source.index)
        elif not (source.children or calls) and run.share >= _ANSWER:
            passed_on.append(source)
        elif spawn is None and calls != 0 and source.children:
            links.spawns[head.index] = Spawn(source, (), "carried")
    path = {node.index for node in tree.path(head)}
    links.echoes[head.index] = [tree.nodes[i] for i in sorted(echoed - path) if i < head.index]
    found = [_summary(head, answers, spawn, evidence)]
    found += [Summary(leaf, True) for leaf in passed_on if _opens(leaf, head, spawn, evidence)]
    # The latest, so that a summary of a summary is told from the first.
    latest = max(filter(None, found), key=lambda each: (each.leaf.index, each.sure), default=None)
    if latest and not _accompanied(tree, latest.leaf, head, links, repeats):
        links.summaries[head.index] = latest


def _accompanied(tree: Tree, leaf: Node, head: Node, links: Links, repeats: Repeats) -> bool:
    """Whether the leaf's question or its whole history came along with its text: then that is an edited history.

    A summary stands in place of both, though the latest turns may be kept beside it.
    """
    acted = {node.index for node in tree.path(leaf)[:-1] if links.evidence[node.index].tool_calls != 0}
    shown = {node.index for node in links.echoes[head.index]}
    return (head.index, leaf.index) in repeats.asked or (bool(acted) and acted <= shown)


def _summary(
    head: Node, answers: _Answers, spawn: Spawn | None, evidence: Sequence[Evidence]
) -> Summary | None:
    """The latest earlier leaf whose text opens this context, unless a spawn brought the text here."""
    opening = evidence[head.index].opening
    for leaf, text in answers.before(head):
        if text in opening and _opens(leaf, head, spawn, evidence):
            return Summary(leaf, sure=len(text) >= LONG_TEXT)
    return None


def _opens(leaf: Node, head: Node, spawn: Spawn | None, evidence: Sequence[Evidence]) -> bool:
    """Whether a leaf whose text is in the head's opening can be of the same agent.

    A summariser has its agent's system text or tools, or none. A text that a tool argument passed on is a
    delegation, not a compaction.
    """
    leaf_setting, head_setting = evidence[leaf.index].setting, evidence[head.index].setting
    if leaf_setting[1] and head_setting[1]:
        pairs = zip(leaf_setting, head_setting, strict=True)
        if not any(own and own == other for own, other in pairs):
            return False
    text = evidence[leaf.index].text[:PROBE]
    return not (spawn and text and any(text in passed for passed in spawn.texts))


def carries(message: str, text: str) -> bool:
    """Whether `message` holds `text`, or is its beginning because the record was cut."""
    return bool(text) and (text in message or (len(message) >= LONG_TEXT and text.startswith(message)))


def _has_words(message: str, words: str) -> bool:
    return words in message and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", message) is not None
