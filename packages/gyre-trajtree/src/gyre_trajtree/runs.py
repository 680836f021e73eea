"""Owns the finding of sampled tokens that appear again in a later prompt (paper appendix C.1, C.2).

A summary that opens a continuation, a brief that opens a sub-agent's context and history that is repeated are
all runs of output tokens inside a later head's input. Tokens need no evidence, no language and no knowledge
of a harness. A run counts only if no earlier input had it: text that the model quoted from its own prompt
links nothing. Hashes of windows stand for the windows: 64 bits, so a false match is out of reach.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_trajtree.tree import Node, Tree

WINDOW = 16
"""Tokens of a run that is no coincidence."""
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True, frozen=True)
class Run:
    """Output tokens of `source` that stand in the input of a later head."""

    source: Node
    share: float
    """Part of the source's output that was found, 0..1."""


def repeated_outputs(tree: Tree, heads: Sequence[Node]) -> dict[int, list[Run]]:
    """For each head (by index) the earlier calls off its path whose output its input repeats, in log order."""
    if len(heads) < 2:
        return {}
    wanted, where = _windows((head, head.call.input_ids) for head in heads[1:])
    hashes, sources = _windows((node, node.call.output_ids) for node in tree.nodes)
    hit = np.isin(hashes, wanted)
    if not hit.any():
        return {}
    hashes, sources = hashes[hit], sources[hit]
    novel = _first_inputs(tree, hashes) > sources
    heads_of_hash = defaultdict(set)
    for value, head in zip(wanted.tolist(), where.tolist(), strict=True):
        heads_of_hash[value].add(head)
    found: dict[int, Counter[int]] = defaultdict(Counter)
    for value, source in zip(hashes[novel].tolist(), sources[novel].tolist(), strict=True):
        for head in heads_of_hash[value]:
            if source < head:
                found[head][source] += 1
    return {head: _runs(tree, tree.nodes[head], counts) for head, counts in found.items()}


def _runs(tree: Tree, head: Node, counts: Counter[int]) -> list[Run]:
    path = {node.index for node in tree.path(head)}
    return [
        Run(node, min(1.0, (counts[node.index] + WINDOW - 1) / len(node.call.output_ids)))
        for node in (tree.nodes[index] for index in sorted(counts))
        if node.index not in path
    ]


def _first_inputs(tree: Tree, hashes: np.ndarray) -> np.ndarray:
    """int64 [n]: index of the first call whose input holds each window; the tree's size where none does."""
    values = np.unique(hashes)
    first = np.full(len(values), len(tree.nodes), np.int64)
    seen, where = _windows((node, node.call.input_ids) for node in tree.nodes)
    place = np.searchsorted(values, seen)
    place[place == len(values)] = 0
    match = values[place] == seen
    np.minimum.at(first, place[match], where[match])
    return first[np.searchsorted(values, hashes)]


def _windows(segments: Iterable[tuple[Node, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [n] hashes of all windows that lie within one segment, int64 [n] index of the segment's call."""
    whole = [(node.index, ids) for node, ids in segments if len(ids) >= WINDOW]
    if not whole:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    ids = np.concatenate([ids for _, ids in whole]).astype(np.uint64)
    lengths = np.array([len(ids) for _, ids in whole])
    count = len(ids) - WINDOW + 1
    hashes = np.zeros(count, np.uint64)
    for offset in range(WINDOW):
        hashes = hashes * _BASE + ids[offset : offset + count] + np.uint64(1)
    owner = np.repeat(np.array([index for index, _ in whole]), lengths)
    inside = np.ones(len(ids), bool)
    ends = np.cumsum(lengths)
    for back in range(1, WINDOW):
        inside[ends - back] = False
    return hashes[inside[:count]], owner[:count][inside[:count]]
