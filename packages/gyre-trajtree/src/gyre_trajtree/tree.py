"""Owns the trajectory tree of one execution: nodes, their order, their paths' tokens (paper section 5.1).

Invariant: for every call, `path_tokens(node)` is byte for byte the prompt the model saw followed by what it
sampled. A node stores only what it adds to its parent's path, so a tree's size is that of its unique tokens.
Independently sampled outputs stay separate nodes, equal tokens or not.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gyre_trajtree.errors import TreeError
from gyre_trajtree.prefixes import PrefixIndex
from gyre_trajtree.records import Call


class Node:
    """One call in its tree. Positions count tokens from the start of the root's prompt."""

    __slots__ = (
        "call",
        "parent",
        "root",
        "children",
        "index",
        "start",
        "output_start",
        "end",
        "trainable",
        "trainable_count",
    )

    def __init__(self, call: Call, parent: "Node | None", index: int) -> None:
        self.call = call
        """The call, `parent` set and `input_ids` cut to the tokens after the parent's path."""
        self.parent = parent
        self.root: Node = parent.root if parent else self
        self.children: list[Node] = []
        self.index = index
        """Place of the call in the execution's log, from 0."""
        self.start = parent.end if parent else 0
        """Length of the parent's path."""
        self.output_start = self.start + len(call.input_ids)
        """Position of the first sampled token."""
        self.end = self.output_start + len(call.output_ids)
        """Length of this node's path."""
        self.trainable = trainable_mask(call)
        """bool [m] over the output: tokens that may be targets by provenance (paper section 5.3)."""
        if self.lacks_context:
            self.trainable[0] = False
        self.trainable_count = int(np.count_nonzero(self.trainable))

    @property
    def id(self) -> str:
        return self.call.id

    @property
    def lacks_context(self) -> bool:
        """Whether the first sampled token opens its path, so that nothing predicts it."""
        return self.output_start == 0 and self.end > 0

    def __repr__(self) -> str:
        return f"Node({self.id!r}, parent={self.parent and self.parent.id!r}, end={self.end})"


@dataclass(slots=True, frozen=True)
class RejectedCall:
    """A call that joins no tree, and why, in one line."""

    call: Call
    reason: str


class Tree:
    """The calls of one execution as a tree (a forest: requests that extend nothing are roots)."""

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.nodes: list[Node] = []
        """In the order of the log."""
        self.roots: list[Node] = []
        self._by_id: dict[str, Node] = {}
        self._prefixes = PrefixIndex()
        """Filled when a prompt is first looked for: calls with known parents need none."""

    @classmethod
    def from_calls(
        cls,
        calls: Iterable[Call],
        rejected: list[RejectedCall] | None = None,
        execution: str | None = None,
    ) -> "Tree":
        """The tree of one execution's calls, given in the order of the log; None: the first call's execution.

        A call that cannot join (another execution's, a repeated id, a parent that no earlier call has) is
        appended to `rejected` and the rest is built; the tree may then be empty. Raises TreeError for such a
        call without that list, and for no calls at all.
        """
        tree: Tree | None = None
        for call in calls:
            if tree is None:
                tree = cls(call.execution if execution is None else execution)
            try:
                tree.add(call)
            except TreeError as error:
                if rejected is None:
                    raise
                rejected.append(RejectedCall(call, str(error)))
        if tree is None:
            raise TreeError("a tree needs at least one call; this execution recorded none")
        return tree

    def add(self, call: Call) -> Node:
        """Append one call: at its recorded parent, else at the longest token prefix of its prompt.

        Raises TreeError, the tree unchanged, for a call that cannot join.
        """
        if call.execution != self.execution:
            raise TreeError(f"call {call.id} belongs to execution {call.execution}, not to {self.execution}")
        if call.id in self._by_id:
            raise TreeError(f"call {call.id} is recorded twice in execution {self.execution}")
        if call.parent == call.id:
            raise TreeError(f"call {call.id} names itself as its parent")
        if call.parent is not None:
            parent = self._by_id.get(call.parent)
            if parent is None:
                raise TreeError(
                    f"call {call.id} names parent {call.parent}, which no earlier call of this log has"
                )
        else:
            parent = self.longest_prefix(call.input_ids)
            if parent is not None:
                call = replace(call, parent=parent.id, input_ids=call.input_ids[parent.end :].copy())
        node = Node(call, parent, len(self.nodes))
        self.nodes.append(node)
        self._by_id[call.id] = node
        (parent.children if parent else self.roots).append(node)
        return node

    def longest_prefix(self, prompt: np.ndarray) -> Node | None:
        """The node with the longest path that `prompt` (int32 [n]) extends; the latest of equally long ones.

        A node that sampled nothing has no answer to extend and is never returned.
        """
        for node in self.nodes[len(self._prefixes) :]:
            self._prefixes.add(node)
        return self._prefixes.longest(prompt)

    def leaves(self) -> list[Node]:
        """Nodes that no other call extends, in the order of the log."""
        return [node for node in self.nodes if not node.children]

    def path(self, node: Node) -> list[Node]:
        """Nodes from the root to `node`, both included."""
        nodes = []
        step: Node | None = node
        while step:
            nodes.append(step)
            step = step.parent
        return nodes[::-1]

    def path_tokens(self, node: Node) -> np.ndarray:
        """int32 [node.end]: the prompt the model saw at this call, then what it sampled."""
        parts = []
        for step in self.path(node):
            parts += (step.call.input_ids, step.call.output_ids)
        return np.concatenate(parts)

    def below(self, node: Node) -> Iterator[Node]:
        """`node` and every node under it."""
        stack = [node]
        while stack:
            step = stack.pop()
            yield step
            stack += step.children

    def __getitem__(self, call_id: str) -> Node:
        return self._by_id[call_id]

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._by_id

    def __len__(self) -> int:
        return len(self.nodes)


