"""The quickstart's tasks, queues of small files to write, and the evaluator of a finished workspace.

Three kinds of item: `write PATH=WORD` says what to write; `read PATH=KEY` says where the word is kept, in a
note that only the `read` tool opens; `task PATH=WORD` must be done by a sub-agent. What a file must hold is
under `expect`, which only the evaluator gets.

Invariant: a seed determines the tasks, and the word of a `read` item stands in its note alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# fmt: off
PATHS = [
    "api", "cli", "core", "data", "docs", "envs", "flags", "graph", "hooks", "index", "jobs", "keys",
    "logs", "main", "nets", "opts", "page", "query", "rules", "store", "test", "util", "view", "work",
]
WORDS = [
    "amber", "azure", "beige", "black", "blue", "bronze", "brown", "coral", "cyan", "gold", "gray",
    "green", "indigo", "ivory", "jade", "lime", "mauve", "navy", "olive", "pink", "plum", "red", "ruby",
    "teal",
]
# fmt: on
READ_SHARE = 0.35
TASK_SHARE = 0.20
ITEMS = (3, 6)
TIGHT_BUDGET = 75
"""Tokens of context after which the harness compacts: about three turns of the tiny model's template."""
ROOMY_BUDGET = 1000
TIGHT_SHARE = 0.4


def make_tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Endless tasks {"id", "prompt", "files", "harness", "expect"}, the same for the same seed.

    `prompt` holds one item a line, `files` maps paths to the text they start with, `harness` holds the
    harness's own settings ("context_budget" in tokens), `expect` maps paths to the exact text of a right result.
    """
    rng = random.Random(f"gyre-quickstart-{seed}")
    number = 0
    while True:
        yield {"id": f"queue-{seed}-{number:05d}", **_task(rng)}
        number += 1


def _task(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(*ITEMS)
    paths, words = rng.sample(PATHS, count), rng.sample(WORDS, 2 * count)
    items, files, expect = [], {}, {}
    for path, shown, hidden in zip(paths, words[:count], words[count:], strict=True):
        draw = rng.random()
        if draw < READ_SHARE:
            items.append(f"read {path}={shown}")
            files[f"notes/{shown}"] = f"write {path}={hidden}"
            expect[path] = hidden
        else:
            items.append(f"{'task' if draw < READ_SHARE + TASK_SHARE else 'write'} {path}={shown}")
            expect[path] = shown
    budget = TIGHT_BUDGET if rng.random() < TIGHT_SHARE else ROOMY_BUDGET
    harness = {"context_budget": budget}
    return {"prompt": "\n".join(items), "files": files, "harness": harness, "expect": expect}


def evaluate(workspace: Path, task: dict[str, Any]) -> float:
    """Share of the expected files that the workspace holds with exactly the right text, in [0, 1]."""
    expect = task["expect"]
    return sum(_holds(Path(workspace) / path, text) for path, text in expect.items()) / len(expect)


def _holds(path: Path, text: str) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    right = text.encode()
    with path.open("rb") as file:
        return file.read(len(right) + 1) == right
