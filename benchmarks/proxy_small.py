"""Small requests: processor time of each, one at a time and 32 at a time.

    python benchmarks/proxy_small.py --tokenizer DIR [--calls 1000] [--bytes 800] [--url URL | --command COMMAND]

Every call begins a new conversation of `bytes` bytes, in an execution of its own; the engine answers at once. `cpu_ms` is
processor time of the proxy's process for a call, recording included; `per_s` how many calls were answered a second, the
benchmark's own work included. The last line is one JSON object.
"""

import argparse
import asyncio
import time

import uvloop
from proxy_load import Connection, Meter, Target, Texts, median, milliseconds, parser, report, stage

CONCURRENCY = (1, 32)


async def burst(
    target: Target, name: str, calls: int, concurrency: int, text: str
) -> tuple[float | None, float]:
    """(milliseconds of processor time a call, calls a second)."""
    connections = [await Connection.open(target.url) for _ in range(concurrency)]
    meter, begun, numbers = Meter(target.pid), time.perf_counter(), iter(range(calls))

    async def client(connection: Connection) -> None:
        for number in numbers:
            body = {"messages": [{"role": "user", "content": f"{number} {text}"}]}
            await connection.chat(target, f"{name}-{number}", body)

    await asyncio.gather(*map(client, connections))
    spent, seconds = milliseconds(meter.spent(), calls), time.perf_counter() - begun
    for connection in connections:
        connection.close()
    return spent, calls / seconds


async def measure(options: argparse.Namespace) -> None:
    async with stage(options, "All done.") as (_, targets, tokenizer):
        text = Texts(options.text, tokenizer).text(options.bytes - 80)
        found: dict[str, dict[int, list]] = {t.name: {c: [] for c in CONCURRENCY} for t in targets}
        for repeat in range(-1, options.repeats):
            for target in targets:
                for concurrency in CONCURRENCY:
                    calls = options.calls if repeat >= 0 else 200  # the first warms up
                    done = await burst(target, f"small{repeat}-{concurrency}", calls, concurrency, text)
                    if repeat >= 0:
                        found[target.name][concurrency].append(done)
    report(
        {"calls": options.calls, "bytes": options.bytes}
        | {name: _summary(loads) for name, loads in found.items()}
    )


def _summary(loads: dict[int, list]) -> dict:
    return {
        str(concurrency): {
            "cpu_ms": median([cpu for cpu, _ in done]),
            "per_s": median([rate for _, rate in done]),
        }
        for concurrency, done in loads.items()
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=1000)
    options.add_argument("--bytes", type=int, default=800, help="of a request")
    uvloop.run(measure(options.parse_args()))


if __name__ == "__main__":
    main()
