"""Owns what people and tests ask of a recorded run: where each call went, summaries, replay digests.

Invariant: an inspection's draws and its account are those of `sample_run` for the same log, `j_max` and seed,
so what is shown as trained is what would be trained. One execution is in memory at a time.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre_trajtree.admission import admit, refusal_of
from gyre_trajtree.conservation import OVER_J_MAX, REASONS, Ledger, left_out_by
from gyre_trajtree.contexts import contexts_of
from gyre_trajtree.executions import RecordedExecution
from gyre_trajtree.roles import ROLES, RoleDecision
from gyre_trajtree.sampling import Draw
from gyre_trajtree.strands import BRANCH_CAUSES, Strand, strands_of
from gyre_trajtree.tree import Node, RejectedCall, Tree, dead_tips

TRAINED = "trained"

_COUNTED = (
    "calls", "leaves", "roots", "dead_tips", "late_calls", "rejected_calls",
    "unique_tokens", "expanded_tokens", "sampled_tokens", "trained_tokens", "trajectories",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Inspection:
    """One execution with everything that is inferred from its calls."""

    recorded: RecordedExecution
    tree: Tree
    """Of the calls that can join one; empty when there are none."""
    rejected: list[RejectedCall]
    roles: dict[str, RoleDecision] = field(default_factory=dict)
    """By call id of the leaf."""
    dead: dict[str, str] = field(default_factory=dict)
    """Abandoned attempts, with why."""
    strands: list[Strand] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    """In the order in which they were drawn; none without the reward that training needs."""
    ends: dict[int, int] = field(default_factory=dict)
    """Number (from 1) of the draw that ends at a call, by index of the call."""
    fates: list[str] = field(default_factory=list)
    """What becomes of each call's trainable tokens, by index: "trained" or a key of REASONS."""
    ledger: Ledger = field(default_factory=Ledger)

    def trained(self, node: Node) -> int:
        """Tokens of this call that train."""
        return node.trainable_count if self.fates[node.index] == TRAINED else 0

    def drawn_at(self, strand: Strand) -> int | None:
        """Number (from 1) of the draw whose path ends in this strand; None when there is none."""
        ends = (self.ends[node.index] for node in reversed(strand.nodes) if node.index in self.ends)
        return next(ends, None)

    def summary(self) -> dict:
        """Figures ready for JSON; the keys are listed at `summarise`."""
        recorded, tree, leaves = self.recorded, self.tree, self.tree.leaves()
        last = recorded.states[-1] if recorded.states else None
        unique = sum(node.end - node.start for node in tree.nodes)
        expanded = sum(leaf.end for leaf in leaves)
        return {
            "id": recorded.id,
            "group": recorded.group,
            "task": recorded.task,
            "harness": recorded.harness,
            "state": last and last.state,
            "termination": last and last.termination,
            "calls": len(tree),
            "leaves": len(leaves),
            "roots": len(tree.roots),
            "dead_tips": len(self.dead),
            "late_calls": len(recorded.late),
            "rejected_calls": len(self.rejected),
            "unique_tokens": unique,
            "expanded_tokens": expanded,
            "saving": _saving(unique, expanded),
            "sampled_tokens": self.ledger.sampled,
            "trained_tokens": self.ledger.trained,
            "excluded_tokens": dict(sorted(self.ledger.excluded.items())),
            "trajectories": len(self.draws),
            "roles": _ordered(Counter(decision.role for decision in self.roles.values()), ROLES),
            "branches": _ordered(Counter(strand.cause for strand in self.strands), BRANCH_CAUSES),
            "assessment": recorded.designated and recorded.designated.status,
            "reward": recorded.reward,
        }


def inspect(
    recorded: RecordedExecution,
    j_max: int | None = 5,
    seed: int = 0,
    require_reward: bool | None = None,
) -> Inspection:
    """The tree of one execution, what is inferred from it, and what of it would train.

    `require_reward` leaves out an execution without a valid reward; None means that it does if the execution was
    assessed, as in a log that assesses no other.
    """
    refusal = refusal_of(recorded, recorded.assessed if require_reward is None else require_reward)
    admitted = admit(recorded, j_max, seed, refusal)
    tree = admitted.tree
    found = Inspection(
        recorded, tree, admitted.rejected, admitted.roles, draws=admitted.draws, ledger=admitted.ledger
    )
    if tree.nodes:
        found.dead = dead_tips(tree)
        found.strands = strands_of(tree, contexts_of(tree, recorded.prompt), found.roles, found.dead)
        found.ends = {drawn.path[-1].index: number for number, drawn in enumerate(found.draws, 1)}
        found.fates = _fates(found, refusal or OVER_J_MAX)
    return found


def summarise(inspections: Iterable[Inspection]) -> dict:
    """Summary of inspected executions, ready for JSON: {"executions": [...], "totals": {...}}.

    Of each execution: "id", "group", "task", "harness", "state", "termination", "calls" (of the tree), "leaves",
    "roots", "dead_tips", "late_calls", "rejected_calls", "unique_tokens", "expanded_tokens" (every root-to-leaf
    path written out on its own), "saving" (1 - unique / expanded), "sampled_tokens", "trained_tokens",
    "excluded_tokens" {reason: n}, "trajectories", "roles" {role: leaves}, "branches" {cause: strands},
    "assessment" (status) and "reward". Totals: "executions", the sums, "rewarded" (count), "mean_reward".
    """
    rows = [each.summary() for each in inspections]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    totals: dict = {"executions": len(rows)} | {key: sum(row[key] for row in rows) for key in _COUNTED}
    for key, order in (("roles", ROLES), ("branches", BRANCH_CAUSES), ("excluded_tokens", sorted(REASONS))):
        counted: Counter[str] = Counter()
        for row in rows:
            counted.update(row[key])
        totals[key] = _ordered(counted, order)
    totals["saving"] = _saving(totals["unique_tokens"], totals["expanded_tokens"])
    totals["rewarded"] = len(rewards)
    totals["mean_reward"] = sum(rewards) / len(rewards) if rewards else None
    return {"executions": rows, "totals": totals}


def tree_digest(tree: Tree) -> str:
    """SHA-256 (hex) over structure, tokens, log-probs and versions; one log always replays to the same."""
    digest = hashlib.sha256()
    for node in tree.nodes:
        call = node.call
        digest.update(repr((call.id, call.parent, call.finish, call.attempt_of)).encode())
        for array in (call.input_ids, call.output_ids, call.logprobs, call.token_versions()):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.tobytes())
    return digest.hexdigest()


def _ordered(counted: Counter[str], order: Iterable[str]) -> dict[str, int]:
    return {name: counted[name] for name in order if name in counted}


def _saving(unique: int, expanded: int) -> float:
    return 1 - unique / expanded if expanded else 0.0


def _fates(found: Inspection, left: str) -> list[str]:
    """By index of the call: trained, or why its trainable tokens are left out."""
    fates = left_out_by(found.tree, found.roles, found.dead, left)
    for drawn in found.draws:
        for node, trains in zip(drawn.path, drawn.targets, strict=True):
            if trains:
                fates[node.index] = TRAINED
    return fates
