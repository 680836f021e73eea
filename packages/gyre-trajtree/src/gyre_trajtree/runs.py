"""Owns the finding of sampled tokens that appear again in a later prompt (paper appendix C.1, C.2).

A summary that opens a continuation, a brief that opens a sub-agent's context and history that is repeated are
all runs of output tokens inside a later head's input. Tokens need no evidence, no language and no knowledge
of a harness. A run counts only if no earlier input had it: text that the model quoted from its own prompt
links nothing. Hashes of windows stand for the windows: 64 bits, so a false match is out of reach. The cost is
one pass over the tokens, and one step for each pair of a head and a call that it repeats.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre_trajtree.tree import Node, Tree

WINDOW = 16
"""Tokens of a run that is no coincidence; a power of two."""
_LOOKS = 32
"""Windows of an output that are looked for, evenly spread."""
_BATCH = 1 << 18
"""Tokens hashed at a time."""
_BASE = 0x9E3779B97F4A7C15
_SIEVE_BITS = 20


@dataclass(slots=True, frozen=True)
class Run:
    """Output tokens of `source` that stand in the input of a later head."""

    source: Node
    share: float
    """Part of the source's output that was found, 0..1, by the windows looked for."""
    begins: bool
    """Whether its first tokens were found: a repeated turn has them, a text that it passed on has not."""


@dataclass(slots=True)
class Repeats:
    """What the inputs of heads repeat of earlier calls."""

    runs: dict[int, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """By index of the head: calls off its path whose output its input repeats, in log order."""
    asked: set[tuple[int, int]] = field(default_factory=set)
    """(head, call): the head's input holds what the call was asked last, the last WINDOW tokens of its prompt."""


def repeats_of(tree: Tree, heads: Sequence[Node]) -> Repeats:
    """Find what each head but the first repeats."""
    found = Repeats()
    if len(heads) < 2:
        return found
    is_head = np.zeros(len(tree), bool)
    is_head[[head.index for head in heads]] = True
    inputs = [(node, node.call.input_ids) for node in tree.nodes]
    questions, asking = _windows([(node, ids[-WINDOW:]) for node, ids in inputs])
    answers, answering, looks = _looks(tree)
    sources = np.concatenate((asking, answering))
    look, reader = _occurrences(np.concatenate((questions, answers)), inputs)
    first = np.full(len(sources), len(tree), np.int64)
    np.minimum.at(first, look, reader)
    later = is_head[reader] & (sources[look] < reader)
    asked = later & (look < len(asking))
    found.asked = set(zip(reader[asked].tolist(), sources[look[asked]].tolist(), strict=True))
    repeated = later & (look >= len(asking)) & (first[look] > sources[look])
    pairs, counts = np.unique(reader[repeated] * len(tree) + sources[look[repeated]], return_counts=True)
    opens = np.append(np.zeros(len(asking), bool), np.diff(answering, prepend=-1) != 0)
    begun = repeated & opens[look]
    begins = set((reader[begun] * len(tree) + sources[look[begun]]).tolist())
    paths = {head.index: {node.index for node in tree.path(head)} for head in heads}
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        head, source = divmod(pair, len(tree))
        if source not in paths[head]:
            found.runs[head].append(Run(tree.nodes[source], count / looks[source], pair in begins))
    return found


def _looks(tree: Tree) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
    """Hashes of the windows of outputs that are looked for, their calls, and how many there are of each call."""
    hashes, sources = _windows([(node, node.call.output_ids) for node in tree.nodes])
    owners, counts = np.unique(sources, return_counts=True)
    starts = np.cumsum(counts) - counts
    chosen = [
        start + np.linspace(0, count - 1, min(count, _LOOKS)).astype(np.int64)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    place = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    looks = {owner: len(places) for owner, places in zip(owners.tolist(), chosen, strict=True)}
    return hashes[place], sources[place], looks


def _occurrences(
    wanted: np.ndarray, segments: Iterable[tuple[Node, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [p] twice: (place in `wanted`, index of a call whose segment holds that window), each pair once."""
    values, same = np.unique(wanted, return_inverse=True)
    sieve = np.zeros(1 << _SIEVE_BITS, bool)
    sieve[_sieved(values)] = True
    found = [np.empty(0, np.int64)]
    for batch in _batches(segments):
        hashes, owners = _windows(batch)
        likely = np.flatnonzero(sieve[_sieved(hashes)])
        place = np.searchsorted(values, hashes[likely])
        place[place == len(values)] = 0
        match = values[place] == hashes[likely]
        found.append(np.unique(owners[likely[match]] * len(values) + place[match]))
    owner, value = np.divmod(np.concatenate(found), max(len(values), 1))
    # each place of `wanted` with its value's occurrences
    order = np.argsort(same, kind="stable")
    counts = np.bincount(same, minlength=len(values))
    starts = np.cumsum(counts) - counts
    repeats = counts[value]
    offset = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return order[np.repeat(starts[value], repeats) + offset], np.repeat(owner, repeats)


def _sieved(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> np.uint64(64 - _SIEVE_BITS)).astype(np.int64)


def _batches(segments: Iterable[tuple[Node, np.ndarray]]) -> Iterator[list[tuple[Node, np.ndarray]]]:
    batch, size = [], 0
    for node, ids in segments:
        batch.append((node, ids))
        size += len(ids)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _windows(segments: Sequence[tuple[Node, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [n] hashes of all windows that lie within one segment, int64 [n] index of the segment's call."""
    whole = [(node.index, ids) for node, ids in segments if len(ids) >= WINDOW]
    if not whole:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    lengths = np.array([len(ids) for _, ids in whole])
    hashes = np.concatenate([ids for _, ids in whole]).astype(np.uint64) + np.uint64(1)
    size = 1
    while size < WINDOW:  # of two neighbouring windows, one of twice the size
        factor = np.uint64(pow(_BASE, size, 1 << 64))
        hashes = hashes[:-size] * factor + hashes[size:]
        size *= 2
    owner = np.repeat(np.array([index for index, _ in whole]), lengths)
    inside = np.ones(len(owner), bool)
    ends = np.cumsum(lengths)
    for back in range(1, WINDOW):
        inside[ends - back] = False
    inside = inside[: len(hashes)]
    return hashes[inside], owner[: len(hashes)][inside]
