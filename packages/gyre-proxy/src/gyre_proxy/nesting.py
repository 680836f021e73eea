"""Owns how deep JSON may nest. Pure.

Invariant: what passed here can be read, written and rendered by every reader of this package; their own limits
(from 254 levels on) are errors of the process, not of the request.
"""

DEPTH = 200
"""Levels of objects and lists."""


RECORDED_DEPTH = 100
"""Levels of what is repeated in the run log, whose lines nest DEPTH levels in all."""


_CONTAINERS = (dict, list)


def too_deep(value: object, depth: int = DEPTH) -> bool:
    """Whether a JSON value nests deeper than `depth`. Cost is one pass, without recursion."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(depth):
        below: list = []
        for outer in level:
            values = outer.values() if isinstance(outer, dict) else outer
            below += [inner for inner in values if isinstance(inner, _CONTAINERS)]
        if not below:
            return False
        level = below
    return True
