"""Owns the search for the longest recorded path that a prompt extends, by tokens alone (paper section 5.1).

The paths of a tree are kept as runs of tokens that branch where tokens differ, each in one contiguous array, so that
a search costs one comparison a branching point however many calls a conversation has. Invariant: the runs from the
top to any place spell what every node placed there saw and sampled; no two runs that branch from one place begin with
the same token, so a prompt has one way down. Equal paths share their runs here, never their nodes in the tree.
"""

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gyre_trajtree.tree import Node

_SPARE = 256
"""Tokens that a grown run has room for at least, beside its own."""
_FIRST_LOOK = 256
"""Tokens compared first; most different stretches differ there."""


class _Run:
    """Tokens from place `start` to `end` of all paths through here; places count tokens from the path's start."""

    __slots__ = ("above", "below", "start", "end", "ends", "nodes", "_tokens", "_base")

    def __init__(self, above: "_Run | None", start: int, tokens: np.ndarray, base: int) -> None:
        self.above = above
        self.below: dict[int, _Run] = {}
        """By first token."""
        self.start = start
        self.end = start
        self.ends: list[int] = []
        """Ascending places at which an answer ends."""
        self.nodes: list[Node] = []
        """The latest node of each of `ends`."""
        self._tokens = tokens
        """int32 [room]; what lies before `start` belongs to the runs above, what lies after `end` is room."""
        self._base = base
        """Place of the array's first token."""

    def tokens(self, start: int, end: int) -> np.ndarray:
        """int32 [end - start]"""
        return self._tokens[start - self._base : end - self._base]

    def grow(self, tokens: np.ndarray) -> None:
        """Append to a run that nothing branches from."""
        end = self.end + len(tokens)
        if end - self._base > len(self._tokens):
            own = self.tokens(self.start, self.end)
            self._tokens = np.empty((end - self.start) * 9 // 8 + _SPARE, np.int32)
            self._tokens[: len(own)] = own
            self._base = self.start
        self._tokens[self.end - self._base : end - self._base] = tokens
        self.end = end

    def mark(self, node: "Node") -> None:
        at = bisect_left(self.ends, node.end)
        if at < len(self.ends) and self.ends[at] == node.end:
            self.nodes[at] = node
        else:
            self.ends.insert(at, node.end)
            self.nodes.insert(at, node)

    def last_by(self, place: int) -> "Node | None":
        """The node whose answer ends last at or before `place` in this run."""
        at = bisect_right(self.ends, place)
        return self.nodes[at - 1] if at else None


class PrefixIndex:
    """Paths by their tokens. Nodes are added after their parents, in the order of the log."""

    def __init__(self) -> None:
        self._top = _Run(None, 0, np.empty(0, np.int32), 0)
        """Holds no token: all paths branch from it."""
        self._places: list[_Run] = []
        """For each node the run that held its end when it was added; a split may have moved the end above it."""

    def __len__(self) -> int:
        """How many nodes were added."""
        return len(self._places)

    def add(self, node: "Node") -> None:
        run = self._place(node.parent) if node.parent else self._top
        run = self._spell(run, node.start, np.concatenate((node.call.input_ids, node.call.output_ids)))
        self._places.append(run)
        if node.end > node.output_start:
            run.mark(node)

    def longest(self, prompt: np.ndarray) -> "Node | None":
        """The node with the longest path that `prompt` (int32 [n]) begins with; the latest of equally long ones.

        A node that sampled nothing has no answer to extend and is never returned.
        """
        best, run, at = None, self._top, 0
        while at == run.end and at < len(prompt):
            run = run.below.get(int(prompt[at]))
            if run is None:
                break
            room = min(len(prompt), run.end)
            at += common(run.tokens(at, room), prompt[at:room])
            best = run.last_by(at) or best
        return best

    def _place(self, node: "Node") -> _Run:
        run = self._places[node.index]
        while node.end <= run.start and run.above:
            run = run.above
        self._places[node.index] = run
        return run

    def _spell(self, run: _Run, at: int, tokens: np.ndarray) -> _Run:
        """Lead on from place `at` in `run` by `tokens`, with new runs where none has them; the run they end in."""
        while len(tokens):
            if at < run.end:
                same = common(run.tokens(at, min(run.end, at + len(tokens))), tokens)
                at, tokens = at + same, tokens[same:]
                if len(tokens) and at < run.end:
                    run = _split(run, at)
            elif int(tokens[0]) in run.below:
                run = run.below[int(tokens[0])]
            elif run.below or run is self._top:
                below = run.below[int(tokens[0])] = _Run(run, at, tokens, at)
                below.end = at + len(tokens)
                return below
            else:
                run.grow(tokens)
                return run
        return run


def _split(run: _Run, place: int) -> _Run:
    """Part a run in two at `place`; the new upper part, from which the old run now branches."""
    upper = _Run(run.above, run.start, run._tokens, run._base)
    upper.end = place
    at = bisect_right(run.ends, place)
    upper.ends, upper.nodes = run.ends[:at], run.nodes[:at]
    run.ends, run.nodes = run.ends[at:], run.nodes[at:]
    assert run.above is not None
    run.above.below[int(upper.tokens(run.start, run.start + 1)[0])] = upper
    run.above, run.start = upper, place
    upper.below[int(run.tokens(place, place + 1)[0])] = run
    return upper


def common(ours: np.ndarray, theirs: np.ndarray) -> int:
    """How many tokens two arrays have in common from their start."""
    room = min(len(ours), len(theirs))
    done, look = 0, _FIRST_LOOK
    while done < room:
        part = slice(done, min(done + look, room))
        differ = ours[part] != theirs[part]
        if differ.any():
            return done + int(differ.argmax())
        done, look = part.stop, look * 8
    return room
