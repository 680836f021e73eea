"""Owns materialisation: drawn paths as token rows for a trainer, flat or prefix-shared (paper sections 5.1, 5.3).

A flat row is one path. A shared row holds many paths of one execution and each stretch that they share once, in
depth-first order, so that what a token sees is an interval of the row. Invariant: both are the same training signal.
Every path of a shared row reads as its flat row, token by token with the same positions and predecessors, and over all
shared rows of an execution each target stands exactly once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_trajtree.errors import TrajtreeError
from gyre_trajtree.roles import RoleDecision
from gyre_trajtree.sampling import Draw, draw
from gyre_trajtree.segments import Segment, extents, segments_of, share_out
from gyre_trajtree.tree import Node, Tree


@dataclass(slots=True, eq=False)
class Trajectory:
    """One admitted path, cut after its last target, with everything the trainer needs. L = len(ids)."""

    execution: str
    leaf: str
    """Call id of the path's last node."""
    role: str
    ids: np.ndarray
    """int32 [L]: tokens as the model saw and sampled them."""
    targets: np.ndarray
    """bool [L]: tokens that train here; token t is predicted from ids[:t]."""
    logprobs: np.ndarray
    """float32 [L]: behaviour log-probs in nats of sampled tokens, NaN where there is none."""
    versions: np.ndarray
    """int32 [L]: weight version that sampled the token, -1 where not sampled or unknown."""

    @property
    def target_count(self) -> int:
        """L_r. The sum over an execution's trajectories is L_i, over which its token losses are averaged."""
        return int(np.count_nonzero(self.targets))


@dataclass(slots=True, frozen=True)
class RowPath:
    """One drawn path of a shared row."""

    leaf: str
    """Call id of the path's last node."""
    role: str
    segment: int
    """The segment in which the path ends."""
    length: int
    """Tokens of the path, up to its last target."""
    target_count: int
    """L_r: tokens that train in this path."""


@dataclass(slots=True, eq=False)
class SharedRow:
    """Paths of one execution, each shared stretch once. L tokens in S segments, one after the other.

    The prediction of token t is read at `predecessors[t]`, which is not t - 1 where a segment begins. A token q sees a
    token k if k <= q < visible_until[k]: the column form of flex-attention masks and of FlashMask.
    """

    execution: str
    ids: np.ndarray
    """int32 [L]: tokens as the model saw and sampled them."""
    targets: np.ndarray
    """bool [L]: tokens that train in this row."""
    logprobs: np.ndarray
    """float32 [L]: behaviour log-probs in nats of sampled tokens, NaN where there is none."""
    versions: np.ndarray
    """int32 [L]: weight version that sampled the token, -1 where not sampled or unknown."""
    positions: np.ndarray
    """int32 [L]: place of the token on its path, from 0 (what a rotary embedding needs)."""
    predecessors: np.ndarray
    """int32 [L]: row index of the token before it on its path, -1 where a path starts."""
    visible_until: np.ndarray
    """int32 [L]: row index after the last token that sees this one."""
    segment_starts: np.ndarray
    """int32 [S]: row index of the segment's first token."""
    segment_parents: np.ndarray
    """int32 [S]: the segment that this one continues at its end, -1 where a path starts."""
    segment_calls: tuple[str, ...]
    """Call whose tokens the segment holds; of calls that share a stretch of their prompts, the first."""
    segment_owners: np.ndarray
    """int32 [S]: index of the path in which the segment's targets train, -1 without targets."""
    paths: tuple[RowPath, ...]
    """In the order of the draws."""
    oversize: bool = False
    """Whether its one path alone is longer than the budget."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def target_count(self) -> int:
        """The sum over an execution's rows is L_i, over which its token losses are averaged."""
        return int(np.count_nonzero(self.targets))

    def attention_mask(self) -> np.ndarray:
        """bool [L, L]: whether token q (first axis) sees token k. For tests and small rows."""
        place = np.arange(len(self))
        return (place <= place[:, None]) & (place[:, None] < self.visible_until)

    def indices(self, path: int) -> np.ndarray:
        """int64 [length of the path]: row indices of the path's tokens."""
        segment, parts = self.paths[path].segment, []
        ends = np.append(self.segment_starts[1:], len(self))
        while segment >= 0:
            parts.append(np.arange(self.segment_starts[segment], ends[segment]))
            segment = self.segment_parents[segment]
        return np.concatenate(parts[::-1])[: self.paths[path].length]

    def trajectory(self, path: int) -> Trajectory:
        """The path as its flat row."""
        at = self.indices(path)
        owned = np.repeat(self.segment_owners == path, np.diff(self.segment_starts, append=len(self)))
        which = self.paths[path]
        return Trajectory(
            self.execution,
            which.leaf,
            which.role,
            self.ids[at],
            (self.targets & owned)[at],
            self.logprobs[at],
            self.versions[at],
        )


def flat_row(execution: str, drawn: Draw) -> Trajectory:
    """The path of a draw as aligned arrays, cut after its last target."""
    length = _length(drawn)
    columns = _Columns(length)
    for node, trains in zip(drawn.path, drawn.targets, strict=True):
        if node.start >= length:
            break
        columns.fill(node.start, node, node.start, min(node.end, length), trains)
    return Trajectory(
        execution,
        drawn.path[-1].id,
        drawn.role,
        columns.ids,
        columns.targets,
        columns.logprobs,
        columns.versions,
    )


