"""Owns materialisation: drawn paths as arrays for a trainer (paper sections 5.1, 5.3).

Invariant: a row's tokens are exactly what the model saw and sampled, in that order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gyre_trajtree.roles import RoleDecision
from gyre_trajtree.sampling import Draw, draw
from gyre_trajtree.tree import Tree


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


def flat_row(execution: str, draw: Draw) -> Trajectory:
    """The path of a draw as aligned arrays, cut after its last target."""
    length = draw.path[-1].end
    ids = np.empty(length, np.int32)
    targets = np.zeros(length, bool)
    logprobs = np.full(length, np.nan, np.float32)
    versions = np.full(length, -1, np.int32)
    for node, trains in zip(draw.path, draw.targets, strict=True):
        ids[node.start : node.output_start] = node.call.input_ids
        span = slice(node.output_start, node.end)
        ids[span] = node.call.output_ids
        logprobs[span] = node.call.logprobs
        versions[span] = node.call.token_versions()
        if trains:
            targets[span] = node.trainable
    cut = int(np.flatnonzero(targets)[-1]) + 1
    return Trajectory(
        execution, draw.path[-1].id, draw.role, ids[:cut], targets[:cut], logprobs[:cut], versions[:cut]
    )


def sample_trajectories(
    tree: Tree,
    roles: Mapping[str, RoleDecision],
    j_max: int | None,
    rng: np.random.Generator,
    train_auxiliary: bool = False,
) -> list[Trajectory]:
    """The flat rows of what `draw` draws."""
    return [flat_row(tree.execution, drawn) for drawn in draw(tree, roles, j_max, rng, train_auxiliary)]
