"""A session that grows to 336 KB: processor time and memory of a turn, for each quarter of the session.

    python benchmarks/proxy_growing.py --tokenizer DIR [--turns 200] [--bytes 336000] [--url URL | --command COMMAND]

Every turn of the session sends the whole history and gets an answer at once: from Gyre's proxy a tool call, whose result
makes the next request longer. `cpu_ms` is processor time of the proxy's process a turn, `quarters` that of each quarter,
`memory_mb` how much its memory grows a turn. The last line is one JSON object.
"""

import argparse

import orjson
import uvloop
from proxy_load import (
    CALL,
    TOOL,
    Connection,
    Meter,
    Target,
    Texts,
    median,
    milliseconds,
    parser,
    report,
    stage,
)


async def session(target: Target, execution: str, turns: int, size: int, texts: Texts) -> dict:
    """One session; its first quarter begins with an empty history."""
    connection, meter = await Connection.open(target.url), Meter(target.pid)
    messages: list[dict] = [{"role": "user", "content": "Mend the failing test."}]
    quarters, before, length = [], meter.memory(), 0
    for turn in range(turns):
        body = {"messages": messages, "tools": [TOOL]}
        answer = orjson.loads((await connection.chat(target, execution, body)).body)
        message = answer["choices"][0]["message"]
        if (turn + 1) % (turns // 4) == 0:
            quarters.append(milliseconds(meter.spent(), turns // 4))
        length = len(orjson.dumps(messages))
        messages.append(message)
        missing = size * (turn + 2) // turns - length - len(orjson.dumps(message)) - 100
        text = texts.text(missing)
        calls = message.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": text})
    connection.close()
    grown = None if before is None else (meter.memory() - before) / turns
    return {"bytes": length, "quarters": quarters, "memory_mb": grown}


async def measure(options: argparse.Namespace) -> None:
    async with stage(options, CALL) as (_, targets, tokenizer):
        texts = Texts(options.text, tokenizer)
        found: dict[str, list[dict]] = {target.name: [] for target in targets}
        for repeat in range(-1, options.repeats):
            for target in targets:
                turns, size = (
                    (options.turns, options.bytes) if repeat >= 0 else (20, 20_000)
                )  # the first warms up
                done = await session(target, f"growing{repeat}", turns, size, texts)
                if repeat >= 0:
                    found[target.name].append(done)
    report({"turns": options.turns} | {name: _summary(sessions) for name, sessions in found.items()})


def _summary(sessions: list[dict]) -> dict:
    quarters = [median(values) for values in zip(*(s["quarters"] for s in sessions), strict=True)]
    known = None not in quarters
    return {
        "bytes": sessions[0]["bytes"],
        "cpu_ms": round(sum(quarters) / 4, 3) if known else None,
        "quarters": quarters,
        "last_to_first": round(quarters[3] / quarters[0], 2) if known else None,
        "memory_mb": median([s["memory_mb"] for s in sessions]),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=200)
    options.add_argument("--bytes", type=int, default=336_000, help="of the last request")
    uvloop.run(measure(options.parse_args()))


if __name__ == "__main__":
    main()
