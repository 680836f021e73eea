"""What a finished run says of itself: the figures of `summary.json`, and the same for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from gyre_cli.progress import sparkline

if TYPE_CHECKING:
    from gyre_cli.preflight import Plan
    from gyre_cli.train import Run

EDGE = 3
"""Steps at each end over which the reward is averaged."""


def summarise(plan: Plan, run: Run, seconds: float) -> dict[str, Any]:
    """Figures of a finished run. Closes the token ledger, so call it once."""
    rows, ledger = run.training.rows, run.admission.close()
    rewards = [row["reward_mean"] for row in rows]
    staleness = run.scheduler.staleness_mean
    return {
        "policy": plan.schedule.policy,
        "seed": plan.config.seed,
        "steps": len(rows),
        "seconds": seconds,
        "executions": run.rollouts.launched,
        "outcomes": outcomes(run),
        "reward_first3": _mean(rewards[:EDGE]),
        "reward_last3": _mean(rewards[-EDGE:]),
        "rewards": rewards,
        "staleness_mean": None if staleness is None else float(staleness),
        "staleness_target": float(plan.schedule.staleness_target),
        "sampled_tokens": ledger.sampled,
        "trained_tokens": ledger.trained,
        "excluded_tokens": dict(ledger.excluded),
        "trajectories": dict(ledger.roles),
        "role_switches": run.roles.switches,
        "reroutes": run.routes.continued,
        "max_logprob_mismatch": max((row["logprob_mismatch"] for row in rows), default=0.0),
        "same_version_tokens": sum(row["same_version_tokens"] for row in rows),
        "run_dir": str(plan.run_dir),
    }


def outcomes(run: Run) -> dict[str, int]:
    """How the launched executions ended, and how many of them have no valid reward."""
    recorded = run.history.executions.values()
    ends = Counter(state.termination for each in recorded for state in each.states if state.state == "closed")
    return {**ends, "unassessed": sum(each.reward is None for each in recorded)}


def show_summary(summary: dict[str, Any]) -> None:
    """Print a summary for people on standard output."""
    gain = summary["reward_last3"] - summary["reward_first3"]
    shown = f"({gain:+.3f})" if summary["steps"] >= 2 * EDGE else "(the same steps in part)"
    console = Console()  # lines, not a table: a table cuts paths, which people copy
    excluded = ", ".join(f"{reason} {count:,}" for reason, count in summary["excluded_tokens"].items())
    for name, value in (
        (
            "reward",
            f"{summary['reward_first3']:.3f} in the first {EDGE} steps, {summary['reward_last3']:.3f} in the last "
            f"{shown}  {sparkline(summary['rewards'])}",
        ),
        (
            "steps",
            f"{summary['steps']} ({summary['policy']}, seed {summary['seed']}) in {summary['seconds']:.0f} s",
        ),
        (
            "executions",
            f"{summary['executions']:,}: " + ", ".join(f"{n} {k}" for k, n in summary["outcomes"].items()),
        ),
        ("staleness", f"{summary['staleness_mean']:.3f} mean, target {summary['staleness_target']:g}"),
        (
            "tokens",
            f"{summary['sampled_tokens']:,} sampled = {summary['trained_tokens']:,} trained + excluded ({excluded or '0'})",
        ),
        ("trajectories", ", ".join(f"{n:,} {role}" for role, n in summary["trajectories"].items())),
        (
            "cells",
            f"{summary['role_switches']} role switches, {summary['reroutes']} calls went on at another engine",
        ),
        (
            "log-probs",
            f"engine and trainer differ by at most {summary['max_logprob_mismatch']:.1e} over "
            f"{summary['same_version_tokens']:,} tokens at equal weights",
        ),
        ("run", summary["run_dir"]),
        (
            "look at",
            f"{summary['run_dir']}/report.html, and: gyre tree inspect {summary['run_dir']}/run.jsonl",
        ),
    ):
        console.print(Text.assemble((f"  {name:<16}", "dim"), value), soft_wrap=True)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
