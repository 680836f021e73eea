"""A recorder that writes calls as the proxy does (with parents) or as a foreign log does (whole prompts)."""

import sys
from pathlib import Path

import numpy as np
import pytest
from gyre_trajtree import Call, Tree, infer_roles

sys.path.insert(0, str(Path(__file__).parent))


class Recorder:
    """Calls of one execution; `seen[id]` is the prompt and output of a call as the model saw them."""

    def __init__(self, whole_prompts=False):
        self.whole_prompts = whole_prompts
        self.calls = []
        self.seen = {}
        self._fresh = 1000

    def fresh(self, count):
        """Tokens that occur nowhere else."""
        self._fresh += count
        return list(range(self._fresh - count, self._fresh))

    def call(self, name, parent=None, new=None, out=None, logprobs=None, **fields):
        new = self.fresh(4) if new is None else list(new)
        out = self.fresh(3) if out is None else list(out)
        before = sum(self.seen[parent], []) if parent else []
        self.seen[name] = (before + new, out)
        call = Call(
            id=name,
            execution="x",
            parent=None if self.whole_prompts else parent,
            input_ids=before + new if self.whole_prompts else new,
            output_ids=out,
            logprobs=[-0.5] * len(out) if logprobs is None else logprobs,
            **fields,
        )
        self.calls.append(call)
        return call

    def tree(self):
        return Tree.from_calls(self.calls)

    def roles(self, **kwargs):
        return {leaf: decision.role for leaf, decision in infer_roles(self.tree(), **kwargs).items()}


@pytest.fixture(scope="session")
def new_recorder():
    return Recorder


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def rng():
    return np.random.default_rng(0)
