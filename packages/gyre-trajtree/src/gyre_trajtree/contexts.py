"""Owns the contexts of an execution: where each begins, why, and whose it is (paper sections 2.3, C.1, C.2).

A context is a head and every call below it up to the next head. A black-box harness does not say which agent
a request serves, so each piece of evidence is a vote for a family: the main agent's, a sub-agent's, or an
auxiliary request's. The weights below are the whole policy. What the calls themselves show (links, settings,
shape) outweighs what a header claims: headers are absent, inherited or wrong in harnesses nobody modified.

Invariant: every call is in exactly one context; the same tree gives the same contexts.
"""

import math
from dataclasses import dataclass, field

from gyre_trajtree.evidence import Evidence, plain
from gyre_trajtree.links import Links, Spawn, Summary, carries, links_of
from gyre_trajtree.tree import Node, Tree

MAIN, SUB_AGENT, AUXILIARY = "main", "sub-agent", "auxiliary"
FAMILIES = (MAIN, SUB_AGENT, AUXILIARY)

# Votes for whose context it is.
ANCHOR = 3.0  # the head most like the original task's
SPAWNED = {"exact": 5.0, "carried": 4.0, "words": 2.0}
SPAWNED_AFTERWARDS = 2.0  # the caller's context had ended: notes kept for later read like a brief
CONTINUES, CONTINUES_UNSURE = 4.0, 2.0
ECHOES = 2.5  # repeats turns of an earlier context
SAME_SETTING = 2.5  # system text and tools of an earlier context
SAME_SYSTEM = 1.0  # only the system text of the main context
SAME_TOOLS = 1.75  # only the tools of an earlier context: system texts hold dates and folders
OTHER_SYSTEM = 1.0
TASK_PROMPT = 1.5  # times the part of the task that the opening holds, under the main system text or tools
NO_TOOLS = 2.0  # while the main context has tools
LONE_CALL = 1.0  # no tools and nothing follows: a title, a probe
HINT = 1.75
PRIOR = 0.5  # without any evidence a context is the main agent's

SUMMARY_CLAIMS = {"summary", "compact", "compaction"}
_CLAIMED_FAMILY = {
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
_TASK_WORDS = 4
"""Words of a phrase that is looked for when a task is compared with an opening."""


@dataclass(slots=True)
class Votes:
    """Weighed evidence for one question."""

    totals: dict[str, float]
    reasons: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, choice: str, weight: float, reason: str) -> None:
        """Count `weight` for `choice`."""
        self.totals[choice] += weight
        self.reasons.append((weight, choice, reason))

    def winner(self) -> str:
        """The choice with most weight; the first of equal ones."""
        return max(self.totals, key=self.totals.__getitem__)

    def share(self) -> float:
        """Softmax probability of the winner, 0..1."""
        best = max(self.totals.values())
        return 1.0 / sum(math.exp(total - best) for total in self.totals.values())

    def reasons_for(self, choice: str) -> list[tuple[float, str]]:
        """Weights and reasons of the votes for `choice`."""
        return [(weight, reason) for weight, chosen, reason in self.reasons if chosen == choice]


@dataclass(slots=True)
class Context:
    """One context of an execution."""

    head: Node
    evidence: Evidence
    """Of the head."""
    spawn: Spawn | None
    summary: Summary | None
    """The leaf whose answer opens this context."""
    echoes: list[Node]
    """Calls of earlier contexts whose turns the head's prompt repeats."""
    nodes: list[Node] = field(default_factory=list)
    """The head and what is below it, in the order of the log."""
    settings: set[tuple[str, str]] = field(default_factory=set)
    """Digests of system text and tools over its calls: tools may change within a context."""
    votes: Votes = field(default_factory=lambda: Votes(dict.fromkeys(FAMILIES, 0.0)))
    passed_over: Node | None = None
    """The leaf of the agent's last context that this one goes on past, as after a summary of it."""
    cause: str = "start"
    """Why it begins, a key of `strands.BRANCH_CAUSES`."""
    source: Node | None = None
    """The call that caused it: the delegating one, the summary, or the latest one repeated; None at a start."""

    @property
    def family(self) -> str:
        """Whose context it is: "main", "sub-agent" or "auxiliary"."""
        return self.votes.winner()

    @property
    def lone(self) -> bool:
        """Whether it is a single call."""
        return len(self.nodes) == 1

    @property
    def forks(self) -> bool:
        """Whether it copies the context of the call that delegated to it, and only then is asked its own.

        Such a copy resembles its parent in everything, which says nothing of whose it is.
        """
        if not self.spawn or self.spawn.grade == "words":
            return False
        own = self.evidence
        asked = own.last_user != own.first_user and any(text in own.last_user for text in self.spawn.texts)
        return self.head.parent is not None or (asked and self.spawn.caller in self.echoes)

    def works(self, evidence: list[Evidence]) -> bool:
        """Whether it goes on or calls tools, as no title, topic or probe does. `evidence` is that of each call."""
        return not self.lone or bool(evidence[self.head.index].tool_calls)

    def offered(self, tools: str) -> bool:
        """Whether some call of it had these tools."""
        return any(tools == known for _, known in self.settings)

    @property
    def reads_history(self) -> bool:
        """Whether it can do nothing but read what another context did: a summariser with its own setting."""
        return self.lone and bool(self.echoes) and self.evidence.recorded and not self.evidence.setting[1]


