"""`gyre tree inspect --html`: executions as one page that needs no network.

The page is `page/page.html` with its style, its script and the data of the log. Invariants: the content security
policy allows this script and this style alone, by their hashes, and no connection; data stands in blocks that no
browser runs, and the script inserts it as text only, so nothing in a log can act. One execution is in memory at a time.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from gyre_trajtree import REASONS, Call, Inspection, Node
from gyre_trajtree.exports.files import replacing
from gyre_trajtree.inspection import TRAINED
from gyre_trajtree.strands import BRANCH_CAUSES

from gyre_cli.runlogs import refuse_existing
from gyre_cli.tokentexts import TokenTexts

MOST_TOKENS = 8_000_000
"""Unique tokens after which further executions are only listed: a browser should still open the page at once."""

_SCRIPTS = ("data.js", "rows.js", "panel.js", "page.js")
_FATES = {TRAINED: "trains in a trajectory that was drawn"} | REASONS


class TreePage:
    """Writes one page, execution by execution."""

    def __init__(self, file: BinaryIO, log: str, texts: TokenTexts | None) -> None:
        self._file, self._log, self._texts = file, log, texts
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0
        head, self._tail = _part("page.html").split("<!--data-->")
        self._script = "".join(map(_part, _SCRIPTS))
        style = _part("page.css")
        policy = (
            f"default-src 'none'; script-src '{_hash(self._script)}'; style-src '{_hash(style)}'; "
            "base-uri 'none'; form-action 'none'"
        )
        self._write(head.replace("<!--policy-->", policy).replace("/*style*/", style))

    def add(self, inspection: Inspection) -> None:
        """Append one execution; beyond the page's size only its figures."""
        row = inspection.summary()
        fits = not self._rows or self._tokens + row["unique_tokens"] <= MOST_TOKENS
        if fits:
            self._tokens += row["unique_tokens"]
            self._block(f"execution-{len(self._rows)}", _execution(inspection, self._texts))
        self._rows.append(row | {"embedded": fits})

    def finish(self) -> None:
        """Write what all executions share, and the script."""
        shared = {
            "log": self._log,
            "executions": self._rows,
            "fates": _FATES,
            "causes": BRANCH_CAUSES,
            "pieces": self._texts.pieces if self._texts else None,
        }
        self._block("run", shared)
        self._write(self._tail.replace("/*script*/", self._script))

    def _block(self, name: str, value: dict[str, Any]) -> None:
        data = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).replace(b"<", b"\\u003c")
        self._file.write(b'<script type="application/json" id="%b">%b</script>\n' % (name.encode(), data))

    def _write(self, text: str) -> None:
        self._file.write(text.encode())


@contextmanager
def tree_page(target: Path, log: str, texts: TokenTexts | None, force: bool) -> Iterator[TreePage]:
    """A page that appears whole at `target` or not at all. Raises MisuseError where a file is already, without `force`."""
    refuse_existing(target, force)
    with replacing(target, force) as file:
        page = TreePage(file, log, texts)
        yield page
        page.finish()


def _execution(inspection: Inspection, texts: TokenTexts | None) -> dict[str, Any]:
    """Strands and calls of one execution; calls are named by their place in `calls`."""
    numbers = {strand: number for number, strand in enumerate(inspection.strands)}
    of_call = {node.index: number for strand, number in numbers.items() for node in strand.nodes}
    calls = [
        _call(node.call, texts)
        | {
            "parent": node.parent.index if node.parent else None,
            "start": node.start,
            "strand": of_call[node.index],
            "fates": _runs(inspection, node),
        }
        for node in inspection.tree.nodes
    ]
    strands = []
    for strand in inspection.strands:
        decision = inspection.roles[strand.leaf.id]
        strands.append(
            {
                "calls": [node.index for node in strand.nodes],
                "cause": strand.cause,
                "source": strand.source.index if strand.source else None,
                "above": numbers[strand.above] if strand.above else None,
                "abandoned": inspection.dead.get(strand.leaf.id),
                "drawn": inspection.drawn_at(strand),
                "role": decision.role,
                "confidence": decision.confidence,
                "evidence": decision.evidence,
            }
        )
    return {"strands": strands, "calls": calls, "apart": list(_apart(inspection, texts))}


def _apart(inspection: Inspection, texts: TokenTexts | None) -> Iterator[dict[str, Any]]:
    """Calls that are in no tree, with the reason as their tokens' fate."""
    late = ((call, "late", "the execution had closed") for call in inspection.recorded.late)
    rejected = ((each.call, "rejected", each.reason) for each in inspection.rejected)
    for call, fate, why in (*late, *rejected):
        shown = {
            "parent": None,
            "start": 0,
            "strand": None,
            "fates": [[fate, len(call.output_ids)]],
            "why": why,
        }
        yield _call(call, texts) | shown


def _call(call: Call, texts: TokenTexts | None) -> dict[str, Any]:
    evidence = call.evidence if isinstance(call.evidence, dict) else {}
    return {
        "id": call.id,
        "given": _packed(call.input_ids),
        "sampled": _packed(call.output_ids),
        "logprobs": _packed(call.logprobs),
        "versions": call.versions,
        "finish": call.finish,
        "engine": call.engine,
        "time": call.time,
        "sampling": call.sampling,
        "hints": call.hints,
        "digest": call.digest,
        "attempt_of": call.attempt_of,
        "asked": _recorded(evidence, "last_user"),
        "prompt": texts.text(call.input_ids) if texts else "",
        "answer": texts.text(call.output_ids) if texts else _recorded(evidence, "text"),
    }


def _recorded(evidence: dict, key: str) -> str:
    value = evidence.get(key)
    return value if isinstance(value, str) else ""


def _runs(inspection: Inspection, node: Node) -> list[list]:
    """What becomes of each sampled token: [[fate, how many in a row], ...]."""
    fates = np.where(node.trainable, inspection.fates[node.index], "no-logprob").tolist()
    if node.call.finish == "error":
        fates = ["error"] * len(fates)
    elif node.lacks_context:
        fates[0] = "no-context"
    return [[fate, len(list(run))] for fate, run in groupby(fates)]


def _packed(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _part(name: str) -> str:
    return files("gyre_cli").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
