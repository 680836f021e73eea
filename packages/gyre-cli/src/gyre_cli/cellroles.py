"""Moves cells between rollout and training (`gyre_scheduler.runtime.Cells`) and brings lost satellites back.

Order of a move to training: stop admitting, reroute, drain, release the engine, join. Order back: restore the engine at
a verified version, then admit. A cell that dies is reported to the scheduler exactly once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from gyre_scheduler.errors import LostCell
from gyre_scheduler.events import CellBack, CellLost, Event
from gyre_trainer.errors import CellDied, TrainerError
from gyre_trainer.pool import CORE, CellPool

from gyre_cli.progress import Progress
from gyre_cli.record import RunRecord
from gyre_cli.routes import Routes


class CellRoles:
    """The roles of one run's cells. `post` hands an event to the runtime, `fail` ends the run with an error."""

    def __init__(
        self,
        pool: CellPool,
        routes: Routes,
        record: RunRecord,
        progress: Progress,
        post: Callable[[Event], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.switches = 0
        """Completed changes of role."""
        self._pool = pool
        self._routes = routes
        self._record = record
        self._progress = progress
        self._post = post
        self._fail = fail
        self._deaths: Counter[int] = Counter()
        self._reviving: set[asyncio.Task[None]] = set()
        pool.on_lost = self._lost

    def note(self, cell: int, role: str) -> None:
        """Record and show what a cell does from now on: rollout, training, transition or lost."""
        self._record.event("role", cell=cell, role=role)
        self._progress.roles[cell] = role

    async def start(self) -> None:
        """All engines serve the initial weights."""
        await self._routes.admit(self._pool.engines, self._pool.published[0])
        for cell in self._pool.engines:
            self.note(cell, "rollout")

    async def to_training(self, cell: int, moves: dict[str, int]) -> None:
        self.note(cell, "transition")
        try:
            continued = await self._routes.leave(cell, moves)
            await self._pool.to_training(cell)
        except CellDied as death:
            raise LostCell(cell, str(death)) from None
        self._record.event("reroute", cell=cell, moved=len(moves), continued=continued)
        self._changed(cell, "training")

    async def to_rollout(self, cell: int) -> None:
        """A satellite's engine admits calls only after the publication that follows; the core's does at once."""
        self.note(cell, "transition")
        try:
            await self._pool.to_rollout(cell)
        except CellDied as death:
            raise LostCell(cell, str(death)) from None
        if cell == CORE:
            await self._routes.admit({cell: self._pool.engines[cell]}, self._pool.published[0])
        self._changed(cell, "rollout")

    async def reroute(self, cell: int, moves: dict[str, int]) -> None:
        await self._routes.flee(cell, moves)

    async def close(self) -> None:
        for task in self._reviving:
            task.cancel()
        await asyncio.gather(*self._reviving, return_exceptions=True)

    def _changed(self, cell: int, role: str) -> None:
        self.switches += 1
        self.note(cell, role)

    def _lost(self, cell: int, reason: str) -> None:
        """A cell died: say so to the scheduler, once, and start a satellite again."""
        self._deaths[cell] += 1
        self._routes.lose(cell)
        self.note(cell, "lost")
        self._record.event("cell-lost", cell=cell, reason=reason)
        self._progress.say(f"cell {cell} was lost: {reason}")
        self._post(CellLost(cell, permanent=cell == CORE))
        if cell != CORE:
            task = asyncio.create_task(self._revive(cell, self._deaths[cell]))
            self._reviving.add(task)
            task.add_done_callback(self._reviving.discard)

    async def _revive(self, cell: int, death: int) -> None:
        """Start a lost satellite again; one that cannot be started stays away for the rest of the run."""
        try:
            version = await self._pool.revive(cell)
            await self._routes.admit({cell: self._pool.engines[cell]}, version)
        except TrainerError as error:
            self._progress.say(f"cell {cell} does not come back: {error}")
            self._post(CellLost(cell, permanent=True))
        except Exception as error:
            self._fail(error)
        else:
            if self._deaths[cell] == death:  # it did not die again meanwhile
                self.note(cell, "rollout")
                self._post(CellBack(cell))