def sample_trajectories(
    tree: Tree,
    roles: Mapping[str, RoleDecision],
    j_max: int | None,
    rng: np.random.Generator,
    train_auxiliary: bool = False,
) -> list[Trajectory]:
    """The flat rows of what `draw` draws."""
    return [flat_row(tree.execution, drawn) for drawn in draw(tree, roles, j_max, rng, train_auxiliary)]


def shared_rows(tree: Tree, draws: Sequence[Draw], budget: int | None = None) -> list[SharedRow]:
    """The drawn paths of one execution in as few tokens as sharing allows, in rows of at most `budget` tokens.

    What several rows need is repeated in each as context and trains in one. A path that is longer than the budget
    has a row of its own, marked `oversize`. Raises TrajtreeError for a budget below one token.
    """
    if budget is not None and budget < 1:
        raise TrajtreeError(f"the token budget must be at least 1, not {budget}")
    lengths = [_length(drawn) for drawn in draws]
    leaves = segments_of([(drawn.path, length) for drawn, length in zip(draws, lengths, strict=True)])
    rows = []
    for members in share_out(leaves, lengths, budget):
        paths = [(draws[i], leaves[i], lengths[i]) for i in members]
        row = _shared_row(tree.execution, paths)
        row.oversize = budget is not None and len(row) > budget
        rows.append(row)
    return rows


def _shared_row(execution: str, paths: Sequence[tuple[Draw, Segment, int]]) -> SharedRow:
    """One row of drawn paths, each given with its last segment and its length."""
    ends: dict[Segment, int] = {}
    owners: dict[int, int] = {}
    for number, (drawn, leaf, length) in enumerate(paths):
        for segment, end in extents(leaf, length):
            ends[segment] = max(end, ends.get(segment, 0))
        for node, trains in zip(drawn.path, drawn.targets, strict=True):
            if trains:
                owners[node.index] = number
    order = sorted(ends, key=lambda segment: segment.order)
    numbers = {segment: number for number, segment in enumerate(order)}
    lengths = np.array([ends[segment] - segment.start for segment in order])
    starts = np.cumsum(lengths) - lengths
    parents = np.array([numbers[segment.parent] if segment.parent else -1 for segment in order])
    owned = [
        owners.get(segment.node.index, -1) if ends[segment] > segment.node.output_start else -1
        for segment in order
    ]
    columns = _Columns(int(lengths.sum()))
    for segment, start, owner in zip(order, starts.tolist(), owned, strict=True):
        columns.fill(start, segment.node, segment.start, ends[segment], owner >= 0)
    return SharedRow(
        execution,
        columns.ids,
        columns.targets,
        columns.logprobs,
        columns.versions,
        *_layout(np.array([segment.start for segment in order]), starts, lengths, parents),
        segment_starts=starts.astype(np.int32),
        segment_parents=parents.astype(np.int32),
        segment_calls=tuple(segment.node.id for segment in order),
        segment_owners=np.array(owned, np.int32),
        paths=tuple(_row_path(drawn, numbers[leaf], length) for drawn, leaf, length in paths),
    )


def _layout(
    places: np.ndarray, starts: np.ndarray, lengths: np.ndarray, parents: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, predecessors and visible_until (all int32 [L]) of segments in depth-first order (all int [S]).

    `places` is where each segment starts on its path.
    """
    ends = starts + lengths
    predecessors = np.arange(-1, int(lengths.sum()) - 1, dtype=np.int32)
    predecessors[starts] = np.where(parents < 0, -1, ends[parents] - 1)
    until = ends.copy()
    for number in range(len(parents) - 1, -1, -1):
        if (parent := parents[number]) >= 0:
            until[parent] = max(until[parent], until[number])
    positions = np.arange(len(predecessors)) + np.repeat(places - starts, lengths)
    return positions.astype(np.int32), predecessors, np.repeat(until, lengths).astype(np.int32)


def _row_path(drawn: Draw, segment: int, length: int) -> RowPath:
    trained = (node for node, trains in zip(drawn.path, drawn.targets, strict=True) if trains)
    count = sum(node.trainable_count for node in trained)
    return RowPath(drawn.path[-1].id, drawn.role, segment, length, count)


def _length(drawn: Draw) -> int:
    """Tokens of a drawn path up to its last target."""
    for node, trains in zip(reversed(drawn.path), reversed(drawn.targets), strict=True):
        if trains and node.trainable_count:
            return node.output_start + int(np.flatnonzero(node.trainable)[-1]) + 1
    raise TrajtreeError(f"the draw of {drawn.path[-1].id} has no target; `draw` never gives such a draw")


class _Columns:
    """The columns that both kinds of rows have, filled one stretch of a call at a time."""

    def __init__(self, length: int) -> None:
        self.ids = np.empty(length, np.int32)
        self.targets = np.zeros(length, bool)
        self.logprobs = np.full(length, np.nan, np.float32)
        self.versions = np.full(length, -1, np.int32)

    def fill(self, at: int, node: Node, start: int, end: int, trains: bool) -> None:
        """Write places `start` to `end` of a node from row index `at` on; an output only from its first token."""
        call = node.call
        read = min(node.output_start, end)
        self.ids[at : at + read - start] = call.input_ids[start - node.start : read - node.start]
        if end <= node.output_start:
            return
        count = end - node.output_start
        sampled = slice(at + read - start, at + end - start)
        self.ids[sampled] = call.output_ids[:count]
        self.logprobs[sampled] = call.logprobs[:count]
        self.versions[sampled] = call.token_versions()[:count]
        if trains:
            self.targets[sampled] = node.trainable[:count]
