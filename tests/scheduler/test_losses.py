"""Cells that die and come back at any moment of a live run."""

import asyncio
import random

import pytest
from gyre_scheduler.actions import Transition
from gyre_scheduler.errors import LostCell
from gyre_scheduler.events import CellBack, CellLost, RoleChanged, StreamDrained, Supply
from gyre_scheduler.replay import replay
from gyre_scheduler.runtime import Runtime
from gyre_scheduler.scheduler import Scheduler
from gyre_scheduler.settings import SchedulerSettings

SETTINGS = SchedulerSettings(
    group_size=2, groups_per_step=2, phi=1.0, mu=2, steps=8, cells=(3, 3, 3), standalone=1
)


class MortalWorld:
    """An environment whose satellites die and return at random, told once each.

    Everything takes a few turns of the event loop. An execution ends only once its route leads to where the
    scheduler has it, so a route that nobody moves, or that an overtaken move turned back, is found.
    """

    def __init__(self, seed, loss):
        self.random = random.Random(seed)
        self.loss = loss
        self.life = [0, 0, 0]
        self.training = set()
        self.dead = set()
        self.busy = set()
        self.route = {}
        self.unclaimed = 0
        self.log = []
        self.runtime = Runtime(Scheduler(SETTINGS), self, self, self, lambda *pair: self.log.append(pair))

    async def to_end(self):
        reaper = asyncio.create_task(self.reap())
        try:
            async with asyncio.timeout(60):
                await self.runtime.run()
        finally:
            reaper.cancel()

    async def turns(self, most=6):
        for _ in range(self.random.randrange(most)):
            await asyncio.sleep(0)

    async def reap(self):
        while True:
            await self.turns()
            await asyncio.sleep(0)
            cell = self.random.choice([1, 2])
            if cell not in self.dead and self.random.random() < self.loss:
                asyncio.ensure_future(self.die(cell))

    async def die(self, cell):
        self.dead.add(cell)
        self.life[cell] += 1
        self.training.discard(cell)
        self.runtime.post(CellLost(cell))
        await self.turns(12)
        self.dead.discard(cell)
        self.runtime.post(CellBack(cell))

    # -- executions ------------------------------------------------------------------------------------------

    async def dispatch(self, group, version, replaces):
        pass

    async def drop(self, group, reason):
        pass

    async def run(self, execution, cell, report):
        await self.turns(self.random.choice([5, 60]))
        self.route[execution] = cell
        report.launched()
        await self.turns(60)
        for _ in range(300):
            if self.route[execution] == self.runtime.scheduler.cells.place_of[execution]:
                break
            await asyncio.sleep(0)
        else:
            raise LookupError(f"{execution} is stranded on cell {self.route[execution]}")
        if self.route[execution] in self.training:
            raise LookupError(f"{execution} is stranded on cell {self.route[execution]}, which trains")
        report.terminated("completed")
        await self.turns()
        report.assessed(True)

    # -- cells -----------------------------------------------------------------------------------------------

    async def operate(self, cell, done):
        """One operation at a time for a cell; a death during it raises LostCell or is not noticed."""
        assert cell not in self.busy, f"two operations on cell {cell}"
        self.busy.add(cell)
        try:
            life = self.life[cell]
            await self.turns()
            if (cell in self.dead or life != self.life[cell]) and self.random.random() < 0.5:
                raise LostCell(cell, "its process ended")
            if life == self.life[cell]:
                done(cell)
        finally:
            self.busy.discard(cell)

    async def to_training(self, cell, moves):
        self.move(moves)
        await self.operate(cell, self.training.add)

    async def to_rollout(self, cell):
        await self.operate(cell, self.training.discard)

    async def reroute(self, cell, moves):
        assert moves and cell not in self.busy
        self.move(moves)
        await self.turns()

    def move(self, moves):
        for execution, place in moves.items():
            assert execution in self.route, "a route moves before it exists"
            self.route[execution] = place

    # -- trainer ---------------------------------------------------------------------------------------------

    async def admit(self, group, step, members):
        self.unclaimed += 2
        self.runtime.post(Supply(step, self.unclaimed))
        await self.turns()

    async def close_stream(self, step):
        await self.turns(40)
        self.unclaimed = 0
        self.runtime.post(Supply(step, 0))
        self.runtime.post(StreamDrained(step))

    async def step(self, step, cells):
        await self.turns()

    async def publish(self, version):
        await self.turns()


@pytest.mark.parametrize("seed", range(100))
def test_losses_and_returns_at_any_moment_never_stop_a_run(seed, caplog):
    world = MortalWorld(seed, loss=0.2)
    asyncio.run(world.to_end())
    assert "stranded" not in caplog.text
    assert any(isinstance(event, CellLost) for event, _ in world.log)
    assert replay(SETTINGS, world.log).version == SETTINGS.steps


def test_those_losses_meet_transitions_of_the_same_cell():
    """The test above is about something: losses do end transitions under way."""
    ended = 0
    for seed in range(10):
        world = MortalWorld(seed, loss=0.2)
        asyncio.run(world.to_end())
        asked = sum(isinstance(action, Transition) for _, actions in world.log for action in actions)
        ended += asked - sum(isinstance(event, RoleChanged) for event, _ in world.log)
    assert ended > 5
