"""What a person sees while a run goes on: phases at the start, one line for each step, a status line that stays alive.

Everything goes to standard error, so standard output carries only results.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"


class Progress:
    """Shows a run on a terminal; on anything else (a log file, CI) prints one plain line for each step."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.steps = steps
        self.rows: list[dict[str, Any]] = []
        self.roles: dict[int, str] = {}
        self.waterlevel = 0
        self.executions = 0
        self.phase = "starting"
        self.started = time.monotonic()
        self._live = Live(
            get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live.is_started:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print one line above the live part."""
        self.phase = text
        self.console.print(text, highlight=False, markup=False)

    def step(self, row: dict[str, Any]) -> None:
        """Report one finished training step (a row of metrics.jsonl)."""
        self.rows.append(row)
        bar = sparkline([r["reward_mean"] for r in self.rows][-40:])
        line = (
            f"step {row['step']:>3}/{self.steps}  reward {row['reward_mean']:.3f}  "
            f"staleness {row['staleness_mean']:.2f}  tokens {row['trained_tokens']:>6}  "
            f"cells {','.join(map(str, row['cells']))}  {row['elapsed_s']:>5.0f} s"
        )
        self.console.print(Text(line + ("  " + bar if self.console.is_terminal else "")))

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        roles = Text()
        for cell in sorted(self.roles):
            style = {"training": "bold yellow", "rollout": "bold cyan"}.get(self.roles[cell], "dim")
            roles.append(f" {'core' if cell == 0 else f'cell {cell}'}: {self.roles[cell]} ", style=style)
        table.add_row(
            f"{time.monotonic() - self.started:5.0f} s",
            roles,
            f"waterlevel {self.waterlevel:>4}",
            f"executions {self.executions:>5}",
            Text(self.phase, style="dim")
            if not self.rows
            else sparkline([r["reward_mean"] for r in self.rows][-60:]),
        )
        return table


def sparkline(values: list[float]) -> str:
    """Values in [0, 1] as one character each."""
    return "".join(BARS[min(int(max(value, 0.0) * len(BARS)), len(BARS) - 1)] for value in values)
