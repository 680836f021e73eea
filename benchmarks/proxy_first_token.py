"""First token through the proxy: when the client's first text arrives, against the engine's first and last.

    python benchmarks/proxy_first_token.py --tokenizer DIR [--calls 20] [--delay 0.5] [--url URL | --command COMMAND]

The engine streams an answer in 20 pieces over `delay` seconds. `added_ms`: from the engine's first piece to the client's
first text; `before_last_ms`: from there to the engine's last piece, below 0 for a proxy that buffers. The last line is
one JSON object.
"""

import argparse

import uvloop
from proxy_load import Connection, Target, first_content, median, parser, report, stage

ANSWER = "Streams start with the first token and show text as it is sampled, word for word. " * 3


async def measure(options: argparse.Namespace) -> None:
    async with stage(options, ANSWER, direct=True) as (engine, targets, _):
        engine.delay_s, engine.chunks = options.delay, 20
        found: dict[str, list[tuple[float, float]]] = {target.name: [] for target in targets}
        connections = {target.name: await Connection.open(target.url) for target in targets}

        async def call(target: Target, number: int) -> tuple[float, float]:
            body = {"messages": [{"role": "user", "content": f"{number}"}], "stream": True}
            answer = await connections[target.name].chat(target, f"first{number}", body)
            first = first_content(answer)
            return (first - engine.first_chunk) * 1e3, (engine.last_chunk - first) * 1e3

        for number in range(-2, options.calls):
            for target in targets:
                done = await call(target, number)
                if number >= 0:  # the first two warm up
                    found[target.name].append(done)
        for connection in connections.values():
            connection.close()
    report(
        {"calls": options.calls, "delay_ms": options.delay * 1e3}
        | {name: _summary(d) for name, d in found.items()}
    )


def _summary(done: list[tuple[float, float]]) -> dict:
    return {
        "added_ms": median([added for added, _ in done]),
        "before_last_ms": median([left for _, left in done]),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=20)
    options.add_argument("--delay", type=float, default=0.5, help="seconds the engine takes for an answer")
    uvloop.run(measure(options.parse_args()))


if __name__ == "__main__":
    main()
