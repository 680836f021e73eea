"""`gyre tree inspect`: what a run log holds, as a table for people or an object for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gyre_trajtree import ROLES, TrajtreeError, Tree, executions, infer_roles, inspect, read_run_log
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Picture

from gyre_cli.errors import MisuseError

SHOWN = 40
"""Executions that the table lists before it only counts them."""


def inspect_log(log: Path, execution: str | None = None) -> dict[str, Any]:
    """Summaries of the executions of a run log. Raises MisuseError for a log that cannot be read."""
    if log.exists() and not log.is_file():
        raise MisuseError(f"{log} is not a file")
    try:
        result = inspect(read_run_log(log), execution)
    except TrajtreeError as error:
        raise MisuseError(str(error)) from None
    if execution is not None and not result["executions"]:
        raise MisuseError(f"{log} holds no execution {execution!r}")
    return result


def show(log: Path, result: dict[str, Any], execution: str | None) -> None:
    """Print what `inspect_log` found; one execution is drawn as a tree."""
    console = Console()
    if execution is not None:
        console.print(draw(log, execution))
    table = Table(box=None, header_style="dim")
    table.add_column("execution", no_wrap=True)
    for name in ("reward", "calls", "unique", "expanded"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("leaves by role")
    for row in result["executions"][:SHOWN]:
        table.add_row(Text(row["id"]), *_figures(row, row["reward"]))
    totals = result["totals"]
    table.add_row(f"all {totals['executions']:,}", *_figures(totals, totals["mean_reward"]), style="bold")
    console.print(table)
    console.print("unique: tokens of the tree; expanded: of all its paths written out", style="dim")
    if execution is None:
        more = len(result["executions"]) - SHOWN
        rest = f"; {more:,} more executions with --json" if more > 0 else ""
        console.print(f"one execution as a tree: --execution ID{rest}", style="dim")


def draw(log: Path, execution: str) -> Picture:
    """The calls of one execution as a tree: tokens read + sampled, finish, versions, roles at the leaves."""
    calls = executions(read_run_log(log))[execution].calls
    if not calls:
        return Picture(Text(f"{execution} made no calls", style="bold"))
    tree = Tree.from_calls(calls)
    roles = infer_roles(tree)
    picture = Picture(Text(execution, style="bold"))
    places: dict[int, Picture] = {}
    for node in tree.nodes:
        call = node.call
        label = Text(
            f"{call.id[:12]}  +{len(call.input_ids)} read, {len(call.output_ids)} sampled, {call.finish}"
        )
        label.append("".join(f", v{version}" for version in sorted({span[0] for span in call.versions})))
        if node.id in roles:
            label.append(f"  {roles[node.id].role}", style="cyan").append(
                f" ({roles[node.id].confidence:.2f})"
            )
        parent = places[node.parent.index] if node.parent else picture
        places[node.index] = parent.add(label)
    return picture


def _figures(row: dict[str, Any], reward: float | None) -> list[str]:
    counts = [f"{row[key]:,}" for key in ("calls", "unique_tokens", "expanded_tokens")]
    roles = ", ".join(f"{row['roles'][role]:,} {role}" for role in ROLES if role in row["roles"])
    return ["-" if reward is None else f"{reward:.3f}", *counts, roles]
