"""Speed and memory of gyre-trajtree: load, build, append, draw, materialise, infer roles, pack.

    python benchmarks/trajtree.py [--repeats 5] [--tokens 1000000]

`load` reads a run log of one execution of `tokens` unique tokens and builds its tree; `memory` is the most that was
held meanwhile, over the size of the tree's arrays (ids and log-probs). `by_prefix` builds a tree of as many unique
tokens from whole prompts; for `memory` they are taken one at a time. `append` adds one call of 200 + 100 tokens to a
tree of 200,000 tokens on one path, given its parent or its whole prompt. `draw` draws for 512 executions of 600 calls
each, trees and roles made before: once in the shape of a run (compactions, sub-agents, forks), once with 300 leaves on
one path. `rows` expands the draws of one execution of the first shape. `roles` infers its roles from tokens alone, and
those of 200 calls whose prompts were each encoded anew. `pack` packs 2,560 rows, sizes log-normal. Times
are medians. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from gyre_trajtree import (
    Call,
    RoleDecision,
    RunLogIndex,
    RunLogWriter,
    Tree,
    draw,
    execution_rng,
    flat_row,
    infer_roles,
    pack,
    shared_rows,
)

CALLS = 600
VOCABULARY = 150_000


def call(number: int, parent: str | None, prompt: np.ndarray, sampled: int, rng: np.random.Generator) -> Call:
    output = tokens(sampled, rng)
    return Call(
        f"c{number}",
        "x",
        prompt,
        output,
        parent=parent,
        logprobs=-rng.random(sampled, np.float32),
        versions=[[3, 0, sampled]],
    )


def tokens(count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, np.int32)


def conversation(unique: int, rng: np.random.Generator) -> Iterator[Call]:
    """One path of `CALLS` calls: two thirds of the tokens are read, one third is sampled."""
    each = unique // CALLS
    for number in range(CALLS):
        parent = f"c{number - 1}" if number else None
        yield call(number, parent, tokens(each - each // 3, rng), each // 3, rng)


def run_shape(rng: np.random.Generator, each: int) -> tuple[Tree, dict[str, RoleDecision]]:
    """`CALLS` calls of `each` tokens: 3 main contexts that end in a summary, 12 sub-agents, forks here and there."""
    tree, roles, system = Tree("x"), {}, tokens(2 * each, rng)
    for context in range(15):
        role = "main" if context < 3 else "sub-agent"
        parent = None
        for turn in range(CALLS // 15):
            ends = parent is not None and (turn == CALLS // 15 - 1 or rng.random() < 0.05)
            read = tokens(each - each // 3, rng)
            prompt = np.concatenate((system, read)) if parent is None else read
            node = tree.add(call(len(tree), parent, prompt, each // 3, rng))
            if ends:
                last = turn == CALLS // 15 - 1
                roles[node.id] = RoleDecision(f"{role}-summary" if last else role, 1.0, ())
            else:
                parent = node.id
        roles[parent] = RoleDecision(role, 1.0, ())
    return tree, {leaf.id: roles[leaf.id] for leaf in tree.leaves()}


def comb_shape(rng: np.random.Generator, each: int) -> tuple[Tree, dict[str, RoleDecision]]:
    """One path of half the calls; each other call forks off it."""
    tree = Tree("x")
    for number in range(CALLS):
        parent = f"c{max(0, number - 2 + number % 2)}" if number else None
        tree.add(call(number, parent, tokens(each - each // 3, rng), each // 3, rng))
    return tree, {leaf.id: RoleDecision("main", 1.0, ()) for leaf in tree.leaves()}


def median_ms(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 3)


def read_and_build(log: Path) -> Tree:
    with RunLogIndex(log) as index:
        return Tree.from_calls(index.load("x").calls)


def peak(build: Callable[[], Tree]) -> float:
    """Most memory held while a tree is built, over the size of its arrays."""
    tracemalloc.start()
    calls = [node.call for node in build().nodes]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    arrays = sum(each.input_ids.nbytes + each.output_ids.nbytes + each.logprobs.nbytes for each in calls)
    return round(most / arrays, 2)


def load(folder: Path, unique: int, repeats: int) -> dict:
    result = {}
    for form in ("plain", "packed"):
        log = folder / f"{form}.jsonl"
        with RunLogWriter(log, packed=form == "packed") as writer:
            for each in conversation(unique, np.random.default_rng(0)):
                writer.append(each)
        result[form] = {
            "bytes": log.stat().st_size,
            "ms": median_ms(lambda log=log: read_and_build(log), repeats),
            "memory": peak(lambda log=log: read_and_build(log)),
        }
    return result


def whole_prompts(unique: int, rng: np.random.Generator) -> Iterator[Call]:
    """Five contexts of a fifth of the tokens each, every prompt written out, none naming its parent."""
    each, path = unique // CALLS, tokens(0, rng)
    for number in range(CALLS):
        if number % (CALLS // 5) == 0:
            path = tokens(0, rng)
        prompt = np.concatenate((path, tokens(each - each // 3, rng)))
        fresh = call(number, None, prompt, each // 3, rng)
        path = np.concatenate((prompt, fresh.output_ids))
        yield fresh


def by_prefix(unique: int, repeats: int) -> dict:
    memory = peak(lambda: Tree.from_calls(whole_prompts(unique, np.random.default_rng(0))))
    calls = list(whole_prompts(unique, np.random.default_rng(0)))
    prompt_tokens = sum(len(each.input_ids) for each in calls)
    return {
        "prompt_tokens": prompt_tokens,
        "ms": median_ms(lambda: Tree.from_calls(calls), repeats),
        "memory": memory,
    }


def append(repeats: int) -> dict:
    result = {}
    for way in ("by_parent", "by_prefix"):
        rng = np.random.default_rng(0)
        tree = Tree("x")
        for each in conversation(200_000, rng):
            last = tree.add(each)
        path, times = tree.path_tokens(last), []
        for _ in range(100 + 40 * repeats):
            read = tokens(200, rng)
            if way == "by_parent":
                fresh = call(len(tree), last.id, read, 100, rng)
            else:
                fresh = call(len(tree), None, np.concatenate((path, read)), 100, rng)
            start = time.perf_counter()
            node = tree.add(fresh)
            times.append(time.perf_counter() - start)
            assert node.parent is last
            path, last = np.concatenate((path, read, node.call.output_ids)), node
        result[f"{way}_us"] = round(statistics.median(times[100:]) * 1e6, 1)
        result[f"{way}_worst_us"] = round(max(times[100:]) * 1e6, 1)
    return result


def drawing(repeats: int) -> dict:
    result: dict = {"executions": 512, "calls": CALLS}
    for name, shape in (("run", run_shape), ("comb", comb_shape)):
        trees = [shape(np.random.default_rng(seed), 6) for seed in range(16)]
        result[f"{name}_leaves"] = len(trees[0][1])
        for j_max in (5, None):

            def work(j_max: int | None = j_max, trees: list = trees) -> None:
                for number in range(512):
                    tree, roles = trees[number % 16]
                    draw(tree, roles, j_max, execution_rng(0, f"x{number}"))

            result[f"{name}_j_max_{j_max or 'none'}_ms"] = median_ms(work, repeats)
    return result


def rows(repeats: int) -> dict:
    tree, roles = run_shape(np.random.default_rng(0), 333)
    result: dict = {"unique_tokens": sum(node.end - node.start for node in tree.nodes)}
    for j_max in (5, None):
        draws = draw(tree, roles, j_max, execution_rng(0, "x"))
        name = j_max or "none"
        flats = [flat_row("x", each) for each in draws]
        result[f"j_max_{name}"] = {
            "paths": len(draws),
            "flat_tokens": sum(len(row.ids) for row in flats),
            "flat_ms": median_ms(lambda draws=draws: [flat_row("x", each) for each in draws], repeats),
            "shared_tokens": sum(len(row) for row in shared_rows(tree, draws)),
            "shared_ms": median_ms(lambda draws=draws: shared_rows(tree, draws), repeats),
            "shared_65536_rows": len(shared_rows(tree, draws, 65_536)),
            "shared_65536_tokens": sum(len(row) for row in shared_rows(tree, draws, 65_536)),
            "shared_65536_ms": median_ms(lambda draws=draws: shared_rows(tree, draws, 65_536), repeats),
        }
    return result


def inference(repeats: int) -> dict:
    run, _ = run_shape(np.random.default_rng(0), 333)
    result = {"run_ms": median_ms(lambda: infer_roles(run), repeats)}
    anew = Tree("x")
    for each in encoded_anew(np.random.default_rng(0)):
        anew.add(each)
    result["anew_prompt_tokens"] = sum(len(node.call.input_ids) for node in anew.nodes)
    return result | {"anew_ms": median_ms(lambda: infer_roles(anew), repeats)}


def encoded_anew(rng: np.random.Generator) -> Iterator[Call]:
    """200 calls whose writer encodes each prompt anew, so that none extends the one before it exactly."""
    prompt = tokens(3000, rng)
    for number in range(200):
        each = call(number, None, prompt, 250, rng)
        yield each
        again = each.output_ids.copy()
        again[0] = (again[0] + 1) % VOCABULARY
        prompt = np.concatenate((prompt, again, tokens(250, rng)))


def packing(repeats: int) -> dict:
    sizes = np.clip(np.random.default_rng(0).lognormal(9.2, 0.9, 2560), 1, 65_536).astype(int).tolist()
    return {
        "rows": len(sizes),
        "bins": len(pack(sizes, 65_536)),
        "lower_bound": -(-sum(sizes) // 65_536),
        "ms": median_ms(lambda: pack(sizes, 65_536), repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {"load": load(Path(folder), options.tokens, options.repeats)}
    result["by_prefix"] = by_prefix(options.tokens, options.repeats)
    result["append"] = append(options.repeats)
    result["draw"] = drawing(options.repeats)
    result["rows"] = rows(options.repeats)
    result["roles"] = inference(options.repeats)
    result["pack"] = packing(options.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
