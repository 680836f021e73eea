"""How long executions take, in hours: the paper's two-level lognormal, or samples of a real run.

Invariant: a workload is a pure function of (seed, group, size), so every policy meets the same executions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from .errors import WorkloadError


class Workload(Protocol):
    """Durations of the executions of one group."""

    def hours(self, seed: int, group: int, size: int) -> list[float]:
        """`size` durations in hours, each above 0."""

    def query(self, seed: int, group: int) -> Hashable:
        """What the group's executions work on; groups of the same query take similar times."""


@dataclass(frozen=True)
class TwoLevelLognormal:
    """log X = mean_log + between * g(query) + within * e(execution), g and e standard normal, X capped.

    The defaults are fitted to three figures of section 6.2: mean 1.93 h, mean of the longest of 16 2.96 h,
    9.51 % of groups at 4 h or more.
    """

    mean_log: float = 0.60429
    between: float = 0.20250
    within: float = 0.25891
    cap_hours: float = 4.5
    queries: int = 0
    """Queries of the data set, in another order each epoch; 0: no query comes twice."""

    def __post_init__(self):
        spreads = 0 <= self.between <= 10 and 0 <= self.within <= 10
        if not spreads or not 0 < self.cap_hours < math.inf or not -100 <= self.mean_log <= 100:
            raise WorkloadError(
                "a lognormal workload needs between and within from 0 to 10, mean_log from -100 to 100, and a "
                "finite cap_hours above 0"
            )
        if not 0 <= self.queries <= MOST_QUERIES:
            raise WorkloadError(f"queries must be 0 to {MOST_QUERIES:,}, not {self.queries}")

    def query(self, seed: int, group: int) -> int:
        if not self.queries:
            return group
        return _epoch(seed, group // self.queries, self.queries)[group % self.queries]

    def hours(self, seed: int, group: int, size: int) -> list[float]:
        draw = random.Random(f"{seed}/{group}")
        level = draw.gauss(0, 1)
        if self.queries:
            level = random.Random(f"{seed}/query/{self.query(seed, group)}").gauss(0, 1)
        centre = self.mean_log + self.between * level
        return [min(math.exp(centre + self.within * draw.gauss(0, 1)), self.cap_hours) for _ in range(size)]


MOST_QUERIES = 10**6
MOST_HOURS = 10**6


@lru_cache(maxsize=4)
def _epoch(seed: int, number: int, queries: int) -> list[int]:
    """The order of an epoch's queries."""
    return random.Random(f"{seed}/epoch/{number}").sample(range(queries), queries)


@dataclass(frozen=True)
class SampledGroups:
    """Groups of a recorded run, drawn with replacement; members too, where a group has too few."""

    groups: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        if not self.groups or not all(self.groups):
            raise WorkloadError(
                "a sampled workload needs at least one group, each with at least one duration"
            )
        if not all(0 < hours <= MOST_HOURS for group in self.groups for hours in group):
            raise WorkloadError(f"sampled durations must be above 0 hours, and at most {MOST_HOURS:,}")

    def query(self, seed: int, group: int) -> int:
        return random.Random(f"{seed}/{group}").randrange(len(self.groups))

    def hours(self, seed: int, group: int, size: int) -> list[float]:
        draw = random.Random(f"{seed}/{group}")
        members = self.groups[draw.randrange(len(self.groups))]
        return draw.sample(members, size) if len(members) >= size else draw.choices(members, k=size)
