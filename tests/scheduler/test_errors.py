"""The documented tree of errors is the real one."""

import re

from gyre_scheduler import errors, evaluation, runtime, simulator, workloads

DEPTH = re.compile(r"^((?:│   )*)[├└]── (\w+)", re.MULTILINE)


def real_tree(cls, depth=0):
    """(depth, name) of every subclass."""
    for child in cls.__subclasses__():
        if child.__module__.startswith("gyre_scheduler"):
            yield depth, child.__name__
            yield from real_tree(child, depth + 1)


def test_the_documented_error_tree_is_complete():
    assert evaluation and runtime and simulator and workloads, "imported, so that their errors would count"
    documented = [(len(indent) // 4, name) for indent, name in DEPTH.findall(errors.__doc__)]
    assert sorted(documented) == sorted(real_tree(errors.SchedulerError))
