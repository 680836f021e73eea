"""The waterlevel rule, Eq. 3 to 6 of section 4.2, as pure functions.

The unit everywhere is executions.
"""

from __future__ import annotations

from collections.abc import Sequence


def rollout_capacity(limits: Sequence[int], standalone: int, training: int) -> int:
    """Eq. 3: C(k) = c_s + sum of c_j over j >= k, the capacity left with the first k cells in training."""
    return standalone + sum(limits[training:])


def thresholds(limits: Sequence[int], standalone: int) -> list[int]:
    """C(1), ..., C(K): cell k may leave rollout once the waterlevel is at or below entry k."""
    return [rollout_capacity(limits, standalone, k + 1) for k in range(len(limits))]


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
