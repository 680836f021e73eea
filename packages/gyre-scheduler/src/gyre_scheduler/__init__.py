"""Elastic rollout/training scheduling as a pure state machine, its simulator, and its live runtime"""

from .errors import SchedulerError
from .scheduler import Scheduler
from .settings import SchedulerSettings

__all__ = ["Scheduler", "SchedulerError", "SchedulerSettings"]
