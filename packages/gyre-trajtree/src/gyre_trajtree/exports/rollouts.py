"""Owns the view of samples that group-relative trainers share: one prompt, one masked response, numbers for groups.

Invariant: prompt and response together are the trajectory's tokens, and the response starts with its first target.
Trajectories of one execution share its reward, its advantage and its numbers, so that an execution counts once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gyre_trajtree.exports.files import ExportError
from gyre_trajtree.samples import Sample


@dataclass(slots=True)
class Place:
    """Where an execution stands in an export. Numbers count from 0, in the order of first appearance."""

    group: int
    """Number of its group in the export."""
    member: int
    """Number of the execution within its group."""
    execution: int
    """Number of the execution in the export."""
    parts: int = 0
    """Trajectories of the execution met so far."""


@dataclass(slots=True, frozen=True)
class Rollout:
    """One sample whose execution has a group, a reward and an advantage. L = tokens of the trajectory."""

    sample: Sample
    group: int
    member: int
    execution: int
    part: int
    """Number of the trajectory within its execution, from 0."""
    prompt: int
    """Tokens before the first target."""
    mask: np.ndarray
    """int8 [L]: 1 where the token is a target."""
    logprobs: np.ndarray
    """float32 [L]: behaviour log-probs, 0 where none is recorded: these trainers take no gaps."""

    @property
    def versions(self) -> list[int]:
        """Weight versions that sampled the targets, ascending; -1 stands for an unknown one."""
        row = self.sample.trajectory
        return np.unique(row.versions[row.targets]).tolist()


def rollouts(samples: Iterable[Sample], format: str) -> Iterator[Rollout]:
    """The samples in their order, numbered. Raises ExportError for an execution without an advantage."""
    groups: dict[str, list[Place]] = {}
    places: dict[str, Place] = {}
    for sample in samples:
        if sample.group is None or sample.reward is None or sample.advantage is None:
            missing = "group" if sample.group is None else "reward"
            raise ExportError(
                f"execution {sample.execution} has no {missing}, so no advantage, which {format} needs; "
                "export parquet or jsonl instead"
            )
        if sample.execution not in places:
            members = groups.setdefault(sample.group, [])
            group = members[0].group if members else len(groups) - 1
            places[sample.execution] = Place(group, len(members), len(places))
            members.append(places[sample.execution])
        place = places[sample.execution]
        yield _rollout(sample, place)
        place.parts += 1


def _rollout(sample: Sample, place: Place) -> Rollout:
    row = sample.trajectory
    return Rollout(
        sample,
        place.group,
        place.member,
        place.execution,
        place.parts,
        prompt=int(row.targets.argmax()),
        mask=row.targets.astype(np.int8),
        logprobs=np.where(np.isnan(row.logprobs), np.float32(0), row.logprobs),
    )
