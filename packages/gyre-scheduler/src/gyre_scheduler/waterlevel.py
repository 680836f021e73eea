"""The waterlevel rule, Eq. 3 to 6 of section 4.2, as pure functions.

The unit everywhere is executions.
"""

from __future__ import annotations

from collections.abc import Iterable


def rollout_capacity(limits: Iterable[int], standalone: int) -> int:
    """Eq. 3: C = c_s + sum of c_j over the cells j in rollout, whose `limits` these are.

    C(k) of the paper is the value for the cells j >= k; lost cells may leave other gaps than a prefix.
    """
    return standalone + sum(limits)


def waterlevel(dispatched: int, terminated: int) -> int:
    """Eq. 4: W = d - f, queued and running executions."""
    return dispatched - terminated


def core_has_supply(ready_groups: int, wanted: int) -> bool:
    """Eq. 5 for the core: as many groups are ready as its batch waits for (one when streaming)."""
    return ready_groups >= max(wanted, 1)


def satellite_has_supply(unclaimed: int, joining: int) -> bool:
    """Eq. 5 for a satellite: an unclaimed micro-step for it and for each cell already on its way."""
    return unclaimed >= joining + 1


def may_leave(waterlevel: int, capacity_left: int, burst_is_ready: bool) -> bool:
    """Eq. 6: W <= C(k + 1).

    The last rollout capacity leaves only when the ready groups suffice for the burst: a group that turns out
    untrainable afterwards would need rollouts, and cells do not return within a burst.
    """
    return waterlevel <= capacity_left and (capacity_left > 0 or burst_is_ready)
