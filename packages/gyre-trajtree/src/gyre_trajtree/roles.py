"""Owns role inference: which kind of context each leaf of a tree belongs to (paper sections 2.3, C.1, C.2).

A black-box harness does not say which agent a request serves. Two questions are answered apart: whose
context a root opens (main agent, sub-agent, auxiliary request), and whether a leaf in it drives the task or
summarises it. Each piece of evidence is a vote; the weights below are the whole policy. What the calls
themselves show (texts that travel between contexts, digests, shape) outweighs what a header claims, because
headers are absent, inherited or wrong in harnesses nobody modified.

Invariant: every leaf gets exactly one decision; the same tree gives the same decisions.
"""

import math
import re
from dataclasses import dataclass, field

from gyre_trajtree.evidence import (
    Answer,
    Continuation,
    Opening,
    Spawn,
    Spawns,
    answers_of,
    carries,
    continued_leaf,
    opening,
    plain,
    spawned_by,
    spawns_of,
    text_of,
)
from gyre_trajtree.tree import Node, Tree

MAIN = "main"
MAIN_SUMMARY = "main-summary"
SUB_AGENT = "sub-agent"
SUB_AGENT_SUMMARY = "sub-agent-summary"
AUXILIARY = "auxiliary"
ROLES = (MAIN, MAIN_SUMMARY, SUB_AGENT, SUB_AGENT_SUMMARY, AUXILIARY)
"""In the order of their training priority (paper section 5.3)."""

# Votes for whose context a root opens: main, sub-agent or auxiliary.
ANCHOR = 3.0  # the root most like the original task's
SPAWNED, SPAWNED_UNSURE = 4.0, 2.0
CONTINUES, CONTINUES_UNSURE = 4.0, 2.0
SAME_SETTING = 2.5  # system text and tools of an earlier context
SAME_SYSTEM = 1.0  # only the system text of the main context
OTHER_SYSTEM = 1.0
TASK_PROMPT = 1.5
NO_TOOLS = 2.0  # while the main context has tools
LONE_CALL = 1.0  # no tools and nothing follows: a title, a probe
HINT = 2.0
PRIOR = 0.5  # without any evidence a context is the main agent's

# Votes for what a leaf does in its context: drive the task or summarise it.
DRIVES = 2.0
REAPPEARS, REAPPEARS_UNSURE = 5.0, 3.0
ASKED_TO_SUMMARISE = 2.5
HINTED_SUMMARY = 2.25

_FAMILIES = (MAIN, SUB_AGENT, AUXILIARY)
_SUMMARY_OF = {MAIN: MAIN_SUMMARY, SUB_AGENT: SUB_AGENT_SUMMARY}
_HINTED_FAMILY = {
    "main": MAIN,
    "agent": SUB_AGENT,
    "subagent": SUB_AGENT,
    "sidechain": SUB_AGENT,
    "title": AUXILIARY,
    "topic": AUXILIARY,
    "probe": AUXILIARY,
    "quota": AUXILIARY,
    "auxiliary": AUXILIARY,
}
_SUMMARY_KINDS = {"summary", "compact", "compaction"}


@dataclass(slots=True, frozen=True)
class RoleDecision:
    """Role of one leaf, how sure (0..1), and what it rests on, weightiest first."""

    role: str
    confidence: float
    evidence: tuple[str, ...]


@dataclass(slots=True)
class _Votes:
    totals: dict[str, float]
    reasons: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, choice: str, weight: float, reason: str) -> None:
        self.totals[choice] += weight
        self.reasons.append((weight, choice, reason))

    def winner(self) -> str:
        """The choice with most weight; the first of equal ones."""
        return max(self.totals, key=self.totals.__getitem__)

    def share(self) -> float:
        """Softmax probability of the winner."""
        best = max(self.totals.values())
        return 1.0 / sum(math.exp(total - best) for total in self.totals.values())

    def reasons_for(self, choice: str) -> list[tuple[float, str]]:
        return [(weight, reason) for weight, chosen, reason in self.reasons if chosen == choice]


@dataclass(slots=True)
class _Context:
    """One root and what is known of whose it is."""

    opening: Opening
    calls: int
    setting: tuple[str, str]
    """Digests of system text and tools, "" without."""
    spawn: Spawn | None
    continuation: Continuation | None
    votes: _Votes = field(default_factory=lambda: _Votes(dict.fromkeys(_FAMILIES, 0.0)))

    @property
    def root(self) -> Node:
        return self.opening.node

    @property
    def family(self) -> str:
        return self.votes.winner()


def infer_roles(tree: Tree, task_prompt: str | None = None) -> dict[str, RoleDecision]:
    """A decision for every leaf: {call id of the leaf: RoleDecision}.

    `task_prompt` is the text the harness was started with, when known; it helps to find the main context.
    """
    task = plain(task_prompt or "")
    spawns, answers = spawns_of(tree), answers_of(tree)
    contexts = [_context(tree, root, answers, spawns) for root in tree.roots]
    anchor = max(contexts, key=lambda context: _likeness_to_main(context, task))
    for position, context in enumerate(contexts):
        _vote(context, contexts[:position], anchor, task)
    by_root = {context.root.index: context for context in contexts}
    continued_by: dict[int, _Context] = {}
    for context in contexts:
        if context.continuation:
            continued_by.setdefault(context.continuation.leaf.index, context)
    return {
        leaf.id: _decide(leaf, by_root[leaf.root.index], continued_by.get(leaf.index))
        for leaf in tree.leaves()
    }


