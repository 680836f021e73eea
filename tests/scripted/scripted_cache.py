"""Which prompts a scripted engine has seen: SGLang's prefix cache, told by tokens alone. Pure."""


class PrefixCache:
    """Sequences by the key under which they may be shared."""

    def __init__(self) -> None:
        self._seen: dict[object, list[list[int]]] = {}

    def shared(self, key: object, ids: list[int]) -> int:
        """Tokens of a prompt that some earlier sequence began with; never all of them."""
        longest = max((_common(ids, seen) for seen in self._seen.get(key, ())), default=0)
        return min(longest, len(ids) - 1)

    def keep(self, key: object, ids: list[int]) -> None:
        others = [seen for seen in self._seen.get(key, ()) if _common(seen, ids) < len(seen)]
        self._seen[key] = [*others, list(ids)]  # what these begin with needs no place of its own

    def clear(self) -> None:
        self._seen.clear()


def _common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix; slices compare quicker than a loop over tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
