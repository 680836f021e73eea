"""Data dispatch (section 2.2): how many groups enter and when, what they are called, and the staleness identity.

The queue is filled to Q_b = (phi + mu)*B groups at the start. Boundary dispatch lets mu*B groups follow each publication but
the last; continuous dispatch lets B groups follow each step, at the version that is published by then. Summed over n whole
bursts, for any order of consumption,

    sum of staleness + age given up by replacements = n*mu*B*E[d] - A_end,

where E[d] is phi + (mu-1)/2 (boundary, Eq. 2) or phi + 3*(mu-1)/2 (continuous), and A_end the summed age of the groups
outstanding right after the n-th publication's refill (appendix A.2).
"""

from __future__ import annotations

import re

from .errors import ProtocolError
from .events import Event, Published, Started, StepTrained
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


def groups_dispatched(settings: SchedulerSettings, event: Event) -> int:
    """Groups that enter when the scheduler takes this event, replacements apart."""
    continuous = settings.dispatch == "continuous"
    match event:
        case Started():
            return settings.queue_depth
        case Published(version) if version < settings.steps:
            return settings.groups_per_step if continuous else settings.burst_groups
        case StepTrained(step) if continuous and step < burst_end(settings, step - 1):
            return settings.groups_per_step
        case _:
            return 0


def groups_of_run(settings: SchedulerSettings) -> int:
    """Groups that enter in a whole run, replacements apart."""
    events: list[Event] = [Started()]
    for step in range(1, settings.steps + 1):
        events.append(StepTrained(step))
        if step == burst_end(settings, step - 1):
            events.append(Published(step))
    return sum(groups_dispatched(settings, event) for event in events)


def burst_end(settings: SchedulerSettings, version: int) -> int:
    """The version that ends the burst in which `version` is the trainer's version."""
    return min((version // settings.mu + 1) * settings.mu, settings.steps)
