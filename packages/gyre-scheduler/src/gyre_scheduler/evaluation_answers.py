"""What every way of evaluating has in common: the work that is assessed, the answer, and its checks.

An answer is an object: `score` in [0, 1], and optionally `detail` (why), `artifact` (a reference to the state that was
assessed) and `intermediate`, a list of such objects for earlier states, each with an `artifact` of its own and perhaps
the `branch` it lies on. Evaluators are other people's programs: whatever they say is either a Verdict or Unresolved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from .errors import Unresolved

ANSWER_LIMIT = 1 << 20
"""Bytes of one answer that are read."""
TEXT_LIMIT = 2000
"""Characters kept of a detail, an artifact or a branch."""
KEYS = ("score", "detail", "artifact", "intermediate")


@dataclass(frozen=True, slots=True)
class Intermediate:
    """An assessment of an earlier state. It keeps its own reference and never supplies the reward."""

    status: Literal["valid", "unresolved"]
    score: float | None
    detail: str | None
    artifact: str | None
    branch: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A checked answer."""

    score: float
    detail: str | None = None
    artifact: str | None = None
    intermediate: tuple[Intermediate, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """What one attempt assesses."""

    workspace: Path
    task: Mapping[str, Any]
    execution: str
    attempt: int
    """From 1."""
    late: Callable[[Verdict], None] | None = None
    """Takes an answer that comes after the time limit; None where another attempt follows."""


class Scoring(Protocol):
    """One way to run an evaluator."""

    async def check(self) -> None:
        """EvaluatorNotFound if the evaluator cannot be used. The only place where that can happen."""

    async def score(self, work: Work, timeout_s: float, deadline: float) -> Verdict:
        """Unresolved if there is no verdict within `timeout_s`, and in any case by `deadline`."""

    async def close(self) -> None:
        """End every process and connection of it."""


def verdict(answer: Any) -> Verdict:
    """The verdict that an answer gives; Unresolved if it gives none."""
    if not isinstance(answer, Mapping) or "score" not in answer:
        raise Unresolved(f'the answer is not an object {{"score": x}} but {shown(answer)}')
    intermediate = answer.get("intermediate", [])
    if not isinstance(intermediate, list):
        raise Unresolved(f"intermediate must be a list, not {shown(intermediate)}")
    return Verdict(
        score=_score(answer["score"]),
        detail=clean(answer.get("detail")),
        artifact=_reference(answer, "artifact"),
        intermediate=tuple(map(_intermediate, intermediate)),
    )


def parsed(text: str | bytes) -> Any:
    """The JSON value of a text; ValueError for anything else, however deep or long its parts are."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def clean(text: Any) -> str | None:
    """A text that any log can hold: bounded, without halves of characters. None stays None."""
    if text is None:
        return None
    whole = text if isinstance(text, str) else _text(text)
    return whole[:TEXT_LIMIT].encode(errors="replace").decode()


def shown(value: Any) -> str:
    """A value in a message."""
    return repr(value)[:100] if isinstance(value, str) else _text(value)[:100]


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "something nested too deeply to be told"


def _score(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise Unresolved(f"the score is not a number but {shown(raw)}")
    if not 0 <= raw <= 1:
        raise Unresolved(f"the score {str(raw)[:40]} is outside [0, 1]")
    return float(raw)


def _reference(answer: Mapping[str, Any], name: str) -> str | None:
    found = answer.get(name)
    if found is not None and not isinstance(found, str):
        raise Unresolved(f"{name} is not text but {shown(found)}")
    return clean(found) or None


def _intermediate(answer: Any) -> Intermediate:
    """A bad one is kept as unresolved: it takes nothing from the score of the whole."""
    try:
        found = verdict(answer)
        branch = _reference(answer, "branch")
        if found.artifact is None:
            raise Unresolved("an intermediate assessment needs an artifact, which says what it assessed")
    except (Unresolved, RecursionError) as reason:
        return Intermediate("unresolved", None, clean(str(reason)), None, None)
    return Intermediate("valid", found.score, found.detail, found.artifact, branch)
