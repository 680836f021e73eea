"""Owns the end of an answer at a client's stop string.

The proxy looks for stop strings itself: an engine without a tokenizer cannot, and others leave the string in the ids.
Pure. Invariants: the output ends with the token that completes the first stop string; the text ends before it; what
`feed` lets out is a prefix of that text.
"""

from collections.abc import Sequence

from gyre_proxy.codec import Codec, Detokenizer


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """(text before the first stop string, that string); (text, None) when it holds none."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    position, _, stop = min(found)
    return text[:position], stop


class StopWatch:
    """Looks for stop strings in a growing output, token by token."""

    def __init__(self, codec: Codec, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(codec)
        self._stops = stops
        self._held = ""
        self.end: int | None = None
        """Tokens of the output, once a stop string ended it."""
        self._seen = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Text that these further ids complete and that no stop string can begin in; nothing after the end."""
        out = ""
        for token in ids:
            if self.end is not None:
                break
            self._seen += 1
            before, stop = cut(self._held + self._detokenizer.feed([token]), self._stops)
            if stop is not None:
                self.end, self._held = self._seen, ""
            else:
                self._held = before[len(before) - _beginning(before, self._stops) :]
            out += before[: len(before) - len(self._held)]
        return out


def _beginning(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of the text that a stop string may begin with."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
