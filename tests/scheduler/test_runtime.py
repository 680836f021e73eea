"""The live runtime: actions executed, events logged, every task ended."""

import asyncio
import json
import random

import pytest
from gyre_scheduler.actions import Abort, Action, Finish
from gyre_scheduler.errors import (
    HarnessNotFound,
    LostCell,
    ProtocolError,
    ReplayDiverged,
    RunAborted,
    RunStalled,
    SettingsError,
)
from gyre_scheduler.events import Assessed, CellBack, CellLost, Event, StreamDrained, Supply, Terminated
from gyre_scheduler.replay import replay
from gyre_scheduler.runtime import Report, Runtime
from gyre_scheduler.scheduler import Scheduler
from gyre_scheduler.settings import SchedulerSettings

SMALL = SchedulerSettings(group_size=2, groups_per_step=2, phi=0.5, mu=2, steps=4, cells=(3, 3))


class World:
    """Executions, cells and trainer in one, each call a yield or two of the event loop away."""

    def __init__(self, settings=SMALL, seed=0, stall_s=30.0):
        self.random = random.Random(seed)
        self.calls = []
        self.log = []
        self.micro_steps = 0
        self.open = set()
        self.runtime = Runtime(
            Scheduler(settings), self, self, self, lambda *pair: self.log.append(pair), stall_s
        )

    async def run_to_end(self):
        await self.runtime.run()
        return len(asyncio.all_tasks()) - 1

    async def wander(self):
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)

    async def dispatch(self, group, version, replaces):
        self.calls.append(("dispatch", group, version, replaces))

    async def drop(self, group, reason):
        self.calls.append(("drop", group, reason))

    async def run(self, execution, cell, report):
        await self.wander()
        self.open.add(execution)
        report.launched()
        await self.wander()
        report.terminated("completed")
        await self.wander()
        report.assessed(True)

    async def to_training(self, cell, moves):
        assert set(moves) <= self.open, "a route moves before it exists"
        self.calls.append(("to_training", cell))
        await self.wander()

    async def to_rollout(self, cell):
        self.calls.append(("to_rollout", cell))
        await self.wander()

    async def reroute(self, cell, moves):
        self.calls.append(("reroute", cell, moves))

    async def admit(self, group, step, members):
        self.calls.append(("admit", group, step))
        self.micro_steps += 1
        self.runtime.post(Supply(step, self.micro_steps))
        await self.wander()

    async def close_stream(self, step):
        self.calls.append(("close_stream", step))
        await self.wander()
        self.micro_steps = 0
        self.runtime.post(StreamDrained(step))

    async def step(self, step, cells):
        self.calls.append(("step", step, cells))
        await self.wander()

    async def publish(self, version):
        self.calls.append(("publish", version))
        await self.wander()

    def called(self, name):
        return [call for call in self.calls if call[0] == name]


@pytest.mark.parametrize("policy", ["elastic", "async", "colocate"])
@pytest.mark.parametrize("seed", range(3))
def test_a_live_log_replays_to_the_same_actions(policy, seed):
    settings = SMALL.model_copy(update={"policy": policy})
    world = World(settings, seed)
    assert asyncio.run(world.run_to_end()) == 0
    assert any(Finish() in actions for _, actions in world.log)
    written = [json.dumps([e.to_dict(), [a.to_dict() for a in actions]]) for e, actions in world.log]
    read = [
        (Event.from_dict(event), [Action.from_dict(action) for action in actions])
        for event, actions in map(json.loads, written)
    ]
    assert replay(settings, read).to_state() == world.runtime.scheduler.to_state()


def test_a_log_that_was_changed_does_not_replay():
    world = World()
    asyncio.run(world.run_to_end())
    number, (event, actions) = next(pair for pair in enumerate(world.log) if pair[1][1])
    world.log[number] = (event, actions[:-1])
    with pytest.raises(ReplayDiverged, match=f"event {number}"):
        replay(SMALL, world.log)


def test_the_trainers_operations_come_in_order():
    world = World()
    asyncio.run(world.run_to_end())
    order = [call[0] for call in world.calls if call[0] in ("admit", "close_stream", "step", "publish")]
    assert order == (["admit", "admit", "close_stream", "step"] * 2 + ["publish"]) * 2
    assert [call[1] for call in world.called("publish")] == [2, 4]


class Breaking(World):
    """One execution breaks off at a chosen point."""

    def __init__(self, point, error):
        super().__init__()
        self.point, self.error = point, error

    async def run(self, execution, cell, report):
        says = [report.launched, lambda: report.terminated("completed"), lambda: report.assessed(True)]
        for number, say in enumerate(says):
            if execution == "g00001-1" and number == self.point:
                raise self.error
            self.open.add(execution)
            say()
            await self.wander()


@pytest.mark.parametrize("point", [0, 1, 2])
def test_an_execution_that_breaks_off_counts_once_and_its_group_is_replaced(point, caplog):
    world = Breaking(point, RuntimeError("no route"))
    asyncio.run(world.run_to_end())
    said = [event for event, _ in world.log if getattr(event, "execution", None) == "g00001-1"]
    assert [type(event).__name__ for event in said] == ["Launched", "Terminated", "Assessed"]
    assert said[2] == Assessed("g00001-1", False)
    assert ("dispatch", 5, 0, 1) in world.calls
    assert "execution g00001-1 broke off" in caplog.text


@pytest.mark.parametrize("point", [0, 1, 2])
def test_a_users_mistake_ends_the_run_as_it_is(point):
    world = Breaking(point, HarnessNotFound("harness command 'agent' does not exist"))
    with pytest.raises(HarnessNotFound, match="'agent'"):
        asyncio.run(world.run_to_end())


