"""200 agents at a time, each with a context of 100 KB: what the proxy adds to a turn's latency, whether it stays awake.

    python benchmarks/proxy_sessions.py --tokenizer DIR [--sessions 200] [--context 100000] [--turns 10]
        [--generation 1.0] [--tools 1.0] [--url URL | --command COMMAND]

The engine takes `generation` seconds for an answer, an agent `tools` seconds on average for its tools; sessions begin spread
over `opening` seconds, and their first turns (the whole context) are told apart from the later ones (2 KB more each).
A turn's latency is its time without the engine's `generation`; `added` is against the same load on the engine with
nothing in between. `/health` is asked all the while. `lost` and `twice` compare the run log with the answers. The last
line is one JSON object.
"""

import argparse
import asyncio
import random
import time
from collections import Counter

import orjson
import uvloop
from gyre_trajtree import Call, read_run_log
from proxy_load import (
    CALL,
    TOOL,
    Connection,
    Engine,
    Meter,
    Target,
    Texts,
    median,
    milliseconds,
    parser,
    quantile,
    report,
    stage,
)

HEALTH_EVERY_S = 0.02


class Load:
    """All sessions of one measurement of one target."""

    def __init__(
        self, options: argparse.Namespace, target: Target, engine: Engine, texts: Texts, name: str
    ) -> None:
        self._options, self._target, self._engine, self._texts, self._name = (
            options,
            target,
            engine,
            texts,
            name,
        )
        self.openings: list[float] = []
        self.turns: list[float] = []
        self.health: list[float] = []
        self.cpu: list[float | None] = []
        """Seconds of processor time of the openings and of the turns."""
        self._opened = asyncio.Barrier(options.sessions + 1)

    async def run(self) -> None:
        meter = Meter(self._target.pid)
        watching = asyncio.create_task(self._watch())
        sessions = [asyncio.create_task(self._session(i)) for i in range(self._options.sessions)]
        async with asyncio.timeout(3600):
            done, _ = await asyncio.wait(
                [asyncio.create_task(self._opened.wait()), *sessions], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            self.cpu.append(meter.spent())
            await asyncio.gather(*sessions)
        self.cpu.append(meter.spent())
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def _session(self, number: int) -> None:
        options, execution = self._options, f"{self._name}-{number}"
        text = self._texts.text(options.context)
        await asyncio.sleep(options.opening * number / options.sessions)
        connection = await Connection.open(self._target.url)
        messages: list[dict] = [{"role": "user", "content": text}]
        self.openings.append(await self._turn(connection, execution, messages))
        await self._opened.wait()
        for _ in range(options.turns):
            await asyncio.sleep(random.uniform(0, 2 * options.tools))
            self.turns.append(await self._turn(connection, execution, messages))
        connection.close()

    async def _turn(self, connection: Connection, execution: str, messages: list[dict]) -> float:
        """Seconds that the turn took without the engine's own; the messages grow by the answer and what comes of it."""
        begun = time.perf_counter()
        answer = await connection.chat(self._target, execution, {"messages": messages, "tools": [TOOL]})
        took = answer.end - begun - self._engine.delay_s
        message = orjson.loads(answer.body)["choices"][0]["message"]
        calls, text = message.get("tool_calls") or [], self._texts.text(2000)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        messages += [message, *(results or [{"role": "user", "content": text}])]
        return took

    async def _watch(self) -> None:
        connection = await Connection.open(self._target.url)
        while True:
            begun = time.perf_counter()
            answer = await connection.request("GET", "/health")
            if answer.status == 200:
                self.health.append(answer.end - begun)
            await asyncio.sleep(HEALTH_EVERY_S)


async def measure(options: argparse.Namespace) -> None:
    async with stage(options, CALL, direct=True) as (engine, targets, tokenizer):
        texts, found = Texts(options.text, tokenizer), {target.name: [] for target in targets}
        engine.delay_s = options.generation
        for repeat in range(options.repeats):
            for target in targets:
                load = Load(options, target, engine, texts, f"load{repeat}")
                await load.run()
                found[target.name].append(_figures(load))
        results = {
            name: {key: median([f[key] for f in done]) for key in done[0]} for name, done in found.items()
        }
        for target in targets[1:]:
            results[target.name] |= _compared(results[target.name], results["direct"])
            if target.record:
                results[target.name] |= _recorded(options, target)
    report({"sessions": options.sessions, "context": options.context, "turns": options.turns} | results)


def _figures(load: Load) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name, seconds in (("opening", load.openings), ("turn", load.turns), ("health", load.health)):
        for share in (0.5, 0.99):
            figures[f"{name}_p{share * 100:.0f}_ms"] = (
                milliseconds(quantile(seconds, share)) if seconds else None
            )
    figures["opening_cpu_ms"] = milliseconds(load.cpu[0], len(load.openings))
    figures["turn_cpu_ms"] = milliseconds(load.cpu[1], len(load.turns))
    return figures


def _compared(figures: dict, direct: dict) -> dict[str, float]:
    return {
        f"added_{p}_ms": round(figures[f"turn_{p}_ms"] - direct[f"turn_{p}_ms"], 3) for p in ("p50", "p99")
    }


def _recorded(options: argparse.Namespace, target: Target) -> dict[str, int]:
    """Calls of the run log against the answers that were given."""
    calls = [record for record in read_run_log(target.record) if isinstance(record, Call)]
    ids, per_session = Counter(call.id for call in calls), Counter(call.execution for call in calls)
    expected = options.sessions * (options.turns + 1) * options.repeats
    enough = sum(min(count, options.turns + 1) for count in per_session.values())
    return {
        "answered": expected,
        "lost": expected - enough,
        "twice": len(calls) - enough + len(calls) - len(ids),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sessions", type=int, default=200)
    options.add_argument(
        "--context", type=int, default=100_000, help="characters of a session's first message"
    )
    options.add_argument("--turns", type=int, default=10, help="of each session after its first")
    options.add_argument(
        "--generation", type=float, default=1.0, help="seconds the engine takes for an answer"
    )
    options.add_argument(
        "--tools", type=float, default=1.0, help="seconds an agent takes between turns, on average"
    )
    options.add_argument("--opening", type=float, default=40.0, help="seconds over which sessions begin")
    options.set_defaults(repeats=1)
    uvloop.run(measure(options.parse_args()))


if __name__ == "__main__":
    main()
