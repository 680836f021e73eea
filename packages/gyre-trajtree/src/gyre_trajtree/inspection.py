"""Owns what people and tests ask of a recorded run: its executions, tree summaries, replay digests."""

import hashlib
from collections import Counter
from collections.abc import Iterable

from gyre_trajtree.executions import RecordedExecution, executions
from gyre_trajtree.records import Record
from gyre_trajtree.roles import infer_roles
from gyre_trajtree.tree import Tree


def inspect(records: Iterable[Record], execution: str | None = None) -> dict:
    """Summary of a run, or of one execution of it, ready for JSON.

    {"executions": [{"id", "calls", "leaves", "unique_tokens", "expanded_tokens", "roles": {role: leaves},
    "reward"}], "totals": the same without "id", rewards as "rewarded" (count) and "mean_reward"}.
    Expanded tokens are those of every root-to-leaf path written out on its own.
    """
    rows = [
        _summary(recorded)
        for recorded in executions(records).values()
        if execution is None or recorded.id == execution
    ]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    counted = ("calls", "leaves", "unique_tokens", "expanded_tokens")
    totals: dict = {"executions": len(rows)} | {key: sum(row[key] for row in rows) for key in counted}
    totals["roles"] = dict(sum((Counter(row["roles"]) for row in rows), Counter()))
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


def _summary(recorded: RecordedExecution) -> dict:
    row = {"id": recorded.id, "calls": 0, "leaves": 0, "unique_tokens": 0, "expanded_tokens": 0, "roles": {}}
    if recorded.calls:
        tree = Tree.from_calls(recorded.calls)
        leaves = tree.leaves()
        row |= {
            "calls": len(tree),
            "leaves": len(leaves),
            "unique_tokens": sum(node.end - node.start for node in tree.nodes),
            "expanded_tokens": sum(leaf.end for leaf in leaves),
            "roles": dict(Counter(decision.role for decision in infer_roles(tree).values())),
        }
    return row | {"reward": recorded.reward}