def test_an_execution_that_reports_nothing_is_a_protocol_error():
    class Silent(World):
        async def run(self, execution, cell, report):
            pass

    with pytest.raises(ProtocolError, match="without being reported"):
        asyncio.run(Silent().run_to_end())


def test_reports_out_of_turn_are_refused():
    posted = []
    report = Report("g00000-0", posted.append)
    with pytest.raises(ProtocolError, match="out of turn"):
        report.terminated("failed")
    report.launched()
    with pytest.raises(ProtocolError, match="out of turn"):
        report.launched()
    report.close("timeout")
    assert posted[1:] == [Terminated("g00000-0", "timeout"), Assessed("g00000-0", False)]
    report.close("failed")
    assert len(posted) == 3


def test_a_satellite_that_dies_on_its_way_is_lost_and_the_run_goes_on():
    class Dying(World):
        async def to_training(self, cell, moves):
            await super().to_training(cell, moves)
            if cell == 1:
                self.runtime.post(CellLost(1))
                raise LostCell(1, "its process ended")

        async def step(self, step, cells):
            await super().step(step, cells)
            if self.runtime.scheduler.cells.roles[1] == "lost":
                self.runtime.post(CellBack(1))

    world = Dying(SMALL.model_copy(update={"steps": 8}))
    asyncio.run(world.run_to_end())
    names = [type(event).__name__ for event, _ in world.log]
    assert names.count("CellLost") == world.calls.count(("to_training", 1)) > 0
    assert names.count("CellBack") == names.count("CellLost")
    assert replay(world.runtime.scheduler.settings, world.log).version == 8


def test_a_lost_core_aborts_the_run_with_one_line():
    class Coreless(World):
        async def to_training(self, cell, moves):
            self.runtime.post(CellLost(0, permanent=True))
            raise LostCell(0, "killed")

    world = Coreless()
    with pytest.raises(RunAborted, match="core cell was lost"):
        asyncio.run(world.run_to_end())
    assert any(isinstance(action, Abort) for _, actions in world.log for action in actions)


@pytest.mark.parametrize("operation", ["admit", "close_stream", "step", "publish"])
def test_a_failing_trainer_ends_the_run_with_its_error(operation):
    world = World()

    async def fail(*_):
        raise OSError("no space left on device")

    setattr(world, operation, fail)
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(world.run_to_end())


def test_a_run_without_events_stalls_with_what_it_waits_for():
    class Stuck(World):
        async def run(self, execution, cell, report):
            report.launched()
            await asyncio.Event().wait()

    world = Stuck(stall_s=0.3)
    with pytest.raises(RunStalled, match=r"no event for 0\.3 s; waiting for execution g00000-0, .* 1 more"):
        asyncio.run(world.run_to_end())


@pytest.mark.parametrize("stall_s", [0, -1.0, float("nan"), float("inf")])
def test_a_stall_limit_that_is_no_time_is_refused(stall_s):
    with pytest.raises(SettingsError, match="stall_s"):
        World(stall_s=stall_s)


def test_without_a_stall_limit_a_silent_run_is_healthy(monkeypatch):
    waits = []
    real = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda limit: waits.append(limit) or real(limit))
    world = World()
    world.runtime = Runtime(Scheduler(SMALL), world, world, world, lambda *pair: world.log.append(pair))
    asyncio.run(world.run_to_end())
    assert set(waits) == {None}


def test_executions_that_still_run_at_the_end_are_cancelled_and_recorded():
    cancelled = []

    class Tail(World):
        async def run(self, execution, cell, report):
            if execution.startswith("g00008"):
                self.open.add(execution)
                report.launched()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.append(execution)
            await super().run(execution, cell, report)

    world = Tail()
    assert asyncio.run(world.run_to_end()) == 0
    ledger = world.runtime.scheduler.ledger
    assert sorted(cancelled) == ["g00008-0", "g00008-1"]
    assert ("drop", 8, "the run is over") in world.calls
    assert ledger.dispatched == ledger.launched == ledger.terminated == 18
    assert (Terminated("g00008-0", "cancelled"), []) in world.log
    replay(SMALL, world.log)


def test_cancelling_the_runtime_ends_every_task():
    async def cancel_midway():
        world = World()
        reached = asyncio.Event()
        publish = world.publish

        async def stop_here(version):
            reached.set()
            await asyncio.Event().wait()
            await publish(version)

        world.publish = stop_here
        run = asyncio.create_task(world.runtime.run())
        await asyncio.wait_for(reached.wait(), 20)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(cancel_midway()) == 0


def test_a_transition_waits_for_the_launches_it_moves():
    settings = SchedulerSettings(group_size=2, groups_per_step=1, phi=2, mu=1, steps=1, cells=(2, 4))
    held_back = "g00002-0"

    class SlowRoute(World):
        moved = None

        async def run(self, execution, cell, report):
            if execution == held_back:
                assert cell == 0
                await self.core_is_asked_to_leave.wait()
                for _ in range(20):
                    await asyncio.sleep(0)
                self.open.add(execution)
                report.launched()
                await self.core_left.wait()
                report.terminated("completed")
                report.assessed(True)
            else:
                await super().run(execution, cell, report)

        async def admit(self, group, step, members):
            self.core_is_asked_to_leave.set()
            await super().admit(group, step, members)

        async def to_training(self, cell, moves):
            self.moved = moves
            self.core_left.set()
            await super().to_training(cell, moves)

    world = SlowRoute(settings)
    world.core_is_asked_to_leave, world.core_left = asyncio.Event(), asyncio.Event()
    asyncio.run(world.run_to_end())
    assert world.moved == {held_back: 1}
