"""Owns role inference: which kind of context each leaf of a tree belongs to (paper sections 2.3, C.1, C.2).

Two questions are answered apart and joined: whose context the leaf is in (`contexts`), and whether the leaf
drives its context's work or summarises it. The weights below are the policy of the second. A summary is
always asked for: a leaf that was asked nothing new, or that called tools, drives, whatever a header claims.

Invariant: every leaf gets exactly one decision; the same tree gives the same decisions.
"""

import re
from dataclasses import dataclass

from gyre_trajtree.contexts import (
    AUXILIARY,
    MAIN,
    SUB_AGENT,
    SUMMARY_CLAIMS,
    Context,
    Contexts,
    Votes,
    find_contexts,
)
from gyre_trajtree.tree import Node, Tree

MAIN_SUMMARY = "main-summary"
SUB_AGENT_SUMMARY = "sub-agent-summary"
ROLES = (MAIN, MAIN_SUMMARY, SUB_AGENT, SUB_AGENT_SUMMARY, AUXILIARY)
"""In the order of their training priority (paper section 5.3)."""

DRIVES = 2.0
ACTS = 2.0  # its answer called tools
ASKED_NOTHING = 2.0  # its prompt adds no user message to its parent's, or opens the execution
REAPPEARS, REAPPEARS_UNSURE = 5.0, 3.0
SAME_REQUEST = 5.0  # asked with the words of a request that was answered with a summary
PASSED_OVER = 2.5  # the agent goes on elsewhere, from turns this leaf does not know
READS_HISTORY = 3.0
ASKED_TO_SUMMARISE = 2.5
CLAIMED_SUMMARY = 2.25
ASIDE = 0.5  # it stands beside its agent's line of work, as every summary request does

_SUMMARY_OF = {MAIN: MAIN_SUMMARY, SUB_AGENT: SUB_AGENT_SUMMARY}
_SUMMARY_WORDS = re.compile(
    r"\b(summar(y|ies|i[sz]\w+)|résum(é|er|ez)|zusammenfass\w*|resum(en|ir|e)|podsum\w+|резюм\w+|кратко\w*)\b"
    r"|总结|摘要|概括|要約|요약",
    re.IGNORECASE,
)


@dataclass(slots=True, frozen=True)
class RoleDecision:
    """Role of one leaf, how sure (0..1), and what it rests on, weightiest first."""

    role: str
    confidence: float
    evidence: tuple[str, ...]


def infer_roles(tree: Tree, task_prompt: str | None = None) -> dict[str, RoleDecision]:
    """A decision for every leaf: {call id of the leaf: RoleDecision}.

    `task_prompt` is the text the harness was started with, when known; it helps to find the main context.
    """
    found = find_contexts(tree, task_prompt)
    leaves = tree.leaves()
    opened = _opened_by(found)
    past = {context.passed_over.index: context for context in found.all if context.passed_over}
    jobs = {leaf.index: _job_votes(leaf, found, opened, past) for leaf in leaves}
    _vote_same_request(leaves, jobs, found)
    for leaf in leaves:
        _vote_words(leaf, jobs[leaf.index], found)
    return {leaf.id: _decide(leaf, jobs[leaf.index], found, opened) for leaf in leaves}


def _opened_by(found: Contexts) -> dict[int, Context]:
    """The first context that each summary opens, by index of the leaf."""
    opened: dict[int, Context] = {}
    for context in found.all:
        if context.summary:
            opened.setdefault(context.summary.leaf.index, context)
    return opened


def _decide(leaf: Node, job: Votes, found: Contexts, opened: dict[int, Context]) -> RoleDecision:
    """Join the two answers: whose context it is, and whether this leaf summarises it."""
    context = found.by_node[leaf.index]
    family = context.family
    reasons = context.votes.reasons_for(family)
    if job.winner() == "summarises":
        after = opened.get(leaf.index)
        # A summariser with a context of its own belongs to the agent that goes on from its text.
        if family == AUXILIARY and after and after.summary and after.summary.sure:
            family = after.family
    reasons += job.reasons_for(job.winner())
    role = _SUMMARY_OF.get(family, family) if job.winner() == "summarises" else family
    ordered = sorted(reasons, key=lambda reason: -reason[0])
    confidence = round(context.votes.share() * job.share(), 4)
    return RoleDecision(role, confidence, tuple(reason for _, reason in ordered))


def _job_votes(leaf: Node, found: Contexts, opened: dict[int, Context], past: dict[int, Context]) -> Votes:
    """Votes for what a leaf does, by the contexts that it `opened` and those that went on `past` it."""
    votes = Votes({"drives": DRIVES, "summarises": 0.0})
    context, own = found.by_node[leaf.index], found.links.evidence[leaf.index]
    if own.tool_calls:
        votes.add("drives", ACTS, "its answer called tools")
    if (leaf.parent or leaf.index == 0) and own.recorded and not _newly_asked(leaf, found):
        votes.add("drives", ASKED_NOTHING, "no user message asked for it")
    if after := opened.get(leaf.index):
        weight = REAPPEARS if after.summary and after.summary.sure else REAPPEARS_UNSURE
        votes.add("summarises", weight, f"its text opens the context of call {after.head.id}")
    if context.reads_history:
        votes.add("summarises", READS_HISTORY, "reads another context's history, without tools")
    if over := past.get(leaf.index):
        votes.add("summarises", PASSED_OVER, f"its agent goes on past it at call {over.head.id}")
    if _aside(leaf, context):
        votes.add("summarises", ASIDE, "it stands beside the line of work")
    return votes


def _vote_same_request(leaves: list[Node], jobs: dict[int, Votes], found: Contexts) -> None:
    """A request in the words of one that was answered with a summary asks for a summary too."""
    asked = {leaf.index: _newly_asked(leaf, found) for leaf in leaves}
    requests = {asked[leaf.index]: leaf for leaf in leaves if jobs[leaf.index].winner() == "summarises"}
    for leaf in leaves:
        first = requests.get(asked[leaf.index])
        if first and first is not leaf and asked[leaf.index]:
            jobs[leaf.index].add("summarises", SAME_REQUEST, f"asked with the words of call {first.id}")


def _vote_words(leaf: Node, votes: Votes, found: Contexts) -> None:
    """What the request says of itself: a header's claim, words that ask for a summary."""
    own = found.links.evidence[leaf.index]
    if own.claim in SUMMARY_CLAIMS:
        votes.add("summarises", CLAIMED_SUMMARY, f"the harness calls it {own.claim!r}")
    if not own.tool_calls and _SUMMARY_WORDS.search(_newly_asked(leaf, found)):
        votes.add("summarises", ASKED_TO_SUMMARISE, "its last user message asks for a summary")


def _aside(leaf: Node, context: Context) -> bool:
    """Whether other calls go on from where this one was asked, or it is a whole context after others."""
    if leaf.parent:
        return len(leaf.parent.children) > 1
    return context.lone and leaf.index > 0


def _newly_asked(leaf: Node, found: Contexts) -> str:
    """The user message that this call answers, "" when its parent was asked the same.

    The message that opens a context asks for its work, and may hold a summary: it asks for none.
    """
    own = found.links.evidence[leaf.index]
    if leaf.parent:
        above = found.links.evidence[leaf.parent.index].last_user
        return own.last_user if own.last_user != above else ""
    return "" if found.by_node[leaf.index].summary or own.last_user == own.first_user else own.last_user
