"""Oversampling: a group is complete with its first N valid members; the others are cancelled or never start."""

import asyncio

import pytest
from gyre_scheduler.actions import Admit, Cancel, Drop, Launch
from gyre_scheduler.errors import SettingsError
from gyre_scheduler.events import Assessed, Launched, RoleChanged, Started, StreamDrained, Terminated
from gyre_scheduler.replay import replay
from gyre_scheduler.runtime import Runtime
from gyre_scheduler.scheduler import Scheduler
from gyre_scheduler.settings import SchedulerSettings
from gyre_scheduler.simulator import Costs, simulate
from gyre_scheduler.workloads import TwoLevelLognormal


def machine(**changes):
    defaults = dict(group_size=2, oversample=2, groups_per_step=1, phi=0, mu=1, steps=2, cells=(3, 4))
    return Scheduler(SchedulerSettings(**{**defaults, **changes}))


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def finish(scheduler, execution, valid=True):
    scheduler.handle(Launched(execution))
    scheduler.handle(Terminated(execution, "completed"))
    return scheduler.handle(Assessed(execution, valid))


def test_the_first_valid_members_train_and_running_ones_are_cancelled():
    scheduler = machine()
    assert len(of(Launch, scheduler.handle(Started()))) == 4
    scheduler.handle(Launched("g00000-0"))
    assert finish(scheduler, "g00000-1") == [] and finish(scheduler, "g00000-2", valid=False) == []
    actions = finish(scheduler, "g00000-3")
    assert of(Cancel, actions) == [Cancel("g00000-0")]
    assert of(Admit, actions) == [Admit(0, 1, ("g00000-1", "g00000-3"))]
    before = scheduler.ledger.terminated
    assert scheduler.handle(Terminated("g00000-0", "cancelled")) == []
    assert scheduler.ledger.terminated == before + 1 and "g00000-0" not in scheduler.cells.place_of
    assert scheduler.handle(Assessed("g00000-0", True)) == []  # valid or not, it is too late
    assert not scheduler.ledger.surplus
    scheduler.handle(RoleChanged(0, "training"))


def test_a_member_that_waits_for_its_assessment_is_not_cancelled_and_comes_too_late():
    scheduler = machine()
    scheduler.handle(Started())
    scheduler.handle(Launched("g00000-0"))
    scheduler.handle(Terminated("g00000-0", "completed"))
    finish(scheduler, "g00000-1")
    actions = finish(scheduler, "g00000-2")
    assert of(Cancel, actions) == [Cancel("g00000-3")]
    assert of(Admit, actions) == [Admit(0, 1, ("g00000-1", "g00000-2"))]
    assert scheduler.handle(Assessed("g00000-0", True)) == []


def test_a_member_that_never_launched_counts_as_launched_and_ended():
    scheduler = machine(cells=(1, 1), oversample=3)
    scheduler.handle(Started())
    for execution in ("g00000-0", "g00000-1"):
        scheduler.handle(Launched(execution))
    scheduler.handle(Terminated("g00000-0", "completed"))  # 2 launches
    scheduler.handle(Assessed("g00000-0", True))
    scheduler.handle(Terminated("g00000-1", "completed"))  # 3 launches
    actions = scheduler.handle(Assessed("g00000-1", True))
    assert of(Cancel, actions) == [Cancel("g00000-2"), Cancel("g00000-3")]
    ledger = scheduler.ledger
    assert (ledger.dispatched, ledger.launched, ledger.terminated) == (5, 3, 3) and not ledger.queue
    assert scheduler.waterlevel == 2


def test_with_fewer_valid_members_than_wanted_a_group_trains_on_those_it_has():
    scheduler = machine(group_size=3, oversample=1)
    scheduler.handle(Started())
    for member, valid in enumerate((True, False, True)):
        finish(scheduler, f"g00000-{member}", valid)
    assert of(Admit, finish(scheduler, "g00000-3", False)) == [Admit(0, 1, ("g00000-0", "g00000-2"))]
    other = machine()
    other.handle(Started())
    for member in range(3):
        finish(other, f"g00000-{member}", False)
    assert of(Drop, finish(other, "g00000-3", False))[0].reason == "0 of 4 executions have a valid reward"


