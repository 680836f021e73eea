"""What past executions of a query say about the next ones: the source of `Expected` for the launch order "longest".

Invariant: an expectation follows from observed durations alone. Pure; any one unit of time.

The longest queries first: who starts last ends last, and a burst ends with its last group. Queries differ (in the paper's
workload the longest fifth takes 1.7 times as long as the shortest) and come back every epoch.
"""

from __future__ import annotations

from collections.abc import Hashable


class DurationHistory:
    """Mean durations by query, in O(queries) memory. What failed or was cancelled tells nothing of a query."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, tuple[float, int]] = {}
        self._total, self._count = 0.0, 0

    def observe(self, query: Hashable, duration: float) -> None:
        """One execution of the query ended after `duration`."""
        total, count = self._sums.get(query, (0.0, 0))
        self._sums[query] = total + duration, count + 1
        self._total, self._count = self._total + duration, self._count + 1

    def expected(self, query: Hashable) -> float | None:
        """Mean duration of the query's executions; that of all for a query never seen, None before any ended."""
        if query in self._sums:
            total, count = self._sums[query]
            return total / count
        return self._total / self._count if self._count else None
