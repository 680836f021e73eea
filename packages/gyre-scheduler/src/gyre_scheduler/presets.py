"""Named simulations: the quickstart, and the paper's NL2RepoBench configurations (32 nodes, Table 1)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SettingsError
from .settings import SchedulerSettings
from .simulator import SECOND, Costs
from .workloads import TwoLevelLognormal

NODE = 36
"""Executions that one node of the paper's runs serves."""
PAPER = dict(group_size=16, groups_per_step=32, steps=12)


@dataclass(frozen=True)
class Preset:
    """Settings, workload and costs of one run, and the paper's hours for it where it gives them."""

    settings: SchedulerSettings
    workload: TwoLevelLognormal = TwoLevelLognormal()
    costs: Costs = Costs()
    paper_hours: float | None = None


PRESETS: dict[str, Preset] = {
    # Seconds instead of hours; the workload and the costs are of the size that two CPU cores show.
    "quickstart": Preset(
        SchedulerSettings(cells=(24, 24), groups_per_step=6),
        TwoLevelLognormal(mean_log=-7.56, between=0.43, within=0.13, cap_hours=60 * SECOND),
        Costs(
            node_hours_per_step=0.4 * SECOND,
            executions_per_node=24,
            micro_steps_per_group=1,
            to_training_hours=0.2 * SECOND,
            to_rollout_hours=0.2 * SECOND,
            update_hours=0.02 * SECOND,
            publish_hours=0.1 * SECOND,
        ),
    ),
    "nl2repo-e0": Preset(
        SchedulerSettings(policy="elastic", phi=0.5, mu=3, cells=(4 * NODE,) * 8, **PAPER), paper_hours=16.12
    ),
    # The paper's training/rollout split of A0 is not in its text; 8 + 24 nodes is an assumption.
    "nl2repo-a0": Preset(
        SchedulerSettings(
            policy="async",
            phi=1.5,
            mu=1,
            cells=(8 * NODE, 24 * NODE),
            training_cells=1,
            streaming=False,
            **PAPER,
        ),
        paper_hours=25.08,
    ),
    "nl2repo-c0": Preset(
        SchedulerSettings(policy="colocate", phi=0, mu=4, cells=(4 * NODE,) * 8, streaming=False, **PAPER),
        paper_hours=23.25,
    ),
}


def preset(name: str) -> Preset:
    """The preset of this name; SettingsError lists the names otherwise."""
    if name not in PRESETS:
        raise SettingsError(f"there is no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