def test_a_simulated_run_spares_the_tails():
    plain = SchedulerSettings(group_size=8, groups_per_step=4, phi=0, mu=2, steps=8, cells=(60, 60))
    costs = Costs(node_hours_per_step=1.0, executions_per_node=12.0)
    runs = [
        simulate(plain.model_copy(update={"oversample": surplus}), TwoLevelLognormal(), costs)
        for surplus in (0, 2)
    ]
    assert runs[1].hours < 0.95 * runs[0].hours
    assert [run.executions for run in runs] == [8 * 4 * 8, 8 * 4 * 10]
    assert runs[1].staleness_mean == runs[0].staleness_mean


def test_a_restored_scheduler_does_not_share_its_snapshot():
    scheduler = machine()
    scheduler.handle(Started())
    scheduler.handle(Launched("g00000-0"))
    for member in (1, 2):
        finish(scheduler, f"g00000-{member}")
    state = scheduler.to_state()
    assert state["ledger"]["surplus"] == {"g00000-0": "running", "g00000-3": "launching"}
    Scheduler.from_state(state).handle(Terminated("g00000-0", "cancelled"))
    assert state["ledger"]["surplus"]["g00000-0"] == "running"


def test_fewer_than_no_surplus_is_refused():
    with pytest.raises(SettingsError, match="oversample must be 0 or more"):
        machine(oversample=-1)


class Endless:
    """The last member of each group runs until it is cancelled; some are cancelled before they begin."""

    def __init__(self, settings):
        self.admitted, self.log = [], []
        self.runtime = Runtime(
            Scheduler(settings), self, self, self, lambda *pair: self.log.append(pair), 30.0
        )

    async def dispatch(self, group, version, replaces): ...

    async def drop(self, group, reason): ...

    async def run(self, execution, cell, report):
        report.launched()
        if execution.endswith("-2"):
            await asyncio.Event().wait()
        report.terminated("completed")
        report.assessed(True)

    async def to_training(self, cell, moves): ...

    async def to_rollout(self, cell): ...

    async def admit(self, group, step, members):
        self.admitted.append((group, members))

    async def close_stream(self, step):
        self.runtime.post(StreamDrained(step))

    async def step(self, step, cells): ...

    async def publish(self, version): ...


def test_a_live_run_cancels_what_it_does_not_need_and_replays():
    settings = SchedulerSettings(
        group_size=2, oversample=1, groups_per_step=2, phi=0.5, mu=2, steps=4, cells=(6, 6)
    )
    world = Endless(settings)
    asyncio.run(world.runtime.run())
    assert [members for _, members in world.admitted] == [
        (f"g{g:05d}-0", f"g{g:05d}-1") for g, _ in world.admitted
    ]
    cancelled = [
        event for event, _ in world.log if isinstance(event, Terminated) and event.outcome == "cancelled"
    ]
    assert cancelled and replay(settings, world.log).to_state() == world.runtime.scheduler.to_state()


def test_an_execution_that_is_cancelled_before_it_began_is_told_whole():
    async def run():
        settings = SchedulerSettings(group_size=2, groups_per_step=1, phi=0, mu=1, steps=1, cells=(2,))
        world = Endless(settings)
        world.runtime.scheduler.handle(Started())
        world.runtime._launch("g00000-0", 0)
        world.runtime._opening["g00000-0"] = asyncio.Event()
        world.runtime._running["g00000-0"].cancel()
        await asyncio.gather(*world.runtime._tasks, return_exceptions=True)
        await asyncio.sleep(0)
        return [world.runtime._inbox.get_nowait() for _ in range(world.runtime._inbox.qsize())]

    told = asyncio.run(run())
    name = "g00000-0"
    assert told == [Launched(name), Terminated(name, "cancelled"), Assessed(name, False)]
