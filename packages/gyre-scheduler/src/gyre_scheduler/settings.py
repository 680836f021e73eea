"""The scheduler's settings, checked against the formulas they must satisfy.

Invariant: a `SchedulerSettings` that exists can be run to its end by a healthy environment.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from .errors import SettingsError


class SchedulerSettings(BaseModel):
    """Settings of one run. Symbols in brackets are those of the paper's section 2.2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["elastic", "async", "colocate"] = "elastic"
    group_size: int = 8
    """Executions of a group [N]."""
    oversample: int = 0
    """Executions of a group beyond N. The first N valid ones train; what still runs or waits then is cancelled."""
    groups_per_step: int = 8
    """Groups of a batch [B]."""
    phi: float = 0.5
    """Extra dispatch in units of B; phi*B must be whole."""
    mu: int = 3
    """Training steps of a burst. The last burst is shorter when `steps` is no multiple of it."""
    dispatch: Literal["boundary", "continuous"] = "boundary"
    """When groups follow: mu*B after each publication, or B after each step, at the version published by then."""
    steps: int = 24
    cells: tuple[int, ...] = (16, 16)
    """Concurrency limit of each cell in executions [c_j]; cell 0 is the core."""
    standalone: int = 0
    """Concurrency limit of the pool that never trains [c_s]; 0 means that there is none."""
    training_cells: int = 1
    """Policy async: the first cells, which always train."""
    streaming: bool = True
    """Train on each ready group at once. Otherwise a step waits until all groups that the burst still needs are ready."""
    launch_order: Literal["fifo", "longest"] = "fifo"
    """Order of the queue: as dispatched, or within a version by falling expected duration (event `Expected`)."""
    untrainable_limit: int | None = None
    """Untrainable groups in a row after which the run is aborted. None: twice the queue depth."""

    @model_validator(mode="after")
    def _check(self) -> SchedulerSettings:
        for name, least in (("group_size", 2), ("groups_per_step", 1), ("mu", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise SettingsError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.cells or min(self.cells) < 1:
            raise SettingsError("cells must list at least one limit, each at least 1 execution")
        if self.oversample < 0:
            raise SettingsError(f"oversample must be 0 or more executions, not {self.oversample}")
        if self.standalone < 0:
            raise SettingsError(f"standalone must be 0 or a limit in executions, not {self.standalone}")
        if self.untrainable_limit is not None and self.untrainable_limit < 1:
            raise SettingsError(f"untrainable_limit must be at least 1, not {self.untrainable_limit}")
        self._check_extra()
        self._check_split()
        return self

    def _check_extra(self) -> None:
        extra = self.phi * self.groups_per_step
        if not 0 <= extra < float("inf") or abs(extra - round(extra)) > 1e-9:
            raise SettingsError(
                f"phi*B must be a whole number of 0 or more, not {self.phi:g} * {self.groups_per_step} = {extra:g}; "
                "change phi or groups_per_step"
            )

    def _check_split(self) -> None:
        if self.policy != "async":
            return
        if not 1 <= self.training_cells <= len(self.cells):
            raise SettingsError(f"training_cells must be 1 to {len(self.cells)}, not {self.training_cells}")
        if self.training_cells == len(self.cells) and not self.standalone:
            raise SettingsError(
                f"policy async with training_cells = {self.training_cells} of {len(self.cells)} cells and no "
                "standalone pool leaves no rollout capacity; lower training_cells or add a cell"
            )

    @property
    def extra_groups(self) -> int:
        """phi*B, exact."""
        return round(self.phi * self.groups_per_step)

    @property
    def burst_groups(self) -> int:
        """mu*B."""
        return self.mu * self.groups_per_step

    @property
    def queue_depth(self) -> int:
        """Q_b = (phi + mu)*B groups."""
        return self.extra_groups + self.burst_groups

    @property
    def staleness_target(self) -> Fraction:
        """Eq. 2: E[d] = phi + (mu - 1)/2; continuous dispatch has phi + 3*(mu - 1)/2."""
        within_burst = Fraction(self.mu - 1, 2) * (3 if self.dispatch == "continuous" else 1)
        return Fraction(self.extra_groups, self.groups_per_step) + within_burst

    @property
    def untrainable_allowed(self) -> int:
        """Untrainable groups in a row that end the run."""
        return self.untrainable_limit or 2 * self.queue_depth
