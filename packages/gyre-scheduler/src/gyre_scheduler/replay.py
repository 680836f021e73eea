"""Replay of a recorded run: the same events through a fresh scheduler give the same actions."""

from __future__ import annotations

from collections.abc import Iterable

from .actions import Action
from .errors import ReplayDiverged
from .events import Event
from .scheduler import Scheduler
from .settings import SchedulerSettings


def replay(settings: SchedulerSettings, log: Iterable[tuple[Event, list[Action]]]) -> Scheduler:
    """The scheduler after the log. ReplayDiverged names the first event whose actions differ."""
    scheduler = Scheduler(settings)
    for number, (event, recorded) in enumerate(log):
        actions = scheduler.handle(event)
        if actions != recorded:
            raise ReplayDiverged(f"event {number}, {event}: recorded {recorded}, now {actions}")
    return scheduler
