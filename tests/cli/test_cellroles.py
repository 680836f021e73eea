"""Role changes and lost cells, with a pool and a proxy that do what the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gyre_cli.cellroles import CellRoles
from gyre_cli.progress import Progress
from gyre_cli.record import RunRecord
from gyre_cli.routes import Routes
from gyre_scheduler.errors import LostCell
from gyre_scheduler.events import CellBack, CellLost
from gyre_trainer.errors import CellDied


class FakeProxy:
    def __init__(self):
        self.tables, self.reroutes = [], []

    async def set_engines(self, engines):
        self.tables.append({e["url"]: (e["admitting"], e["version"]) for e in engines})

    async def reroute(self, source, moves, deadline_s):
        self.reroutes.append((source, moves))
        return {"moved": len(moves), "continued": 1}


class FakePool:
    """Two cells. `fate` says what the next operation of a cell does."""

    def __init__(self):
        self.engines = {0: "http://e0", 1: "http://e1"}
        self.published = (0, Path("v0"))
        self.on_lost = None
        self.fate: dict[str, list] = {}
        self.done: list[tuple[str, int]] = []

    async def _operate(self, name, cell):
        self.done.append((name, cell))
        error = self.fate[name].pop(0) if self.fate.get(name) else None
        if error:
            raise error

    async def to_training(self, cell):
        await self._operate("to_training", cell)

    async def to_rollout(self, cell):
        await self._operate("to_rollout", cell)

    async def revive(self, cell):
        await self._operate("revive", cell)
        return self.published[0]


@pytest.fixture
def parts(tmp_path):
    """(roles, pool, proxy, posted events, failures)"""
    proxy, pool, posted, failures = FakeProxy(), FakePool(), [], []
    record = RunRecord(tmp_path, {})
    roles = CellRoles(pool, Routes(proxy, 5.0), record, Progress(1), posted.append, failures.append)
    yield roles, pool, proxy, posted, failures
    record.close()


async def settle(roles):
    while roles._reviving:
        await asyncio.gather(*roles._reviving)


def test_a_move_to_training_empties_the_engine_first(parts):
    roles, pool, proxy, _, _ = parts

    async def run():
        await roles.start()
        await roles.to_training(1, {"g00000-0": 0})

    asyncio.run(run())
    assert proxy.reroutes == [("http://e1", {"g00000-0": "http://e0"})]
    assert pool.done == [("to_training", 1)] and roles.switches == 1


def test_a_satellite_admits_calls_only_after_the_publication_but_the_core_at_once(parts):
    roles, pool, proxy, _, _ = parts

    async def run():
        await roles.start()
        for cell in (0, 1):
            await roles.to_training(cell, {})
        pool.published = (3, Path("v3"))
        for cell in (1, 0):
            await roles.to_rollout(cell)

    asyncio.run(run())
    assert proxy.tables[-1] == {"http://e0": (True, 3), "http://e1": (False, 0)}


def test_a_lost_satellite_is_reported_once_and_comes_back(parts):
    roles, pool, proxy, posted, failures = parts

    async def run():
        await roles.start()
        pool.on_lost(1, "killed")
        await settle(roles)

    asyncio.run(run())
    assert posted == [CellLost(1), CellBack(1)] and not failures
    assert proxy.tables[-1]["http://e1"] == (True, 0)


def test_a_satellite_that_cannot_be_started_is_lost_for_good(parts):
    roles, pool, _, posted, _ = parts
    pool.fate["revive"] = [CellDied(1, "no memory")]

    async def run():
        await roles.start()
        pool.on_lost(1, "killed")
        await settle(roles)

    asyncio.run(run())
    assert posted == [CellLost(1), CellLost(1, permanent=True)]


def test_a_satellite_that_dies_again_while_it_comes_back_is_announced_back_once(parts):
    roles, pool, proxy, posted, _ = parts

    async def run():
        await roles.start()
        admit, once = proxy.set_engines, []

        async def dies_meanwhile(engines):
            if not once:
                once.append(True)
                pool.on_lost(1, "killed again")
            await admit(engines)

        proxy.set_engines = dies_meanwhile
        pool.on_lost(1, "killed")
        await settle(roles)

    asyncio.run(run())
    assert posted.count(CellBack(1)) == 1 and posted.count(CellLost(1)) == 2


def test_an_unexpected_error_of_a_revival_fails_the_run(parts):
    roles, pool, _, _, failures = parts
    error = OSError("no file descriptors left")
    pool.fate["revive"] = [error]

    async def run():
        await roles.start()
        pool.on_lost(1, "killed")
        await settle(roles)

    asyncio.run(run())
    assert failures == [error]


def test_a_cell_that_dies_on_its_way_ends_the_transition(parts):
    roles, pool, _, _, _ = parts
    pool.fate["to_training"] = [CellDied(1, "out of memory")]

    async def run():
        await roles.start()
        with pytest.raises(LostCell, match="out of memory"):
            await roles.to_training(1, {})

    asyncio.run(run())
    assert roles.switches == 0


def test_routes_of_a_lost_engine_are_moved_without_touching_the_one_that_came_back(parts):
    roles, pool, proxy, _, _ = parts

    async def run():
        await roles.start()
        pool.engines[1] = "http://e1-again"
        pool.on_lost(1, "killed")
        await settle(roles)
        await roles.reroute(1, {"g00000-0": 0})
        pool.published = (3, Path("v3"))
        await roles._routes.admit({0: "http://e0"}, 3)

    asyncio.run(run())
    assert proxy.reroutes == [("http://e1", {"g00000-0": "http://e0"})]
    assert proxy.tables[-1]["http://e1-again"] == (True, 0) and proxy.tables[-1]["http://e1"] == (False, 0)


def test_a_lost_core_is_permanent(parts):
    roles, pool, _, posted, _ = parts

    async def run():
        await roles.start()
        pool.on_lost(0, "killed")
        await settle(roles)

    asyncio.run(run())
    assert posted == [CellLost(0, permanent=True)] and ("revive", 0) not in pool.done
