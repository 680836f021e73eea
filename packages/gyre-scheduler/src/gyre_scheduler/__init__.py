"""Elastic rollout/training scheduling as a pure state machine, its simulator, and its live runtime"""

from .scheduler import Scheduler
from .settings import SchedulerSettings

__all__ = ["Scheduler", "SchedulerSettings"]