def _context(tree: Tree, root: Node, answers: list[Answer], spawns: Spawns) -> _Context:
    opened = opening(root)
    spawn = spawned_by(opened, spawns)
    return _Context(
        opened,
        calls=sum(1 for _ in tree.below(root)),
        setting=(text_of(root.call, "system"), text_of(root.call, "tools")),
        spawn=spawn,
        continuation=continued_leaf(opened, answers, spawn),
    )


def _likeness_to_main(context: _Context, task: str) -> tuple:
    """Orders roots by how much they look like the original task's context."""
    has_tools = bool(context.setting[1])
    return (
        not (context.spawn and context.spawn.sure),
        has_tools,
        carries(context.opening.first_user, task),
        _hinted_family(context.root) not in (SUB_AGENT, AUXILIARY),
        has_tools or context.calls > 1,
        -context.root.index,
    )


def _vote(context: _Context, earlier: list[_Context], anchor: _Context, task: str) -> None:
    votes = context.votes
    votes.add(MAIN, PRIOR, "nothing speaks against it")
    if context is anchor:
        votes.add(MAIN, ANCHOR, "most like the original task's context")
    if carries(context.opening.first_user, task):
        votes.add(MAIN, TASK_PROMPT, "the first user message holds the task")
    if spawn := context.spawn:
        weight = SPAWNED if spawn.sure else SPAWNED_UNSURE
        votes.add(SUB_AGENT, weight, f"call {spawn.caller.id} wrote its first user message")
    if context.continuation:
        _vote_continuation(votes, context.continuation, earlier)
    if context is not anchor and context.root.call.evidence and anchor.root.call.evidence:
        _vote_setting(context, earlier, anchor)
    if hinted := _hinted_family(context.root):
        votes.add(hinted, HINT, f"the harness calls it {_claim(context.root)!r}")


def _vote_continuation(votes: _Votes, continuation: Continuation, earlier: list[_Context]) -> None:
    source = next(context for context in earlier if context.root is continuation.leaf.root)
    # A summariser with a context of its own does not tell whose history it summarised.
    if source.family != AUXILIARY:
        weight = CONTINUES if continuation.sure else CONTINUES_UNSURE
        votes.add(source.family, weight, f"continues from the text of call {continuation.leaf.id}")


def _vote_setting(context: _Context, earlier: list[_Context], anchor: _Context) -> None:
    votes = context.votes
    (system, tools), (main_system, main_tools) = context.setting, anchor.setting
    twin = next((other for other in [anchor, *earlier] if other.setting == context.setting), None)
    if twin:
        family = MAIN if twin is anchor else twin.family
        votes.add(family, SAME_SETTING, f"system text and tools of call {twin.root.id}")
        return
    if main_tools and not tools:
        votes.add(AUXILIARY, NO_TOOLS, "no tools")
        if context.calls == 1:
            votes.add(AUXILIARY, LONE_CALL, "a single call")
    if system == main_system:
        votes.add(MAIN, SAME_SYSTEM, "the main context's system text")
    else:
        family = SUB_AGENT if tools or context.calls > 1 else AUXILIARY
        votes.add(family, OTHER_SYSTEM, "a system text of its own")


def _decide(leaf: Node, context: _Context, continued_by: _Context | None) -> RoleDecision:
    """Join the two answers: whose context it is, and whether this leaf summarises it."""
    family = context.family
    reasons = context.votes.reasons_for(family)
    job = _job_votes(leaf, continued_by)
    if job.winner() == "summarises":
        # A summariser with a context of its own belongs to the agent that goes on from its text.
        if family == AUXILIARY and continued_by and continued_by.continuation.sure:
            family = continued_by.family
        reasons = job.reasons_for("summarises") + reasons
    role = _SUMMARY_OF.get(family, family) if job.winner() == "summarises" else family
    ordered = sorted(reasons, key=lambda reason: -reason[0])
    confidence = round(context.votes.share() * job.share(), 4)
    return RoleDecision(role, confidence, tuple(reason for _, reason in ordered))


def _job_votes(leaf: Node, continued_by: _Context | None) -> _Votes:
    votes = _Votes({"drives": DRIVES, "summarises": 0.0})
    if continued_by:
        weight = REAPPEARS if continued_by.continuation.sure else REAPPEARS_UNSURE
        votes.add("summarises", weight, f"its text opens the context of call {continued_by.root.id}")
    if (claim := _claim(leaf)) in _SUMMARY_KINDS:
        votes.add("summarises", HINTED_SUMMARY, f"the harness calls it {claim!r}")
    # Only a message new in this call can ask: a continued context keeps its summary as first message.
    asked = text_of(leaf.call, "last_user")
    if leaf.parent and asked != text_of(leaf.parent.call, "last_user") and "summar" in asked.lower():
        votes.add("summarises", ASKED_TO_SUMMARISE, "its last user message asks for a summary")
    return votes


def _claim(node: Node) -> str:
    """What the harness says a call is for, in lower case letters: a kind, or headers of sub-agents."""
    hints = node.call.hints
    claim = text_of(node.call, "kind") or hints.get("subagent") or ("subagent" if hints.get("parent") else "")
    return re.sub(r"[^a-z]", "", str(claim).lower())


def _hinted_family(root: Node) -> str | None:
    claim = _claim(root)
    if claim in _SUMMARY_KINDS:
        return None
    return _HINTED_FAMILY.get(claim, SUB_AGENT if root.call.hints.get("subagent") else None)
