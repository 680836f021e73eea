"""Owns the segments of prefix-shared rows: what drawn paths have in common, and which paths share a row (section 5.1).

Invariant: the segments from a path's start to its last one spell the path. Each is a stretch of one call's tokens; two
paths run through one segment exactly as far as they cannot differ: through the same calls, or through equal tokens of
prompts that continue one path. Sampled tokens are shared only as the same call's, since each call may train.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gyre_trajtree.prefixes import common
from gyre_trajtree.tree import Node


@dataclass(slots=True, eq=False)
class Segment:
    """Places `start` to `end` of a path, at least one token, all of them tokens of `node`."""

    node: Node
    start: int
    end: int
    parent: "Segment | None"
    """The segment that ends where this one starts."""
    order: int
    """Depth-first number: a segment's subtree follows it without a gap."""


def segments_of(paths: Sequence[tuple[Sequence[Node], int]]) -> list[Segment]:
    """The last segment of each path, given as its nodes and its length in tokens (at least one)."""
    below = _used_children(paths)
    last: dict[int, Segment | None] = {}
    order = 0
    pending = [(group, 0, None) for group in reversed(_alike(below.get(-1, ()), 0))]
    while pending:
        group, start, parent = pending.pop()
        first = group[0]
        alone = len(group) == 1
        end = first.end if alone else start + min(_shared(first, other, start) for other in group[1:])
        if end > start:
            parent = Segment(first, start, end, parent, order)
            order += 1
        if alone:
            last[first.index] = parent
            group = below.get(first.index, ())
        pending += [(alike, end, parent) for alike in reversed(_alike(group, end))]
    return [last[_last_node(nodes, length).index] for nodes, length in paths]


def share_out(leaves: Sequence[Segment], lengths: Sequence[int], budget: int | None) -> list[list[int]]:
    """Which paths (indices, ascending) make up each row of at most `budget` tokens, by their last segments and lengths.

    Longest trees first, then depth first; each path goes where it adds the fewest tokens and leaves the least room.
    A path over the budget is alone.
    """
    if budget is None:
        return [list(range(len(leaves)))] if leaves else []
    longest: dict[Segment, int] = {}
    roots = [_root(leaf) for leaf in leaves]
    for root, length in zip(roots, lengths, strict=True):
        longest[root] = max(length, longest.get(root, 0))
    rows: list[_Row] = []
    for path in sorted(
        range(len(leaves)),
        key=lambda i: (-longest[roots[i]], roots[i].order, leaves[i].order, -lengths[i], i),
    ):
        costs = [row.cost(leaves[path], lengths[path]) for row in rows]
        fitting = [i for i, cost in enumerate(costs) if rows[i].size + cost <= budget]
        if fitting:
            chosen = rows[min(fitting, key=lambda i: (costs[i], -rows[i].size, i))]
        else:
            rows.append(chosen := _Row())
        chosen.add(path, leaves[path], lengths[path])
    return [sorted(row.paths) for row in rows]


class _Row:
    """Paths that share a row, and how far the row needs each segment."""

    def __init__(self) -> None:
        self.paths: list[int] = []
        self.size = 0
        self._ends: dict[Segment, int] = {}

    def cost(self, leaf: Segment, length: int) -> int:
        """Tokens that a path would add."""
        step: Segment | None = leaf
        while step and step not in self._ends:
            step = step.parent
        return max(0, length - self._ends[step]) if step else length

    def add(self, path: int, leaf: Segment, length: int) -> None:
        self.size += self.cost(leaf, length)
        self.paths.append(path)
        for segment, end in extents(leaf, length):
            if end <= self._ends.get(segment, 0):
                break
            self._ends[segment] = end


def extents(leaf: Segment, length: int) -> Iterable[tuple[Segment, int]]:
    """Segments of a path from its last to its first, each with the place where the path leaves it."""
    segment: Segment | None = leaf
    while segment:
        yield segment, length
        segment, length = segment.parent, segment.start


def _used_children(paths: Sequence[tuple[Sequence[Node], int]]) -> dict[int, list[Node]]:
    """Nodes that hold tokens of a path, or lead to them, by index of their parent (-1 for roots), in log order."""
    below: dict[int, dict[int, Node]] = {}
    for nodes, length in paths:
        for node in nodes:
            if node.start >= length:
                break
            below.setdefault(node.parent.index if node.parent else -1, {})[node.index] = node
    return {parent: [nodes[index] for index in sorted(nodes)] for parent, nodes in below.items()}


def _alike(nodes: Iterable[Node], place: int) -> list[list[Node]]:
    """Nodes by the prompt token at `place`, in order of appearance; what is sampled there is alike to nothing."""
    groups: dict[tuple[bool, int], list[Node]] = {}
    for node in nodes:
        prompted = place < node.output_start
        key = int(node.call.input_ids[place - node.start]) if prompted else node.index
        groups.setdefault((prompted, key), []).append(node)
    return list(groups.values())


def _shared(first: Node, other: Node, place: int) -> int:
    """Prompt tokens that two nodes which continue one path have in common from `place`."""
    return common(first.call.input_ids[place - first.start :], other.call.input_ids[place - other.start :])


def _last_node(nodes: Sequence[Node], length: int) -> Node:
    return next(node for node in nodes if node.end >= length)


def _root(segment: Segment) -> Segment:
    while segment.parent:
        segment = segment.parent
    return segment
