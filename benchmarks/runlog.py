"""Speed and memory of the run log: appending, reading, indexing; plain, packed and compressed.

    python benchmarks/runlog.py [--repeats 5] [--tokens 1000000] [--index-mb 512]

The log is one execution of `tokens` unique tokens in calls of 1,200 read and 600 sampled tokens. For each form (the
compressed ones hold packed arrays): `mb` on disk; `append_us` for one call; `load_s` of `read_run_log` and `executions`;
`memory`, the most that loading held, over the size of what it gives (ids, log-probs). `index` is the pass of `RunLogIndex`
over a plain log of `index-mb`: its speed and the memory it leaves. `flush` is an append with and without fdatasync
(`os.write` alone beside it). Times are medians. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gyre_trajtree import Call, RunLogIndex, RunLogWriter, executions, read_run_log, to_line

READ, SAMPLED = 1200, 600
FORMS = {"plain": ("run.jsonl", False), "packed": ("packed.jsonl", True)}
FORMS |= {"gz": ("run.jsonl.gz", True), "zst": ("run.jsonl.zst", True)}
TEXT = "The tests pass now; next the parser's error path and its line numbers. " * 14


def calls(tokens: int, rng: np.random.Generator) -> list[Call]:
    return [
        Call(
            f"call-{number:06}",
            "execution-0",
            rng.integers(0, 150_000, READ, np.int32),
            rng.integers(0, 150_000, SAMPLED, np.int32),
            parent=f"call-{number - 1:06}" if number else None,
            logprobs=-rng.exponential(0.3, SAMPLED).astype(np.float32),
            versions=[[3, 0, SAMPLED]],
            sampling={"temperature": 1.0, "top_p": 1.0},
            evidence={"system": "9c1185a5", "tools": "c5b4a3f1", "text": TEXT, "spawns": [TEXT[:300]]},
        )
        for number in range(tokens // (READ + SAMPLED))
    ]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def load(path: Path) -> list[Call]:
    return executions(read_run_log(path))["execution-0"].calls


def form(path: Path, packed: bool, recorded: list[Call], repeats: int) -> dict:
    appends = []
    with RunLogWriter(path, packed=packed) as log:
        for call in recorded:
            appends.append(seconds(lambda call=call: log.append(call)))
    times = [seconds(lambda: load(path)) for _ in range(repeats + 1)][1:]
    tracemalloc.start()
    held = load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = sum(call.input_ids.nbytes + call.output_ids.nbytes + call.logprobs.nbytes for call in held)
    return {
        "mb": round(path.stat().st_size / 1e6, 2),
        "append_us": round(statistics.median(appends) * 1e6, 1),
        "load_s": round(statistics.median(times), 4),
        "memory": round(peak / arrays, 2),
    }


def index(path: Path, megabytes: int, recorded: list[Call], repeats: int) -> dict:
    lines = [to_line(call) for call in recorded]
    lines = [line.replace(b"execution-0", b"execution-%d" % (i % 7)) for i, line in enumerate(lines)]
    RunLogWriter(path).close()
    with open(path, "ab") as file:
        while file.tell() < megabytes * 1e6:
            file.writelines(lines)
    scans = [seconds(lambda: RunLogIndex(path).close()) for _ in range(repeats + 1)][1:]
    tracemalloc.start()
    with RunLogIndex(path) as found:
        held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = path.stat().st_size / 1e6
    return {
        "mb": round(size, 1),
        "mb_per_s": round(size / statistics.median(scans)),
        "held_mb": round(held / 1e6, 3),
        "peak_mb": round(peak / 1e6, 3),
        "executions": len(found),
    }


def flush(folder: Path, recorded: list[Call]) -> dict:
    found = {}
    for kind in ("process", "disk"):
        with RunLogWriter(folder / f"{kind}.jsonl", packed=True, flush=kind) as log:
            found[f"{kind}_us"] = [seconds(lambda call=call: log.append(call)) for call in recorded[:200]]
    line = to_line(recorded[0], packed=True)
    fd = os.open(folder / "write.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    found["write_us"] = [seconds(lambda: os.write(fd, line)) for _ in range(200)]
    os.close(fd)
    return {kind: round(statistics.median(times) * 1e6, 1) for kind, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--index-mb", type=int, default=512)
    given = parser.parse_args()
    recorded = calls(given.tokens, np.random.default_rng(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            kind: form(folder / file, packed, recorded, given.repeats)
            for kind, (file, packed) in FORMS.items()
        }
        result["index"] = index(folder / "large.jsonl", given.index_mb, recorded, given.repeats)
        result["flush"] = flush(folder, recorded)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