def trainable_mask(call: Call) -> np.ndarray:
    """bool [m]: output tokens with a finite behaviour log-prob, in a call that did not end in an error."""
    if call.finish == "error":
        return np.zeros(len(call.output_ids), bool)
    return np.isfinite(call.logprobs)


def dead_tips(tree: Tree) -> dict[str, str]:
    """Leaves that an attempt which the harness retried left behind, with why: {call id: reason}.

    A leaf is one when a later call says it repeats it (`attempt_of`), or when it was aborted and a later sibling that
    answered asked the same, or the same and more: some harnesses repeat what they had of a broken answer and say that it
    was cut off. Reason: "aborted", or "retried" when the lost attempt was whole.
    """
    repeated = {
        name
        for node in tree.nodes
        if (name := node.call.attempt_of) in tree and name != node.id and _before(tree[name], node)
    }
    latest = _latest_answers(tree)
    reasons = {}
    for node in tree.nodes:
        if node.children:
            continue
        aborted = node.call.finish == "abort"
        if node.id in repeated or (aborted and latest[_request(node)] > node.index):
            reasons[node.id] = "aborted" if aborted else "retried"
    return reasons


def _before(attempt: Node, retry: Node) -> bool:
    """An attempt that was aborted may be recorded after its retry: engines take their time to let go of a call."""
    return attempt.index < retry.index or attempt.call.finish == "abort"


def _latest_answers(tree: Tree) -> dict[tuple[int, bytes], int]:
    """Index of the last call that answered each request which an aborted call made, or one that begins like it."""
    aborted = [node for node in tree.nodes if node.call.finish == "abort"]
    latest = {_request(node): node.index for node in aborted}
    lengths: dict[int, set[int]] = {}
    for node in aborted:
        lengths.setdefault(_above(node), set()).add(len(node.call.input_ids))
    for node in tree.nodes if aborted else ():
        if node.call.finish in ("stop", "length"):
            for length in lengths.get(_above(node), ()):
                request = _above(node), node.call.input_ids[:length].tobytes()
                if request in latest:
                    latest[request] = node.index
    return latest


def _request(node: Node) -> tuple[int, bytes]:
    return _above(node), node.call.input_ids.tobytes()


def _above(node: Node) -> int:
    return node.parent.index if node.parent else -1
