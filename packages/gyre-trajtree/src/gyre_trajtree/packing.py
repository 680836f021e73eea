"""Owns packing: sizes into bins of a token budget, for micro-steps.

Invariant: every item is in exactly one bin; no bin passes the budget, except that an item larger than the
budget sits alone in its own and is reported. The same sizes give the same bins.
"""

import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from gyre_trajtree.errors import TrajtreeError

_LOOKS = 32
"""Items tried, evenly spread over the sizes that fit, when a pair is sought that closes a bin."""


def pack(sizes: Sequence[int], budget: int, oversize: list[int] | None = None) -> list[list[int]]:
    """Indices of `sizes` (tokens) in bins of at most `budget` tokens, in as few bins as two rules find.

    The rules are best-fit decreasing and, where that misses the lower bound, filling one bin after the other. Bins
    come in the order in which they were opened, indices ascending within a bin. Indices of items larger than the
    budget are appended to `oversize`. Raises TrajtreeError for a budget below one token or a negative size.
    """
    if budget < 1:
        raise TrajtreeError(f"the token budget must be at least 1, not {budget}")
    try:
        sizes = [operator.index(size) for size in sizes]
    except TypeError as error:
        raise TrajtreeError(f"sizes must be whole numbers of tokens: {error}") from error
    if any(size < 0 for size in sizes):
        raise TrajtreeError(f"sizes must not be negative, but one is {min(sizes)}")
    falling = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    giants = [index for index in falling if sizes[index] > budget]
    if oversize is not None:
        oversize += sorted(giants)
    items = falling[len(giants) :]
    bins = _best_fit(items, sizes, budget)
    if len(bins) > _lower_bound([sizes[index] for index in items], budget):
        bins = min(bins, _fill(items, sizes, budget), key=len)
    return [[index] for index in giants] + [sorted(members) for members in bins]


def _lower_bound(sizes: list[int], budget: int) -> int:
    """Bins that no packing can do without: by the sum, and by items of which no two fit together."""
    return max(-(-sum(sizes) // budget), sum(2 * size > budget for size in sizes), bool(sizes))


def _best_fit(items: list[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Each item, the largest first, into the fullest bin that still holds it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in items:
        place = bisect_left(room, (sizes[index], -1))
        if place < len(room):
            left, chosen = room.pop(place)
        else:
            left, chosen = budget, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(room, (left - sizes[index], chosen))
    return bins


def _fill(items: list[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """One bin after the other: the largest item left, then what fills the bin to its fair share of waste.

    Large items are placed while there is still a choice of small ones to fill up with.
    """
    order = items[::-1]
    left = [sizes[index] for index in order]  # ascending
    fewest = max(_lower_bound(left, budget), 1)
    waste = max(0, fewest * budget - sum(left)) // (2 * fewest)
    bins = []
    while left:
        room = budget - left.pop()
        members = [order.pop()]
        while places := _fillers(left, room, waste):
            for place in places:
                room -= left.pop(place)
                members.append(order.pop(place))
        bins.append(members)
    return bins


def _fillers(left: list[int], room: int, waste: int) -> tuple[int, ...]:
    """Places in `left` (ascending sizes) of what goes into `room` next, the higher place first; () when nothing fits.

    One or two items that leave at most `waste`, if they are found; else the largest item, or the fullest pair
    when no third would fit.
    """
    fitting = bisect_right(left, room)
    if not fitting:
        return ()
    largest = (fitting - 1,)
    best, filled = largest, left[fitting - 1]
    for place in range(fitting - 1, 0, -max(1, fitting // _LOOKS)):
        if room - filled <= waste or 2 * left[place] <= filled:
            break
        partner = bisect_right(left, room - left[place], 0, place) - 1
        if partner >= 0 and left[place] + left[partner] > filled:
            best, filled = (place, partner), left[place] + left[partner]
    if room - filled > waste and room - left[fitting - 1] >= 2 * left[0]:
        return largest
    return best
