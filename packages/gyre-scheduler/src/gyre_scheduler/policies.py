"""The three placement policies behind one interface: which cells join training, and whether the core stays.

All policies share the dispatch and the step machinery in `scheduler`; they are pure and hold no state.
The core always joins first: satellites pull its snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .cells import CellTable
from .settings import SchedulerSettings
from .waterlevel import core_has_supply, may_leave, satellite_has_supply


@dataclass(frozen=True, slots=True)
class Facts:
    """What a policy may look at besides the cells."""

    waterlevel: int
    ready: int
    """Ready groups that no step has admitted."""
    needed: int
    """Groups that the burst must still admit."""
    wanted: int
    """Ready groups that a step waits for before its first admission."""
    unclaimed: int
    """Micro-steps of the step's stream that no cell has claimed."""

    @property
    def burst_is_ready(self) -> bool:
        return self.ready >= self.needed


class Policy(Protocol):
    """One placement policy."""

    returns: bool
    """Training cells go back to rollout at the end of a burst."""

    def serving(self) -> range:
        """Cells that may hold executions."""

    def joining(self, facts: Facts, cells: CellTable) -> list[int]:
        """Cells that start their transition to training now, in order. Called while the window is open."""

    def retains_core(self, facts: Facts, cells: CellTable) -> bool:
        """Whether the core keeps training after a publication; `facts.waterlevel` is the refilled W'."""


class Elastic:
    """Cells switch one by one as the waterlevel falls (section 4.2)."""

    returns = True

    def __init__(self, settings: SchedulerSettings):
        self._settings = settings

    def serving(self) -> range:
        return range(len(self._settings.cells))

    def joining(self, facts: Facts, cells: CellTable) -> list[int]:
        if cells.roles[0] == "rollout":
            return [0] if self._core_may_train(facts, cells, without=[0]) else []
        if cells.roles[0] != "training":
            return []
        joining: list[int] = []
        on_the_way = len(cells.with_role("to_training"))
        for cell in cells.admitting():
            left = cells.capacity(without=[*joining, cell])
            supplied = satellite_has_supply(facts.unclaimed, on_the_way + len(joining))
            if not supplied or not may_leave(facts.waterlevel, left, facts.burst_is_ready):
                break
            joining.append(cell)
        return joining

    def retains_core(self, facts: Facts, cells: CellTable) -> bool:
        return self._core_may_train(facts, cells, without=[])

    def _core_may_train(self, facts: Facts, cells: CellTable, without: list[int]) -> bool:
        supplied = core_has_supply(facts.ready, facts.wanted)
        return supplied and may_leave(facts.waterlevel, cells.capacity(without), facts.burst_is_ready)


class FixedSplit:
    """Async: the first cells always train, the rest always roll out."""

    returns = False

    def __init__(self, settings: SchedulerSettings):
        self._settings = settings

    def serving(self) -> range:
        return range(self._settings.training_cells, len(self._settings.cells))

    def joining(self, facts: Facts, cells: CellTable) -> list[int]:
        waiting = [cell for cell in cells.with_role("rollout") if cell not in cells.serving]
        if cells.roles[0] == "training":
            return waiting
        return [cell for cell in waiting if cell == 0]

    def retains_core(self, facts: Facts, cells: CellTable) -> bool:
        return True


class Colocate:
    """All cells switch as one pool, once the standalone pool (if any) covers what still runs."""

    returns = True

    def __init__(self, settings: SchedulerSettings):
        self._settings = settings

    def serving(self) -> range:
        return range(len(self._settings.cells))

    def joining(self, facts: Facts, cells: CellTable) -> list[int]:
        pool = cells.admitting()
        if not pool or not may_leave(facts.waterlevel, cells.capacity(without=pool), facts.burst_is_ready):
            return []
        if cells.roles[0] == "rollout":
            return [0] if core_has_supply(facts.ready, facts.wanted) else []
        return pool if cells.roles[0] == "training" else []

    def retains_core(self, facts: Facts, cells: CellTable) -> bool:
        return False


POLICIES: dict[str, type[Elastic] | type[FixedSplit] | type[Colocate]] = {
    "elastic": Elastic,
    "async": FixedSplit,
    "colocate": Colocate,
}
