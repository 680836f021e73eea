"""Owns a call on its way: what was sampled so far, what clients may see of it, and who waits for it.

Invariants: sampled ids only grow, whatever engine they come from; `pieces` only grow and, when the call is
done, join to the answer's reasoning and text; `answer` is set only after the call is durable.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre_proxy.codec import Codec, Detokenizer
from gyre_proxy.conversation import Answer, Request
from gyre_proxy.engine_client import Output
from gyre_proxy.errors import ProxyError
from gyre_proxy.parsers import Segmenter
from gyre_proxy.router import Engine
from gyre_proxy.sessions import Match, Prompt, Session
from gyre_proxy.stopping import StopWatch


class Signal:
    """Wakes everyone who waits for a change."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future] = []

    def fire(self, most: int | None = None) -> None:
        """Wake everyone, or the `most` that have waited longest."""
        end = len(self._waiters) if most is None else most
        waiters, self._waiters = self._waiters[:end], self._waiters[end:]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout: float | None = None) -> bool:
        """Until the next `fire`; False when `timeout` seconds pass first."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            done, _ = await asyncio.wait((waiter,), timeout=timeout)
        finally:
            if not waiter.done():
                self._waiters.remove(waiter)
        return bool(done)


class LiveText:
    """Turns growing ids into pieces that are safe to show."""

    def __init__(
        self, codec: Codec, prompt: Prompt, with_tools: bool, stops: Sequence[str] = (), prefilled: int = 0
    ) -> None:
        """`prefilled`: characters of the answer's text that the client wrote itself; they are not shown again."""
        self._watch = StopWatch(codec, stops) if stops else None
        self._text = self._watch or Detokenizer(codec)
        self._segmenter = Segmenter(codec.answers_after(prompt.question), with_tools)
        self._prefilled = prefilled
        self._seen = 0
        if prompt.prefill_length:
            self._shown(codec.text(prompt.prefill))

    def feed(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Pieces that ids beyond those of the last feed make safe; `ids` is the whole output so far."""
        text = self._text.feed(ids[self._seen :])
        self._seen = len(ids)
        return self._shown(text) if text else []

    def _shown(self, text: str) -> list[tuple[str, str]]:
        pieces = self._segmenter.feed(text)
        if not self._prefilled:
            return pieces
        out = []
        for kind, piece in pieces:
            known = min(self._prefilled, len(piece)) if kind == "text" else 0
            self._prefilled -= known
            if piece[known:]:
                out.append((kind, piece[known:]))
        return out

    @property
    def end(self) -> int | None:
        """Tokens of the output, once a stop string ended it."""
        return self._watch.end if self._watch else None


@dataclass(slots=True, eq=False)
class Flight:
    """One call between the harness's request and its durable record."""

    id: str
    session: Session
    request: Request
    protocol: str
    """Name of the client's dialect."""
    codec: Codec
    """With the template arguments of the request."""
    match: Match
    hints: dict
    prompt: Prompt
    limit: int
    """Tokens the answer may have."""
    sampling: dict
    deadline: float
    """Monotonic seconds, as all waits: clocks on the wall are set."""
    attempt_of: str | None
    live: LiveText | None
    """Set when the answer is read as it grows: by a client, or for a stop string."""
    started: float = field(default_factory=time.time)
    first: float | None = None
    """When the first token was seen; None when the answer came in one piece."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(version, start, end) over ids; ids whose version nobody knows are in none."""
    pieces: list[tuple[str, str]] = field(default_factory=list)
    _looked: int = 0
    """Ids in which stop tokens were looked for."""
    finish: str | None = None
    engine: Engine | None = None
    """Where the call runs now; None while it waits for an engine and after the end."""
    reserved: Engine | None = None
    """Engine that keeps room for it."""
    last_engine: str | None = None
    rid: str = ""
    legs: int = 0
    """Engine requests so far."""
    losses: int = 0
    """Engines that were lost while they held the call."""
    cut_by: str = ""
    """Why the last engine request ended before the answer did."""
    heard: float = 0.0
    """Monotonic seconds of the engine's last sign of life."""
    waiting_since: float | None = None
    """Monotonic seconds since when no engine answered."""
    dispatched: float | None = None
    """Unix seconds when an engine first got the call."""
    readers: int = 0
    cancelled: ProxyError | None = None
    """Why the call ends without an answer, once that is decided."""
    dropped: bool = False
    """The connection to the engine is being cut to move the call on."""
    waiting_for: str = "an engine"
    answer: Answer | None = None
    failure: ProxyError | None = None
    task: asyncio.Task | None = None
    changed: Signal = field(default_factory=Signal)

    @property
    def done(self) -> bool:
        return self.answer is not None or self.failure is not None

    def take(self, output: Output, base: int, version: int | None) -> None:
        """Adopt what the current engine sampled after the first `base` ids; sets `finish` at a stop string.

        `version` is the engine's verified one, for an engine that does not say it itself.
        """
        self.heard, self.waiting_since = time.monotonic(), None
        if output.ids and self.first is None and self.live is not None:
            self.first = time.time()
        self.ids[base:] = output.ids
        self.logprobs[base:] = output.logprobs
        spans = [(v, start, min(end, base)) for v, start, end in self.spans if start < base]
        for sampled_at, start, end in output.spans:
            known = sampled_at if sampled_at is not None else version
            if known is not None:
                spans.append((known, start + base, end + base))
        self.spans = _joined(spans)
        self._bound(base)
        if self.live is not None:
            self.pieces += self.live.feed(self.ids)
            if self.live.end is not None:
                self._stop(self.live.end, "stop")
        self.changed.fire()

    def _bound(self, base: int) -> None:
        """End the answer at its limit and at its first stop token, should an engine go on behind them."""
        stops = self.codec.stop_ids
        first = max(base, self._looked)
        end = next((i + 1 for i in range(first, len(self.ids)) if self.ids[i] in stops), None)
        self._looked = len(self.ids)
        if end is not None and end < len(self.ids):
            self._stop(end, "stop")
        elif len(self.ids) > self.limit:
            self._stop(self.limit, "length")

    def _stop(self, end: int, finish: str) -> None:
        """The answer ends with its first `end` tokens, whatever was sampled after them."""
        self.finish = finish
        del self.ids[end:], self.logprobs[end:]
        self.spans = [(version, start, min(last, end)) for version, start, last in self.spans if start < end]

    def complete(self, answer: Answer) -> None:
        """The call is durable: let out what was held back."""
        for kind, whole in (("reasoning", answer.reasoning), ("text", answer.text[answer.prefilled :])):
            shown = sum(len(text) for piece_kind, text in self.pieces if piece_kind == kind)
            if len(whole) > shown:
                self.pieces.append((kind, whole[shown:]))
        self.answer = answer
        self.changed.fire()

    def fail(self, failure: ProxyError) -> None:
        self.failure = failure
        self.changed.fire()

    def drop(self, cut_by: str) -> None:
        """Cut the connection to the current engine; the call goes on elsewhere from what is known."""
        if self.dropped:
            return
        self.dropped, self.cut_by = True, cut_by
        self.task.cancel()


def _joined(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Spans with neighbours of the same version merged."""
    out: list[tuple[int, int, int]] = []
    for version, start, end in spans:
        if out and out[-1][0] == version and out[-1][2] == start:
            out[-1] = (version, out[-1][1], end)
        else:
            out.append((version, start, end))
    return out
