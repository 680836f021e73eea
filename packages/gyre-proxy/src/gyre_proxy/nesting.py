"""Owns how deep JSON may nest. Pure.

Invariant: what passed here can be read, written and rendered by every reader of this package; their own limits
(from 254 levels on) are errors of the process, not of the request.
"""

DEPTH = 200
"""Levels of objects and lists."""


RECORDED_DEPTH = 100
"""Levels of what is repeated in the run log, whose lines nest DEPTH levels in all."""


def too_deep(value: object, depth: int = DEPTH) -> bool:
    """Whether a JSON value nests deeper than `depth`. Cost is one pass, without recursion."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
