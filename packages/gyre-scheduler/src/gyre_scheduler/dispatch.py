"""Boundary dispatch (section 2.2): how many groups enter, what they are called, and the staleness identity.

The queue is filled to Q_b = (phi + mu)*B groups at the start, and mu*B groups follow each publication but the
last. Summed over n whole bursts, for any order of consumption,

    sum of staleness + age given up by replacements = n*mu*B*(phi + (mu-1)/2) - A_end,

where A_end is the summed age of the groups outstanding right after the n-th refill (appendix A.2).
"""

from __future__ import annotations

import re

from .errors import ProtocolError
from .settings import SchedulerSettings

NAME = re.compile(r"g([0-9]{5,})-[0-9]+")


def execution_names(group: int, size: int) -> list[str]:
    """Names of a group's executions: g00012-0, g00012-1, ..."""
    return [f"g{group:05d}-{member}" for member in range(size)]


def group_of(execution: str) -> int:
    """The group of an execution that `execution_names` named; ProtocolError for any other text."""
    match = NAME.fullmatch(execution)
    if match is None:
        raise ProtocolError(
            f"{execution!r} does not name an execution: g, the group's number, -, the member's"
        )
    return int(match[1])


def groups_to_dispatch(settings: SchedulerSettings, published: int) -> int:
    """Groups that enter when `published` is (or at the start, 0) the published version."""
    if published == 0:
        return settings.queue_depth
    return 0 if published == settings.steps else settings.burst_groups


def burst_end(settings: SchedulerSettings, version: int) -> int:
    """The version that ends the burst in which `version` is the trainer's version."""
    return min((version // settings.mu + 1) * settings.mu, settings.steps)
