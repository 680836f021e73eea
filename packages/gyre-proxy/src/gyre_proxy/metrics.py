"""Owns what /metrics says, in Prometheus' text format. One registry for each proxy.

Counters count what was recorded; gauges are read from the gateway when they are asked for.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from gyre_proxy.conversation import Answer
    from gyre_proxy.flights import Flight

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STAGES = ("prepare", "queue", "first_token", "generate", "record")
"""From the body's last byte to the prompt's tokens; to an engine; to the first token (streams only); to the last
one; until the record is durable."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Mapping[str, tuple[str, str, Mapping[str, float]]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (text, label, values) in self._read().items():
            family = GaugeMetricFamily(f"gyre_proxy_{name}", text, labels=[label] if label else [])
            for key, value in values.items():
                family.add_metric([key] if label else [], value)
            yield family


class Metrics:
    """Counters and histograms of one proxy; `gauges()` gives {name: (help, label or "", {label value: value})}."""

    def __init__(self, gauges: Callable[[], Mapping[str, tuple[str, str, Mapping[str, float]]]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(gauges))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"gyre_proxy_{name}", text, labels, registry=self.registry)

        self.calls = counter("calls", "Recorded calls by protocol and finish.", "protocol", "finish")
        self.refused = counter("refused", "Requests answered with an error, by status.", "status")
        self.joined = counter("joined", "Requests that joined the same call under way.")
        self.tokens = counter(
            "tokens",
            "Tokens: of prompts, reused from a recorded path or encoded anew, and sampled.",
            "kind",
        )
        self.contexts = counter(
            "contexts",
            "Calls by how they attach: extended, branched (the path was extended before), or a new root and why: first "
            "call, other tools, other system prompt, a rendering that changed the past, other history.",
            "cause",
        )
        self.continued = counter("continued", "Calls that went on after an engine was lost or left.", "cause")
        self.reroutes = counter("reroutes", "Engines emptied through the admin API.")
        self.malformed = counter("parse_failures", "Tool calls that could not be read and stayed text.")
        self.untrainable = counter("untrainable_tokens", "Sampled tokens without a usable log-prob.")
        self._stages = Histogram(
            "gyre_proxy_stage_seconds",
            "Time of a call by stage.",
            ("stage",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stage = {stage: self._stages.labels(stage) for stage in STAGES}

    def spent(self, stage: str, seconds: float) -> None:
        """Time of one call in one of STAGES."""
        self._stage[stage].observe(max(0.0, seconds))

    def recorded(self, flight: "Flight", answer: "Answer", untrainable: int, sampled: float) -> None:
        """Count a recorded call; `untrainable` of its tokens have no log-prob; `sampled`: unix seconds of its last one."""
        dispatched, parent = flight.dispatched, flight.prompt.parent
        self.calls.labels(flight.protocol, flight.finish).inc()
        self.tokens.labels("encoded").inc(len(flight.prompt.new))
        self.tokens.labels("reused").inc(parent.length if parent else 0)
        self.tokens.labels("sampled").inc(len(flight.ids))
        self.malformed.inc(answer.malformed)
        self.untrainable.inc(untrainable)
        self.spent("record", time.time() - sampled)
        if dispatched is not None:
            self.spent("queue", dispatched - flight.started)
            self.spent("generate", sampled - dispatched)
            if flight.first is not None:
                self.spent("first_token", flight.first - dispatched)

    def text(self) -> bytes:
        return generate_latest(self.registry)
