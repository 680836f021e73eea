"""Owns admission: which paths of a tree are trained, and which of their outputs (paper section 5.3).

Invariants: no output trains in two draws (a shared token trains once); a draw's probability is proportional to
what is left to train on its path; equal generator states draw the same.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gyre_trajtree.errors import TrajtreeError
from gyre_trajtree.roles import AUXILIARY, ROLES, RoleDecision
from gyre_trajtree.tree import Node, Tree, dead_tips


@dataclass(slots=True, frozen=True)
class Draw:
    """One admitted path, not yet expanded."""

    role: str
    path: tuple[Node, ...]
    """From the root to the last node."""
    targets: tuple[bool, ...]
    """Aligned with `path`: whether the node's trainable output trains here."""


def execution_rng(seed: int, execution: str) -> np.random.Generator:
    """The generator of one execution's draws: the same whatever is drawn before it.

    Raises TrajtreeError for a negative seed.
    """
    if seed < 0:
        raise TrajtreeError(f"the seed must be at least 0, not {seed}")
    return np.random.default_rng([seed, zlib.crc32(execution.encode())])


def draw(
    tree: Tree,
    roles: Mapping[str, RoleDecision],
    j_max: int | None,
    rng: np.random.Generator,
    train_auxiliary: bool = False,
) -> list[Draw]:
    """At most `j_max` paths (None: all) by role priority, each in proportion to its unmasked tokens.

    `roles` is what `infer_roles` returned for this tree. Abandoned attempts (`dead_tips`) are never trained:
    when nothing else extends the path before one, that path takes its place. Auxiliary leaves are drawn only
    with `train_auxiliary`, after all others. Raises TrajtreeError for a negative `j_max` or a leaf without role.
    """
    if j_max is not None and j_max < 0:
        raise TrajtreeError(f"j_max must be at least 0, or None for all trajectories, not {j_max}")
    classes: dict[str, list[Node]] = {role: [] for role in ROLES if train_auxiliary or role != AUXILIARY}
    for end, leaf in live_ends(tree):
        if leaf.id not in roles:
            raise TrajtreeError(f"leaf {leaf.id} has no role; pass what infer_roles returned for this tree")
        if (role := roles[leaf.id].role) not in ROLES:
            raise TrajtreeError(
                f"leaf {leaf.id} has the unknown role {role!r}; choose one of {', '.join(ROLES)}"
            )
        if role in classes:
            classes[role].append(end)
    unmasked = _Unmasked(tree)
    drawn: list[Draw] = []
    for role, ends in classes.items():
        places = unmasked.places(ends)
        while j_max is None or len(drawn) < j_max:
            number = unmasked.pick(places, rng)
            if number is None:
                break
            drawn.append(Draw(role, *unmasked.mask(ends[number])))
    return drawn


def live_ends(tree: Tree) -> Iterator[tuple[Node, Node]]:
    """(last node, leaf that names its role) of each path without abandoned attempts, in the order of the log.

    The two differ where only abandoned attempts extend a path: it ends before them.
    """
    dead = dead_tips(tree)
    ended: set[int] = set()
    for leaf in tree.leaves():
        end: Node | None = leaf
        if leaf.id in dead:
            end = leaf.parent
            if end is None or end.index in ended or any(child.id not in dead for child in end.children):
                continue
            ended.add(end.index)
        yield end, leaf


class _Unmasked:
    """Unmasked trainable tokens on the path of every node, kept up to date while paths are masked.

    Nodes are numbered in depth-first order, so that a subtree is one slice: masking an output lowers one slice. Masking
    goes from a root on, so that what is masked of a path is always its beginning: each node is masked once.
    """

    def __init__(self, tree: Tree) -> None:
        self._first, self._after = _depth_first(tree)
        counts, left = [0] * len(tree), np.zeros(len(tree), np.int64)
        for node in tree.nodes:
            above = counts[node.parent.index] if node.parent else 0
            counts[node.index] = above + node.trainable_count
        left[self._first] = counts
        self._left = left
        self._masked: dict[int, tuple[tuple[Node, ...], int]] = {}
        """For each masked node a path through it, and how many nodes of that path lead to it."""

    def places(self, ends: list[Node]) -> np.ndarray:
        """Depth-first numbers of nodes, which `pick` chooses from."""
        return np.array([self._first[end.index] for end in ends], np.int64)

    def pick(self, places: np.ndarray, rng: np.random.Generator) -> int | None:
        """Which of `places`, in proportion to the unmasked tokens of its path; None when none has any."""
        cumulative = self._left[places].cumsum()
        if not len(cumulative) or cumulative[-1] == 0:
            return None
        return int(cumulative.searchsorted(rng.integers(cumulative[-1]), side="right"))

    def mask(self, end: Node) -> tuple[tuple[Node, ...], tuple[bool, ...]]:
        """Mask the path of `end`; the path, and which of its outputs had unmasked tokens until now."""
        fresh: list[Node] = []
        step: Node | None = end
        while step and step.index not in self._masked:
            fresh.append(step)
            step = step.parent
        fresh.reverse()
        through, masked = self._masked[step.index] if step else ((), 0)
        path = through[:masked] + tuple(fresh)
        for length, node in enumerate(fresh, masked + 1):
            self._masked[node.index] = path, length
            if count := node.trainable_count:
                self._left[self._first[node.index] : self._after[node.index]] -= count
        return path, (False,) * masked + tuple(node.trainable_count > 0 for node in fresh)


def _depth_first(tree: Tree) -> tuple[list[int], list[int]]:
    """Depth-first number of each node, and the number after the last node of its subtree, by node index."""
    size = [1] * len(tree)
    for node in reversed(tree.nodes):  # a node comes after its parent in the log
        if node.parent:
            size[node.parent.index] += size[node.index]
    first, after, following = [0] * len(tree), [0] * len(tree), 0
    free = [0] * len(tree)
    for node in tree.nodes:
        start = free[node.parent.index] if node.parent else following
        first[node.index], after[node.index] = start, start + size[node.index]
        free[node.index] = start + 1
        if node.parent:
            free[node.parent.index] = after[node.index]
        else:
            following = after[node.index]
    return first, after
