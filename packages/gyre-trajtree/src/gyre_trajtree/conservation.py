"""Owns the conservation law of tokens: sampled = trained + excluded, each exclusion with its reason (section 5.3).

Invariant: `account` answers only when the law holds and every target is a trainable token of the tree, in the
context it was sampled in, trained once. Every export adds its accounts to a `Ledger` and ends with `check`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gyre_trajtree.errors import AccountError
from gyre_trajtree.records import Call
from gyre_trajtree.roles import AUXILIARY, RoleDecision
from gyre_trajtree.rows import Trajectory
from gyre_trajtree.sampling import Draw, live_ends
from gyre_trajtree.tree import Node, Tree, dead_tips

OVER_J_MAX = "over-j-max"

REASONS = {
    "error": "the call failed; what it had sampled by then is no answer",
    "no-logprob": "no finite behaviour log-prob was recorded for the token",
    "no-context": "the token is the first of its path, so nothing predicts it",
    "aborted": "an attempt that was cut off and that the harness repeated",
    "retried": "a whole attempt that the harness repeated",
    "auxiliary": "only auxiliary leaves lie below, and these do not train",
    OVER_J_MAX: "on no path that was drawn",
    "unresolved": "the execution was assessed without a valid reward",
    "placeholder": "the execution left nothing to assess; its reward of 0 counts in its group's baseline alone",
    "unassessed": "the execution was never assessed, though others were",
    "not-consumed": "no training step took the execution",
    "late": "the call was recorded after its execution had closed",
    "rejected": "the call joins no tree: a repeated id, an unknown parent, another execution",
}
"""Every reason for which a sampled token is not trained, and what it means."""


@dataclass
class Ledger:
    """Where the sampled tokens of a run went, summed over executions."""

    sampled: int = 0
    trained: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    """Tokens by reason, a key of `REASONS`."""
    roles: Counter[str] = field(default_factory=Counter)
    """Trajectories admitted, by role."""

    def add(self, tokens: Mapping) -> None:
        """Add one execution's account (`account`)."""
        self.sampled += tokens["sampled"]
        self.trained += tokens["trained"]
        self.excluded.update(tokens["excluded"])

    def merge(self, other: "Ledger") -> None:
        """Add what another ledger holds, roles included."""
        self.sampled += other.sampled
        self.trained += other.trained
        self.excluded.update(other.excluded)
        self.roles.update(other.roles)

    def exclude(self, calls: Iterable[Call], reason: str) -> None:
        """Add calls that joined no tree ("late", "rejected")."""
        count = sum(len(call.output_ids) for call in calls)
        if count:
            self.add({"sampled": count, "trained": 0, "excluded": {reason: count}})

    def check(self) -> None:
        """Raise AccountError unless sampled = trained + excluded, each for a known reason."""
        if unknown := self.excluded.keys() - REASONS.keys():
            raise AccountError(f"tokens excluded for unknown reasons {sorted(unknown)}; see REASONS")
        if self.sampled != self.trained + self.excluded.total():
            raise AccountError(
                f"{self.sampled} sampled tokens, but {self.trained} trained and {self.excluded.total()} excluded"
            )


def account(
    tree: Tree,
    trajectories: Iterable[Draw | Trajectory],
    roles: Mapping[str, RoleDecision] | None = None,
    unselected: str = OVER_J_MAX,
) -> dict:
    """Where every sampled token of a tree went: {"sampled": n, "trained": n, "excluded": {reason: n}}.

    Reasons are keys of `REASONS`; "auxiliary" needs `roles`, and `unselected` names the rest.
    Raises AccountError when a token trains twice, a target is no trainable token of this tree, or a trajectory's
    tokens are not those the model saw.
    """
    trained = _trained_counts(tree, trajectories)
    left_out = left_out_by(tree, roles or {}, dead_tips(tree), unselected)
    excluded: Counter[str] = Counter()
    for node, used in zip(tree.nodes, trained, strict=True):
        _exclude_untrainable(node, excluded)
        excluded[left_out[node.index]] += node.trainable_count - used
    ledger = Ledger(
        sampled=sum(len(node.call.output_ids) for node in tree.nodes),
        trained=sum(trained),
        excluded=+excluded,
    )
    ledger.check()
    return {
        "sampled": ledger.sampled,
        "trained": ledger.trained,
        "excluded": dict(sorted(ledger.excluded.items())),
    }


