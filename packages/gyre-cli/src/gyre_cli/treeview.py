"""Executions on a terminal: one as a tree of strands, many as a table, and where their tokens went.

A tree shows at most `MOST_STRANDS` lines: those with most calls and those that train, each under what caused it;
every line that is left out is counted in a line that says so. Ids and texts are shown with control characters
made visible, so that a log cannot write to the terminal.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gyre_trajtree import ROLES, Inspection
from gyre_trajtree.strands import Strand
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

MOST_STRANDS = 60
"""Strands that a tree shows unless all are asked for."""
MOST_DEPTH = 10
"""Levels of the tree beyond which the rest is counted."""
MOST_ROWS = 40
"""Executions that a table lists before it only counts them."""
NARROW = 96
"""Columns below which a tree leaves out the shares of shared and masked tokens."""

ROLE_STYLES = {
    "main": "bold blue",
    "main-summary": "magenta",
    "sub-agent": "cyan",
    "sub-agent-summary": "green",
    "auxiliary": "dim",
}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    """`text` on one line, with control, format and unassigned characters as escapes."""
    return "".join(
        f"\\u{{{ord(char):x}}}" if unicodedata.category(char) in _HIDDEN else char for char in text
    )


def show_execution(inspection: Inspection, full: bool, console: Console) -> None:
    """Print one execution: who and how it ended, its strands, its figures."""
    row = inspection.summary()
    console.print(_headline(row))
    if inspection.strands:
        console.print(_picture(inspection, full, console.width))
    for line in _apart(inspection):
        console.print(Text(line, style="yellow"))
    console.print(_figures(row))


def show_executions(result: Mapping[str, Any], console: Console) -> None:
    """Print a table of executions and the figures of all."""
    rows, totals = result["executions"], result["totals"]
    table = Table(box=None, header_style="dim")
    table.add_column("execution", no_wrap=True, overflow="ellipsis")
    for name, digits in (("reward", 6), ("calls", 5), ("unique", 7), ("expanded", 8), ("trained", 7)):
        table.add_column(name, justify="right", no_wrap=True, min_width=digits)
    table.add_column("leaves by role")
    for row in rows[:MOST_ROWS]:
        table.add_row(Text(visible(row["id"])), _reward(row), *_columns(row))
    total = {"reward": totals["mean_reward"]} | totals
    table.add_row(f"all {totals['executions']:,}", _reward(total), *_columns(total), style="bold")
    console.print(table)
    console.print(_figures(totals))
    more = len(rows) - MOST_ROWS
    rest = f"; … {more:,} more executions with --json" if more > 0 else ""
    console.print(Text(f"one execution as a tree: --execution ID{rest}", style="dim"))


def show_sampling(result: Mapping[str, Any], console: Console) -> None:
    """Print what was drawn, what it trains, and where it was written."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    roles = _counts(result["roles"]) or "none"
    table.add_row(
        "trajectories", f"{result['trajectories']:,} of {_number(result['executions'], 'execution')}: {roles}"
    )
    table.add_row("sampled", _account(result))
    console.print(table)
    if result["output"]:  # no cell of a table, which would cut a path
        console.print(
            Text.assemble(("written      ", "dim"), f"{result['output']} ({result['format']})"),
            soft_wrap=True,
        )


def _headline(row: Mapping[str, Any]) -> Text:
    line = Text(visible(row["id"]), style="bold")
    for name in ("group", "task", "harness"):
        if row[name] is not None:
            line.append(f"  {name} ", style="dim").append(visible(row[name]), style="not bold")
    ended = {None: "", "opened": "open"}.get(row["state"], row["termination"] or "closed")
    line.append(f"  {ended}", style="not bold")
    reward = row["assessment"] if row["reward"] is None and row["assessment"] else f"reward {_reward(row)}"
    return line.append(f"  {reward}", style="not bold green" if row["reward"] else "not bold")


def _picture(inspection: Inspection, full: bool, width: int) -> Table:
    narrow = width < NARROW
    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for name, digits in (
        ("calls", 5),
        ("tokens", 9),
        ("shared", 6),
        ("sampled", 8),
        ("trained", 7),
        ("masked", 6),
    ):
        if not (narrow and name in ("shared", "masked")):
            table.add_column(name, justify="right", no_wrap=True, min_width=digits)
    table.add_column("strand", no_wrap=True, overflow="ellipsis")
    for strand, rails, rest in _lines(inspection, full):
        if rest:
            cells, label = _strand_cells(inspection, _all_below(rest)), _rest_label(rails, rest)
        else:
            cells, label = _strand_cells(inspection, [strand]), _label(inspection, strand, rails)
        table.add_row(*(cells[:2] + cells[3:5] if narrow else cells), label)
    return table


def _lines(inspection: Inspection, full: bool) -> Iterator[tuple[Strand | None, str, list[Strand]]]:
    """Lines of the tree from the top: (strand, rails, []) or (None, rails, strands that are only counted)."""
    shown = _shown(inspection, full)
    stack = _level([s for s in inspection.strands if s.above is None], shown, "", 0)
    while stack:
        strand, rails, under, depth, rest = stack.pop()
        yield strand, rails, rest
        if strand:
            seen = shown if full or depth < MOST_DEPTH else set()
            stack += _level(strand.below, seen, under, depth + 1)


def _level(strands: list[Strand], shown: set[Strand], rails: str, depth: int) -> list[tuple]:
    """The lines of strands next to each other, last first: (strand, rails, rails below it, depth, uncounted)."""
    kept: list[tuple[Strand | None, list[Strand]]] = [(strand, []) for strand in strands if strand in shown]
    if rest := [strand for strand in strands if strand not in shown]:
        kept.append((None, rest))
    lines = []
    for place, (strand, left) in enumerate(kept, 1):
        joint = under = ""
        if depth:
            shares = strand is None or strand.head.parent is not None
            joint = ("├" if place < len(kept) else "└") + ("─ " if shares else "╌ ")
            under = "│  " if place < len(kept) else "   "
        lines.append((strand, rails + joint, rails + under, depth, left))
    return lines[::-1]


