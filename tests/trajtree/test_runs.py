"""Runs of sampled tokens in later prompts, against the definition written out."""

import numpy as np
from gyre_trajtree.runs import WINDOW, repeats_of
from hypothesis import given
from hypothesis import strategies as st


def windows(ids):
    return [bytes(ids[i : i + WINDOW]) for i in range(len(ids) - WINDOW + 1)]


def naive(tree, heads):
    """(head, source) -> share of the source's windows, for outputs of at most 32 windows; and who is asked again."""
    inputs = [set(windows(node.call.input_ids)) for node in tree.nodes]
    shares, asked = {}, set()
    for head in heads[1:]:
        path = tree.path(head)
        for source in tree.nodes[: head.index]:
            question = source.call.input_ids[-WINDOW:]
            if len(question) == WINDOW and bytes(question) in inputs[head.index]:
                asked.add((head.index, source.index))
            own = windows(source.call.output_ids)
            seen = set().union(*inputs[: source.index + 1])
            found = sum(w in inputs[head.index] and w not in seen for w in own)
            if found and source not in path:
                shares[head.index, source.index] = found / len(own)
    return shares, asked


pieces = st.lists(st.integers(0, 5), max_size=4)
"""Tokens come in blocks of ten, so that long runs repeat often."""


@given(st.lists(st.tuples(st.integers(-2, 5), pieces, pieces), min_size=1, max_size=9))
def test_repeats_are_those_of_the_definition(new_recorder, steps):
    recorder = new_recorder()

    def block(numbers):
        return [10 * number + i for number in numbers for i in range(10)]

    for i, (parent, new, out) in enumerate(steps):
        name = f"c{parent % i}" if parent >= 0 and i else None
        recorder.call(f"c{i}", name, new=block(new), out=block(out))
    tree = recorder.tree()
    heads = [tree.nodes[0], *(node for node in tree.nodes[1:] if node.parent is None or node.index % 2)]
    found = repeats_of(tree, heads)
    shares, asked = naive(tree, heads)
    runs = {(head, run.source.index): run.share for head, each in found.runs.items() for run in each}
    assert runs.keys() == shares.keys()
    assert all(np.isclose(runs[pair], share) for pair, share in shares.items())
    assert found.asked == asked
