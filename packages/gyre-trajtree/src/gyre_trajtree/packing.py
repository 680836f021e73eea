"""Owns packing: sizes into bins of a token budget, for micro-steps.

Invariant: every item is in exactly one bin; no bin passes the budget, except that an item larger than the
budget sits alone in its own. The same sizes give the same bins.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from gyre_trajtree.errors import TrajtreeError


def pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `sizes` (tokens) in bins of at most `budget` tokens, by best-fit decreasing.

    Bins come in the order in which they were opened, indices ascending within a bin.
    Raises TrajtreeError for a budget below one token or a negative size.
    """
    if budget < 1:
        raise TrajtreeError(f"the token budget must be at least 1, not {budget}")
    if any(size < 0 for size in sizes):
        raise TrajtreeError(f"sizes must not be negative, but one is {min(sizes)}")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        place = bisect_left(room, (size, -1))
        if size <= budget and place < len(room):
            left, chosen = room.pop(place)
        else:
            left, chosen = budget, len(bins)
            bins.append([])
        bins[chosen].append(index)
        if size <= budget:
            insort(room, (left - size, chosen))
    return [sorted(members) for members in bins]
