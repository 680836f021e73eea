"""Owns group-relative advantages: one for each execution of a group, from one reward each.

Invariant: an unresolved execution (None) touches neither mean, deviation nor count, and is never a zero.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real

from gyre_trajtree.errors import RewardError

SPREAD = 1e-6
"""Rewards that differ by less, relative to the largest magnitude or 1, count as equal."""
LARGEST = 1e100
"""Largest magnitude of a reward: sums of squares stay finite."""


def group_advantages(rewards: Sequence[float | None], normalise: str = "mean") -> list[float | None]:
    """Advantages of one group, in the order of `rewards`; None where the reward is None (unresolved).

    "mean": reward - mean. "mean_std": that divided by the population standard deviation. A group whose valid
    rewards are all equal, or with a single valid one, carries no signal: all its advantages are 0.0.
    Raises RewardError for NaN, infinite or non-numeric rewards and for an unknown `normalise`.
    """
    if normalise not in ("mean", "mean_std"):
        raise RewardError(f'normalise must be "mean" or "mean_std", not {normalise!r}')
    valid = [_finite(reward) for reward in rewards if reward is not None]
    if not valid or max(valid) - min(valid) <= SPREAD * max(1.0, *map(abs, valid)):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(valid) / len(valid)
    scale = 1.0
    if normalise == "mean_std":
        scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in valid) / len(valid))
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def _finite(reward: float) -> float:
    number = math.nan
    if isinstance(reward, Real):
        with suppress(OverflowError):
            number = float(reward)
    if not abs(number) <= LARGEST:
        raise RewardError(
            f"reward {str(reward)[:40]} is no finite number up to {LARGEST:g}; record the assessment as unresolved instead"
        )
    return number