def _shown(inspection: Inspection, full: bool) -> set[Strand]:
    """The strands to show: those that train or hold something that does, then those with most calls below."""
    strands = inspection.strands
    if full or len(strands) <= MOST_STRANDS:
        return set(strands)
    calls = {strand: len(strand.nodes) for strand in strands}
    trains = {strand: inspection.drawn_at(strand) is not None for strand in strands}
    for strand in reversed(strands):  # a strand comes after the one it stands under
        if strand.above:
            calls[strand.above] += calls[strand]
            trains[strand.above] |= trains[strand]
    ranked = sorted(strands, key=lambda strand: (not trains[strand], -calls[strand], strand.head.index))
    return set(ranked[:MOST_STRANDS])


def _all_below(strands: Iterable[Strand]) -> list[Strand]:
    found, stack = [], list(strands)
    while stack:
        strand = stack.pop()
        found.append(strand)
        stack += strand.below
    return found


def _strand_cells(inspection: Inspection, strands: list[Strand]) -> list[str]:
    """Calls, tokens, shared, sampled, trained, masked of these strands' own calls."""
    nodes = [node for strand in strands for node in strand.nodes]
    tokens = sum(node.end - node.start for node in nodes)
    branching = [_last_branching(strand) for strand in strands]
    shared = sum(
        node.end - node.start
        for strand, last in zip(strands, branching, strict=True)
        for node in strand.nodes[: last + 1]
    )
    sampled = sum(len(node.call.output_ids) for node in nodes)
    trained = sum(map(inspection.trained, nodes))
    return [
        f"{len(nodes):,}",
        f"{tokens:,}",
        _percent(shared, tokens),
        f"{sampled:,}",
        _percent(trained, sampled),
        _percent(sampled - trained, sampled),
    ]


def _last_branching(strand: Strand) -> int:
    """Place of the last call of a strand that lies on more than one path; -1 when none does."""
    return max((i for i, node in enumerate(strand.nodes) if len(node.children) > 1), default=-1)


def _label(inspection: Inspection, strand: Strand, rails: str) -> Text:
    decision = inspection.roles[strand.leaf.id]
    line = Text(rails, style="dim", no_wrap=True, overflow="ellipsis")
    abandoned = inspection.dead.get(strand.leaf.id)
    if abandoned:
        line.append(f"✗ {abandoned}", style="not dim red")
    else:
        line.append(decision.role, style=f"not dim {ROLE_STYLES[decision.role]}")
        line.append(f" {decision.confidence:.2f}")
    if number := inspection.drawn_at(strand):
        line.append(f" ◆{number}", style="not dim yellow")
    if strand.cause != abandoned:
        line.append(f"  {strand.cause}", style="not dim")
    if strand.source and strand.source is not strand.head.parent:
        line.append(f" of {_short(strand.source.id)}")
    line.append(f"  {_short(strand.head.id)}")
    if len(strand.nodes) > 1:
        line.append(f" … {_short(strand.leaf.id)}")
    return line


def _rest_label(rails: str, rest: list[Strand]) -> Text:
    hidden = _all_below(rest)
    causes = ", ".join(
        f"{count:,} {cause}" for cause, count in Counter(s.cause for s in hidden).most_common()
    )
    return Text(
        f"{rails}… {len(hidden):,} more: {causes}", style="dim italic", no_wrap=True, overflow="ellipsis"
    )


def _apart(inspection: Inspection) -> Iterator[str]:
    if late := inspection.recorded.late:
        yield f"{_number(len(late), 'call')} came after the execution had closed: {_short(late[0].id)}{_more(late)}"
    if rejected := inspection.rejected:
        yield f"{_number(len(rejected), 'call')} in no tree: {visible(rejected[0].reason)}{_more(rejected)}"


def _more(things: list) -> str:
    return f"; … {len(things) - 1:,} more" if len(things) > 1 else ""


def _figures(row: Mapping[str, Any]) -> RenderableType:
    """What the tree saves, where the sampled tokens went, why strands begin."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row(
        "tokens",
        f"{row['unique_tokens']:,} unique, {row['expanded_tokens']:,} on all paths written out: "
        f"{row['saving']:.0%} saved",
    )
    table.add_row("sampled", f"{_account(row)} (paths drawn: {row['trajectories']:,})")
    branches = _counts(row["branches"]) or "none"
    table.add_row("strands", f"{row['leaves']:,}: {branches}; {_number(row['dead_tips'], 'dead tip')}")
    return table


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _account(row: Mapping[str, Any]) -> str:
    excluded = _counts(row["excluded_tokens"]).replace(", ", " + ")
    return f"{row['sampled_tokens']:,} = {row['trained_tokens']:,} trained" + (
        f" + {excluded}" if excluded else ""
    )


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {name}" for name, count in ordered)


def _columns(row: Mapping[str, Any]) -> list[str]:
    counts = [f"{row[key]:,}" for key in ("calls", "unique_tokens", "expanded_tokens")]
    roles = ", ".join(f"{row['roles'][role]:,} {role}" for role in ROLES if role in row["roles"])
    return [*counts, _percent(row["trained_tokens"], row["sampled_tokens"]), roles]


def _reward(row: Mapping[str, Any]) -> str:
    return "-" if row["reward"] is None else f"{row['reward']:.3f}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _short(identity: str) -> str:
    text = visible(identity)
    return text if len(text) <= 16 else text[:15] + "…"
