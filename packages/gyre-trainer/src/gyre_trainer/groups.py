"""The driver's side of `membership`: collectives over prefixes of the live cells. asyncio, no torch.

Invariants: groups are built over all live cells, whenever a prefix is needed that the present ones do not have; a
group that failed is never used again; a cell is given up only when it shows no progress for longer than one
single collective may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gyre_trainer.cells import CellProcess
from gyre_trainer.errors import CellError

COLLECTIVE_ATTEMPTS = 3
"""Attempts of a collective that fails though no cell died; each death allows one more."""
COLLECTIVE_MARGIN_S = 5.0
"""Seconds that a cell may show no progress beyond the deadline of one collective."""


class PrefixGroups:
    """The groups of one run. `cells` are the live cells, `order` lists them in the order of groups, the core
    first, and `core` returns the core or raises what ended the run.
    """

    def __init__(
        self,
        cells: Mapping[int, CellProcess],
        order: Callable[[], list[int]],
        core: Callable[[], CellProcess],
        timeout_s: float,
    ):
        self._cells = cells
        self._order = order
        self._core = core
        self._timeout_s = timeout_s
        self._store: tuple[str, int] | None = None
        self._generation = 0
        self._members: tuple[int, ...] = ()

    async def start(self) -> None:
        """Let the core host the store, and prebuild the groups."""
        self._store = await self._core().call("host_store")
        await self._join()

    def prefix(self, needed: Iterable[int]) -> tuple[int, ...]:
        """The shortest prefix of the order that holds the core and all of `needed` that live."""
        order = self._order()
        last = max((order.index(index) for index in needed if index in self._cells), default=0)
        return tuple(order[: last + 1])

    def attempts(self) -> range:
        """As many attempts as a collective may need; the last one raises rather than returns False."""
        return range(COLLECTIVE_ATTEMPTS + len(self._cells))

    async def run(self, operation: str, prefix: tuple[int, ...], attempt: int, **arguments: Any) -> bool:
        """Run a collective on all cells of a prefix, building groups first where needed.

        False when it failed and may be tried again with the cells that live now. Raises what a further
        attempt cannot mend, and the failure of the last attempt.
        """
        cells = {index: self._cells[index] for index in prefix}
        failure: CellError | None = None
        if self._members[: len(prefix)] != prefix:
            failure = await self._join()
        if failure is None:
            failure = await self._all(cells, operation, count=len(prefix), **arguments)
        if failure is None:
            return True
        self._members = ()  # a group that failed once stays broken
        alive = all(self._cells.get(index) is cell for index, cell in cells.items())
        if alive and attempt >= COLLECTIVE_ATTEMPTS - 1:
            raise failure
        return False

    async def _join(self) -> CellError | None:
        """Build the prefix groups of all live cells under a new generation; the failure, or None."""
        self._generation += 1
        members = tuple(self._order())
        cells = {index: self._cells[index] for index in members}
        failure = await self._all(
            cells, "join", generation=self._generation, members=members, store=self._store
        )
        self._members = () if failure else members
        return failure

    async def _all(self, cells: dict[int, CellProcess], operation: str, **arguments: Any) -> CellError | None:
        """Run an operation on all `cells` at once. The first failure that a retry may mend, or None."""
        wait = self._timeout_s + COLLECTIVE_MARGIN_S
        calls = [cell.call(operation, timeout_s=wait, **arguments) for cell in cells.values()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        self._core()
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for failure in failures:
            if not isinstance(failure, CellError) or failure.kind not in ("CellDied", "CollectiveError"):
                raise failure
        return failures[0] if failures else None
