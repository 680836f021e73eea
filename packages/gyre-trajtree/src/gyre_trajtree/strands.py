"""Owns the division of a tree into strands, the form in which people read it.

A strand is the run of calls of one conversation, from where it begins to its leaf: at a branching point the
branch with most calls goes on, the others begin strands of their own. Strands that another context caused
(a sub-agent, a side request) stand under the call that caused them, although no token is shared; the
continuation of a summarised context stands next to it.

Invariant: every call is in exactly one strand and every strand ends at its own leaf, so that a tree has as
many strands as leaves; the strands above a strand begin before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre_trajtree.contexts import Context
from gyre_trajtree.roles import MAIN_SUMMARY, SUB_AGENT_SUMMARY, RoleDecision
from gyre_trajtree.tree import Node, Tree

BRANCH_CAUSES = {
    "start": "a conversation of its own",
    "delegation": "a tool call hands work to a sub-agent",
    "fork": "a copy of a context that is asked something else",
    "compaction": "a summary stands for an earlier context",
    "summary": "a request to summarise a context",
    "edit": "the history of a context was changed",
    "auxiliary": "a side request: a title, a topic, a probe",
    "resample": "the same prompt was sampled again",
    "aborted": "an attempt that was cut off and that the harness repeated",
    "retried": "a whole attempt that the harness repeated",
}
"""Why a strand begins, and what it means."""

_BESIDE_ITS_SOURCE = ("compaction", "edit")


@dataclass(slots=True, eq=False)
class Strand:
    """A run of calls, each sampled in continuation of the one before."""

    nodes: list[Node]
    """From the head to the leaf."""
    cause: str
    """A key of BRANCH_CAUSES."""
    source: Node | None
    """The call that caused it; for a branch the call it extends; None at a start."""
    above: "Strand | None" = None
    """The strand it stands under."""
    below: list["Strand"] = field(default_factory=list)
    """In the order of the log."""

    @property
    def head(self) -> Node:
        """Its first call."""
        return self.nodes[0]

    @property
    def leaf(self) -> Node:
        """Its last call."""
        return self.nodes[-1]


def strands_of(
    tree: Tree, contexts: Sequence[Context], roles: Mapping[str, RoleDecision], dead: Mapping[str, str]
) -> list[Strand]:
    """All strands in the order of their heads; the outermost are those with nothing above.

    `contexts`, `roles` and `dead` are what `contexts_of`, `infer_roles` and `dead_tips` return for this tree.
    """
    of_head = {context.head.index: context for context in contexts}
    onward = _onward(tree, of_head, dead)
    strands: list[Strand] = []
    holder: dict[int, Strand] = {}
    for node in tree.nodes:
        if node.parent and onward[node.parent.index] is node:
            strand = holder[node.parent.index]
            strand.nodes.append(node)
        else:
            strand = Strand([node], *_cause(tree, node, of_head.get(node.index), roles, dead, onward))
            strand.above = _above(strand, holder)
            if strand.above:
                strand.above.below.append(strand)
            strands.append(strand)
        holder[node.index] = strand
    return strands


def _onward(tree: Tree, of_head: Mapping[int, Context], dead: Mapping[str, str]) -> list[Node | None]:
    """The child with which each call's strand goes on, by index of the call."""
    calls = [1] * len(tree)
    for node in reversed(tree.nodes):  # a call comes after its parent in the log
        if node.parent:
            calls[node.parent.index] += calls[node.index]

    def fitness(child: Node) -> tuple:
        return child.id not in dead, child.index not in of_head, calls[child.index], -child.index

    return [max(node.children, key=fitness, default=None) for node in tree.nodes]


def _cause(
    tree: Tree,
    node: Node,
    context: Context | None,
    roles: Mapping[str, RoleDecision],
    dead: Mapping[str, str],
    onward: Sequence[Node | None],
) -> tuple[str, Node | None]:
    if node.id in dead:
        return dead[node.id], node.parent
    if context:
        return context.cause, context.source
    if node.id in roles and roles[node.id].role in (MAIN_SUMMARY, SUB_AGENT_SUMMARY):
        return "summary", node.parent
    went_on = onward[node.parent.index] if node.parent else None
    if went_on and np.array_equal(went_on.call.input_ids, node.call.input_ids):
        return "resample", node.parent
    return "edit", node.parent


def _above(strand: Strand, holder: Mapping[int, Strand]) -> Strand | None:
    if strand.head.parent:
        return holder[strand.head.parent.index]
    source = strand.source and holder.get(strand.source.index)
    if source and strand.cause in _BESIDE_ITS_SOURCE:
        return source.above
    return source