def _exclude_untrainable(node: Node, excluded: Counter[str]) -> None:
    """Count the tokens that provenance keeps from training."""
    untrainable = len(node.trainable) - node.trainable_count
    if untrainable and node.call.finish != "error" and node.lacks_context:
        excluded["no-context"] += 1
        untrainable -= 1
    excluded["error" if node.call.finish == "error" else "no-logprob"] += untrainable


def _trained_counts(tree: Tree, trajectories: Iterable[Draw | Trajectory]) -> list[int]:
    """Targets of each node, checked against the tree: no token twice, none untrainable, all in their context."""
    used: dict[int, np.ndarray] = {}
    for trajectory in trajectories:
        if isinstance(trajectory, Draw):
            _mark_draw(tree, trajectory, used)
        else:
            _mark_row(tree, trajectory, used)
    counts = [0] * len(tree)
    for index, targets in used.items():
        counts[index] = int(np.count_nonzero(targets))
    return counts


def _mark_draw(tree: Tree, drawn: Draw, used: dict[int, np.ndarray]) -> None:
    for node, trains in zip(drawn.path, drawn.targets, strict=True):
        if node.index >= len(tree) or tree.nodes[node.index] is not node:
            raise AccountError(f"call {node.id} of a draw is no call of execution {tree.execution}")
        if trains:
            _mark(node, node.trainable, used)


def _mark_row(tree: Tree, row: Trajectory, used: dict[int, np.ndarray]) -> None:
    if row.execution != tree.execution or row.leaf not in tree:
        raise AccountError(f"trajectory {row.leaf} is of no call of execution {tree.execution}")
    if len(row.ids) != len(row.targets) or len(row.ids) > tree[row.leaf].end:
        raise AccountError(
            f"trajectory {row.leaf}: ids and targets must be of one length, at most its path's"
        )
    placed = 0
    for node in tree.path(tree[row.leaf]):
        for start, recorded in ((node.start, node.call.input_ids), (node.output_start, node.call.output_ids)):
            ids = row.ids[start : start + len(recorded)]
            if not np.array_equal(ids, recorded[: len(ids)]):
                raise AccountError(f"trajectory {row.leaf}: tokens differ from what call {node.id} recorded")
        sampled = slice(node.output_start, node.end)
        logprobs, versions = row.logprobs[sampled], row.versions[sampled]
        if not (
            np.array_equal(logprobs, node.call.logprobs[: len(logprobs)], equal_nan=True)
            and np.array_equal(versions, node.call.token_versions()[: len(versions)])
        ):
            raise AccountError(
                f"trajectory {row.leaf}: log-probs or versions differ from what call {node.id} recorded"
            )
        targets = row.targets[sampled]
        if count := int(np.count_nonzero(targets)):
            _mark(node, np.pad(targets, (0, len(node.trainable) - len(targets))), used)
            placed += count
    if placed != np.count_nonzero(row.targets):
        raise AccountError(f"trajectory {row.leaf}: a target lies outside what calls sampled")


def _mark(node: Node, targets: np.ndarray, used: dict[int, np.ndarray]) -> None:
    """Note targets (bool [m] over the node's output) as trained."""
    before = used.get(node.index)
    if np.any(targets > node.trainable) or (before is not None and np.any(targets & before)):
        raise AccountError(f"call {node.id}: a token trains twice or may not train at all")
    used[node.index] = targets if before is None else before | targets


def left_out_by(
    tree: Tree, roles: Mapping[str, RoleDecision], dead: Mapping[str, str], unselected: str
) -> list[str]:
    """By index of the call, why its trainable tokens are left out unless they are drawn, a key of `REASONS`.

    Abandoned attempts (`dead`, what `dead_tips` returned) have their own reason, calls below which every live path is
    auxiliary have "auxiliary", all others `unselected`. A leaf without a role counts as one that may train.
    """
    reasons = [AUXILIARY] * len(tree)
    for end, leaf in live_ends(tree):
        step: Node | None = end
        if leaf.id in roles and roles[leaf.id].role == AUXILIARY:
            continue
        while step and reasons[step.index] == AUXILIARY:
            reasons[step.index] = unselected
            step = step.parent
    return [dead.get(node.id, reason) for node, reason in zip(tree.nodes, reasons, strict=True)]