@dataclass(slots=True)
class Contexts:
    """The contexts of one tree, in the order of the log."""

    all: list[Context]
    links: Links
    by_node: list[Context]
    """The context of each call, by index."""


def contexts_of(tree: Tree, task_prompt: str | None = None) -> list[Context]:
    """The contexts of one execution, in the order of the log.

    `task_prompt` is the text the harness was started with, when known; it helps to find the main context.
    """
    return find_contexts(tree, task_prompt).all


def find_contexts(tree: Tree, task_prompt: str | None = None) -> Contexts:
    """The same, with the links they rest on."""
    task = plain(task_prompt or "")
    found = _split(tree, links_of(tree))
    if not found.all:
        return found
    anchor = max(found.all, key=lambda context: _likeness_to_main(context, task))
    for position, context in enumerate(found.all):
        _vote(context, found.all[:position], found, anchor, task)
        if context.family != AUXILIARY and not context.summary:
            context.passed_over = _passed_over(tree, context, found.all[:position], found)
        context.cause, context.source = _cause(context, found, anchor)
    return found


def _split(tree: Tree, links: Links) -> Contexts:
    by_head = {
        head.index: Context(
            head,
            links.evidence[head.index],
            links.spawns.get(head.index),
            links.summaries.get(head.index),
            links.echoes.get(head.index, []),
        )
        for head in links.heads
    }
    by_node: list[Context] = []
    for node in tree.nodes:
        context = by_head.get(node.index)
        if context is None:
            assert node.parent is not None  # every root is a head
            context = by_node[node.parent.index]
        by_node.append(context)
        context.nodes.append(node)
        if any(setting := links.evidence[node.index].setting):
            context.settings.add(setting)
    return Contexts(list(by_head.values()), links, by_node)


def _likeness_to_main(context: Context, task: str) -> tuple:
    """Orders contexts by how much they look like the original task's."""
    has_tools = bool(context.evidence.setting[1])
    spawned = context.spawn is not None and context.spawn.grade != "words"
    return (
        not spawned,
        not (context.summary or context.echoes),
        has_tools,
        task_share(context.evidence.opening, task),
        _claimed_family(context.evidence) not in (SUB_AGENT, AUXILIARY),
        has_tools or not context.lone,
        -context.head.index,
    )


def _vote(context: Context, earlier: list[Context], found: Contexts, anchor: Context, task: str) -> None:
    votes, opening = context.votes, context.evidence.opening
    votes.add(MAIN, PRIOR, "nothing speaks against it")
    if context is anchor:
        votes.add(MAIN, ANCHOR, "most like the original task's context")
    (system, tools), (main_system, main_tools) = context.evidence.setting, anchor.evidence.setting
    akin = system == main_system or (tools and tools == main_tools)
    if akin and not context.forks and (share := task_share(opening, task)):
        votes.add(MAIN, TASK_PROMPT * share, "its opening holds the task")
    if (spawn := context.spawn) and not _starts_anew(context, anchor):
        waits = found.by_node[spawn.caller.index].nodes[-1].index > context.head.index
        weight = SPAWNED[spawn.grade] if waits or spawn.grade == "exact" else SPAWNED_AFTERWARDS
        votes.add(SUB_AGENT, weight, f"call {spawn.caller.id} wrote what it is asked")
    if context is not anchor and not context.forks:
        _vote_links(context, found)
        _vote_setting(context, earlier, anchor)
    hinted = _claimed_family(context.evidence)
    if hinted and not (hinted == AUXILIARY and context.works(found.links.evidence)):
        votes.add(hinted, HINT, f"the harness calls it {context.evidence.claim!r}")
    if not hinted and _other_agent(context.evidence, anchor.evidence):
        votes.add(SUB_AGENT, HINT, "the harness names another agent of the same session")


def _starts_anew(context: Context, anchor: Context) -> bool:
    """Whether it is the main conversation begun once more: what was passed to a tool meanwhile opened the first too."""
    own, main = context.evidence, anchor.evidence
    same = own.setting == main.setting and own.first_user == main.first_user
    return context is not anchor and same and bool(own.first_user) and not context.forks


