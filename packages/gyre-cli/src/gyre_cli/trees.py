"""The commands `gyre tree inspect | sample | export`: a run log shown, sampled, handed to other projects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_trajtree import ROLES, Inspection, Ledger, inspect, sample_run, summarise
from gyre_trajtree.errors import RunLogCorrupt
from gyre_trajtree.exports import export
from rich.console import Console

from gyre_cli.errors import MisuseError
from gyre_cli.runlogs import Watched, chosen, opened, refuse_existing, warn_of
from gyre_cli.tokentexts import TokenTexts
from gyre_cli.treepage import tree_page
from gyre_cli.treeview import show_execution, show_executions, show_sampling


@dataclass(frozen=True)
class Look:
    """What `gyre tree inspect` was asked for."""

    log: Path
    execution: str | None = None
    """An id or the beginning of one; None for all executions."""
    j_max: int = 5
    """Trajectories that training would draw from an execution; 0 takes all."""
    seed: int = 0
    full: bool = False
    html: Path | None = None
    force: bool = False
    tokenizer: Path | None = None


def inspect_log(look: Look, as_json: bool) -> dict[str, Any]:
    """Summaries of the executions of a run log (`summarise`), also printed for people unless `as_json`.

    Lines that cannot be read are named on standard error and under "corrupt_lines"; the rest is shown.
    """
    if look.html:
        refuse_existing(look.html, look.force, look.log)
    elif look.tokenizer:
        raise MisuseError("--tokenizer is for the texts of a page; add --html FILE")
    corrupt: list[RunLogCorrupt] = []
    texts = TokenTexts(look.tokenizer) if look.tokenizer else None
    with ExitStack() as stack:
        index = stack.enter_context(opened(look.log, corrupt))
        ids = index.ids if look.execution is None else [chosen(index, look.execution)]
        page = look.html and stack.enter_context(tree_page(look.html, look.log.name, texts, look.force))
        require_reward = any(each.assessed for each in index.outlines())
        only: list[Inspection] = []

        def inspections() -> Iterator[Inspection]:
            for recorded in Watched(index, ids, "inspecting"):
                found = inspect(recorded, look.j_max or None, look.seed, require_reward)
                if page:
                    page.add(found)
                if len(ids) == 1:
                    only.append(found)
                yield found

        result = summarise(inspections())
    result["corrupt_lines"] = warn_of(corrupt)
    if look.html:
        result["html"] = str(look.html)
    if not as_json:
        _show(result, only, look)
    return result


@dataclass(frozen=True)
class Sampling:
    """What `gyre tree sample` and `gyre tree export` were asked for."""

    log: Path
    format: str
    target: Path | None
    """None only counts."""
    j_max: int = 5
    """Most trajectories of an execution; 0 takes all."""
    seed: int = 0
    normalise: str = "mean"
    train_auxiliary: bool = False
    force: bool = False


def sample_log(wanted: Sampling, as_json: bool) -> dict[str, Any]:
    """Draw the samples of a run log as training does, write them, account for every sampled token.

    Prints the account for people unless `as_json`. Nothing is written unless the whole log can be read and the
    account holds.
    """
    if wanted.target:
        refuse_existing(wanted.target, wanted.force, wanted.log)
    ledger = Ledger()
    with opened(wanted.log) as index:
        samples = sample_run(
            Watched(index, index.ids, "sampling"),
            j_max=wanted.j_max or None,
            seed=wanted.seed,
            normalise=wanted.normalise,
            train_auxiliary=wanted.train_auxiliary,
            ledger=ledger,
        )
        if wanted.target:
            export(samples, wanted.format, wanted.target, ledger, overwrite=wanted.force)
        else:
            for _ in samples:
                pass
        executions = len(index)
    result = {
        "executions": executions,
        "trajectories": ledger.roles.total(),
        "roles": {role: ledger.roles[role] for role in ROLES if role in ledger.roles},
        "sampled_tokens": ledger.sampled,
        "trained_tokens": ledger.trained,
        "excluded_tokens": dict(sorted(ledger.excluded.items())),
        "format": wanted.format if wanted.target else None,
        "output": str(wanted.target) if wanted.target else None,
    }
    if not as_json:
        show_sampling(result, Console())
    return result


def _show(result: dict[str, Any], only: list[Inspection], look: Look) -> None:
    console = Console()
    if only:
        show_execution(only[0], look.full, console)
    else:
        show_executions(result, console)
    if look.html:
        console.print(f"page: {look.html}", style="dim", markup=False, highlight=False, soft_wrap=True)
