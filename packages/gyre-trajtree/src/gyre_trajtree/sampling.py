"""Owns admission: which paths of a tree are trained, and which of their tokens (paper section 5.3).

Invariants: the targets of an execution's trajectories are disjoint (a shared token trains once); sampled
tokens = trained + excluded, each exclusion with a reason (`account`). Equal generator states draw the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_trajtree.errors import AccountError
from gyre_trajtree.roles import AUXILIARY, ROLES, RoleDecision
from gyre_trajtree.tree import Node, Tree, dead_tips


@dataclass(slots=True, eq=False)
class Trajectory:
    """One admitted path, cut after its last target, with everything the trainer needs. L = len(ids)."""

    execution: str
    leaf: str
    """Call id of the path's last node."""
    role: str
    ids: np.ndarray
    """int32 [L]: tokens as the model saw and sampled them."""
    targets: np.ndarray
    """bool [L]: tokens that train here; token t is predicted from ids[:t]."""
    logprobs: np.ndarray
    """float32 [L]: behaviour log-probs in nats of sampled tokens, NaN where there is none."""
    versions: np.ndarray
    """int32 [L]: weight version that sampled the token, -1 where not sampled or unknown."""


def sample_trajectories(
    tree: Tree,
    roles: Mapping[str, RoleDecision],
    j_max: int,
    rng: np.random.Generator,
    train_auxiliary: bool = False,
) -> list[Trajectory]:
    """At most `j_max` trajectories by role priority, each leaf drawn in proportion to its unmasked tokens.

    `roles` is what `infer_roles` returned for this tree. Abandoned attempts (`dead_tips`) are never trained:
    when nothing else extends the path before one, that path takes its place. Auxiliary leaves are drawn only
    with `train_auxiliary`, after all others.
    """
    classes: dict[str, list[list[Node]]] = {
        role: [] for role in ROLES if train_auxiliary or role != AUXILIARY
    }
    for role_of, path in _live_paths(tree).values():
        role = roles[role_of].role
        if role in classes:
            classes[role].append(path)
    unmasked = [int(np.count_nonzero(node.trainable)) for node in tree.nodes]
    drawn: list[Trajectory] = []
    for role, paths in classes.items():
        while len(drawn) < j_max:
            path = _draw(paths, unmasked, rng)
            if path is None:
                break
            drawn.append(_materialise(tree.execution, role, path, unmasked))
            for node in path:
                unmasked[node.index] = 0
    return drawn


def account(
    tree: Tree,
    trajectories: Iterable[Trajectory],
    roles: Mapping[str, RoleDecision] | None = None,
    unselected: str = "over-j-max",
) -> dict:
    """Where every sampled token of a tree went: {"sampled": n, "trained": n, "excluded": {reason: n}}.

    Reasons: "error" (the call failed), "no-logprob", "aborted" and "retried" (attempts the harness repeated),
    "auxiliary" (only auxiliary leaves lie below; needs `roles`), and `unselected` for the rest.
    Raises AccountError when a token trains twice or a target is no trainable token of this tree.
    """
    trained = _trained_counts(tree, trajectories)
    dead = dead_tips(tree)
    eligible = _eligible(tree, roles or {})
    excluded: Counter[str] = Counter()
    for node, used in zip(tree.nodes, trained, strict=True):
        trainable = int(np.count_nonzero(node.trainable))
        untrainable = "error" if node.call.finish == "error" else "no-logprob"
        excluded[untrainable] += len(node.trainable) - trainable
        left = dead.get(node.id) or (unselected if node.index in eligible else "auxiliary")
        excluded[left] += trainable - used
    sampled = sum(len(node.call.output_ids) for node in tree.nodes)
    if sampled != sum(trained) + excluded.total():
        raise AccountError(
            f"execution {tree.execution}: {sampled} sampled tokens, but {sum(trained)} trained"
        )
    return {
        "sampled": sampled,
        "trained": sum(trained),
        "excluded": {reason: count for reason, count in sorted(excluded.items()) if count},
    }


def _live_paths(tree: Tree) -> dict[int, tuple[str, list[Node]]]:
    """Paths without abandoned attempts: {index of the last node: (leaf that names its role, path)}."""
    dead = dead_tips(tree)
    paths: dict[int, tuple[str, list[Node]]] = {}
    for leaf in tree.leaves():
        path = tree.path(leaf)
        if leaf.id in dead:
            path.pop()
            if not path or any(child.id not in dead for child in path[-1].children):
                continue
        paths.setdefault(path[-1].index, (leaf.id, path))
    return paths


def _draw(
    paths: Sequence[list[Node]], unmasked: Sequence[int], rng: np.random.Generator
) -> list[Node] | None:
    """One path with probability proportional to its unmasked tokens; None when none has any."""
    counts = [sum(unmasked[node.index] for node in path) for path in paths]
    total = sum(counts)
    if total == 0:
        return None
    ticket = int(rng.integers(total))
    for path, count in zip(paths, counts, strict=True):
        if ticket < count:
            return path
        ticket -= count
    raise AssertionError("the ticket is below the total")


def _materialise(execution: str, role: str, path: list[Node], unmasked: Sequence[int]) -> Trajectory:
    """Expand a path into aligned arrays; its targets are the tokens still unmasked."""
    length = path[-1].end
    ids = np.empty(length, np.int32)
    targets = np.zeros(length, bool)
    logprobs = np.full(length, np.nan, np.float32)
    versions = np.full(length, -1, np.int32)
    for node in path:
        ids[node.start : node.output_start] = node.call.input_ids
        span = slice(node.output_start, node.end)
        ids[span] = node.call.output_ids
        logprobs[span] = node.call.logprobs
        versions[span] = node.call.token_versions()
        if unmasked[node.index]:
            targets[span] = node.trainable
    cut = int(np.flatnonzero(targets)[-1]) + 1
    return Trajectory(execution, path[-1].id, role, ids[:cut], targets[:cut], logprobs[:cut], versions[:cut])


def _trained_counts(tree: Tree, trajectories: Iterable[Trajectory]) -> list[int]:
    """Targets of each node, checked one by one against the tree: no token twice, none untrainable."""
    used = [np.zeros(len(node.call.output_ids), np.int32) for node in tree.nodes]
    for trajectory in trajectories:
        placed = 0
        for node in tree.path(tree[trajectory.leaf]):
            targets = trajectory.targets[node.output_start : node.end]
            used[node.index][: len(targets)] += targets
            placed += int(np.count_nonzero(targets))
        if placed != np.count_nonzero(trajectory.targets):
            raise AccountError(f"trajectory {trajectory.leaf}: a target lies outside what calls sampled")
    for node, counts in zip(tree.nodes, used, strict=True):
        if np.any(counts > node.trainable):
            raise AccountError(f"call {node.id}: a token trains twice or may not train at all")
    return [int(counts.sum()) for counts in used]


def _eligible(tree: Tree, roles: Mapping[str, RoleDecision]) -> set[int]:
    """Indices of the nodes on some live path that is not auxiliary; all live ones without roles."""
    return {
        node.index
        for leaf, path in _live_paths(tree).values()
        if leaf not in roles or roles[leaf].role != AUXILIARY
        for node in path
    }