def _vote_links(context: Context, found: Contexts) -> None:
    if summary := context.summary:
        family = found.by_node[summary.leaf.index].family
        # A summariser with a setting of its own does not tell whose history it summarised.
        if family != AUXILIARY:
            weight = CONTINUES if summary.sure else CONTINUES_UNSURE
            context.votes.add(family, weight, f"continues from the text of call {summary.leaf.id}")
    if context.echoes:
        latest = context.echoes[-1]
        family = found.by_node[latest.index].family
        context.votes.add(family, ECHOES, f"repeats the turn of call {latest.id}")


def _vote_setting(context: Context, earlier: list[Context], anchor: Context) -> None:
    votes, setting = context.votes, context.evidence.setting
    if not (context.evidence.recorded and anchor.evidence.recorded) or context.reads_history:
        return
    if twin := next((other for other in [anchor, *earlier] if setting in other.settings), None):
        family = MAIN if twin is anchor else twin.family
        votes.add(family, SAME_SETTING, f"system text and tools of call {twin.head.id}")
        return
    (system, tools), (main_system, main_tools) = setting, anchor.evidence.setting
    if main_tools and not tools:
        votes.add(AUXILIARY, NO_TOOLS, "no tools")
        if context.lone:
            votes.add(AUXILIARY, LONE_CALL, "a single call")
    if tools and (owner := next((other for other in [anchor, *earlier] if other.offered(tools)), None)):
        family = MAIN if owner is anchor else owner.family
        votes.add(family, SAME_TOOLS, f"tools of call {owner.head.id}")
    if system == main_system:
        votes.add(MAIN, SAME_SYSTEM, "the main context's system text")
    else:
        family = SUB_AGENT if tools or not context.lone else AUXILIARY
        votes.add(family, OTHER_SYSTEM, "a system text of its own")


def _passed_over(tree: Tree, context: Context, earlier: list[Context], found: Contexts) -> Node | None:
    """The last leaf of the same agent's context before this one, if this one goes on as after its summary.

    That is so when this one keeps a turn the leaf was not shown, or when the leaf's whole context was one
    request that repeated turns which this one does not.
    """
    same = [
        other
        for other in earlier
        if other.settings & context.settings and other.nodes[-1].index < context.head.index
    ]
    if not same or (context.spawn and context.spawn.grade != "words"):
        return None
    last = max(same, key=lambda other: other.nodes[-1].index)
    leaf = last.nodes[-1]
    answered = leaf.call.finish in ("stop", "length") and len(leaf.call.output_ids) > 0
    if not answered or found.links.evidence[leaf.index].tool_calls != 0:
        return None
    shown = {node.index for node in tree.path(leaf)}
    kept = any(found.by_node[node.index] is last and node.index not in shown for node in context.echoes)
    return leaf if kept or (last.lone and last.echoes and not context.echoes) else None


def _cause(context: Context, found: Contexts, anchor: Context) -> tuple[str, Node | None]:
    if context is anchor:
        return "start", None
    if context.family == SUB_AGENT and context.spawn:
        return ("fork" if context.forks else "delegation"), context.spawn.caller
    leaf = context.summary.leaf if context.summary else context.passed_over
    if leaf and not (context.echoes and context.echoes[-1].index > leaf.index):
        return "compaction", leaf
    if context.reads_history:
        return "summary", context.echoes[-1]
    if context.lone and any(summary.leaf is context.head for summary in found.links.summaries.values()):
        return "summary", None
    if context.family == AUXILIARY:
        return "auxiliary", None
    if context.echoes:
        return "edit", context.echoes[-1]
    return "start", None


def _claimed_family(evidence: Evidence) -> str | None:
    if evidence.claim in SUMMARY_CLAIMS:
        return None
    return _CLAIMED_FAMILY.get(evidence.claim, SUB_AGENT if evidence.names_sub_agent else None)


def _other_agent(evidence: Evidence, anchor: Evidence) -> bool:
    session, agent = evidence.agent
    main_session, main_agent = anchor.agent
    return bool(agent) and session == main_session and agent != main_agent


def task_share(opening: str, task: str) -> float:
    """Part of the task's phrases that an opening holds, 0..1; 1 when the record of a long one was cut."""
    if not task or not opening:
        return 0.0
    if carries(opening, task):
        return 1.0
    words = task.split()
    phrases = {" ".join(words[i : i + _TASK_WORDS]) for i in range(len(words) - _TASK_WORDS + 1)}
    return sum(phrase in opening for phrase in phrases) / len(phrases) if phrases else 0.0
