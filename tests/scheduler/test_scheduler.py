"""The machine's answers in named situations."""

import pytest
from gyre_scheduler.actions import (
    STANDALONE,
    Abort,
    Admit,
    CloseStream,
    Dispatch,
    Drop,
    Finish,
    Launch,
    Publish,
    Reroute,
    Step,
    Transition,
)
from gyre_scheduler.dispatch import execution_names
from gyre_scheduler.errors import ProtocolError
from gyre_scheduler.events import (
    Assessed,
    CellBack,
    CellLost,
    Launched,
    Published,
    RoleChanged,
    Started,
    StepTrained,
    StreamDrained,
    Supply,
    Terminated,
)
from gyre_scheduler.scheduler import Scheduler
from gyre_scheduler.settings import SchedulerSettings


def machine(**changes):
    defaults = dict(group_size=2, groups_per_step=2, phi=0.5, mu=2, steps=4, cells=(4, 4, 4))
    return Scheduler(SchedulerSettings(**{**defaults, **changes}))


def members(group, size=2):
    return tuple(execution_names(group, size))


def feed(scheduler, *events):
    """The actions of all events."""
    return [action for event in events for action in scheduler.handle(event)]


def close(scheduler, *executions, valid=True):
    """Launch if need be, terminate, assess."""
    actions = []
    for execution in executions:
        state = scheduler.ledger.groups[int(execution[1:6])].members[execution]
        if state == "launching":
            actions += scheduler.handle(Launched(execution))
        actions += feed(scheduler, Terminated(execution, "completed"), Assessed(execution, valid))
    return actions


def close_groups(scheduler, *groups):
    return close(scheduler, *(f"g{group:05d}-{member}" for group in groups for member in range(2)))


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def test_the_start_fills_the_queue_and_every_cell():
    actions = machine().handle(Started())
    assert of(Dispatch, actions) == [Dispatch(group, 0) for group in range(5)]
    launches = of(Launch, actions)
    assert [launch.execution for launch in launches][:3] == ["g00000-0", "g00000-1", "g00001-0"]
    assert len(launches) == 10


def test_launches_spread_by_share_of_the_limit():
    actions = machine(cells=(2, 6), standalone=2).handle(Started())
    loads = [launch.cell for launch in of(Launch, actions)]
    assert {place: loads.count(place) for place in loads} == {STANDALONE: 2, 1: 6, 0: 2}


def test_the_core_leaves_when_the_rest_covers_the_waterlevel():
    scheduler = machine()
    scheduler.handle(Started())
    close(scheduler, "g00000-0")
    feed(scheduler, Launched("g00000-1"), Terminated("g00000-1", "completed"))
    assert scheduler.cells.roles[0] == "rollout"
    (transition, *_) = feed(scheduler, Assessed("g00000-1", True))
    assert (transition.cell, transition.role) == (0, "training")
    assert scheduler.waterlevel == 8 == scheduler.cells.capacity()


def test_a_full_waterlevel_keeps_the_core_although_a_group_is_ready():
    scheduler = machine(cells=(4, 3, 3))
    scheduler.handle(Started())
    assert not of(Transition, close_groups(scheduler, 0))
    assert scheduler.waterlevel == 8 and scheduler.cells.capacity(without=[0]) == 6


def test_moves_go_to_the_standalone_pool_first_then_to_cells_in_descending_order():
    scheduler = machine(cells=(20, 6, 3), standalone=2)
    scheduler.handle(Started())
    for execution in list(scheduler.cells.place_of):
        scheduler.cells.release(execution)
        scheduler.cells.put(execution, 0 if execution < "g00003-0" else 1)
    scheduler.cells.roles[0] = "to_training"
    moves = scheduler.cells.leave(0)
    assert list(moves.values()) == [STANDALONE, STANDALONE, 2, 2, 2, 1]


def test_a_satellite_joins_only_with_supply_and_only_while_the_window_is_open():
    scheduler = machine()
    scheduler.handle(Started())
    actions = close_groups(scheduler, 0, 1, 2) + feed(scheduler, RoleChanged(0, "training"))
    assert of(Admit, actions) == [Admit(0, 1, members(0)), Admit(1, 1, members(1))]
    assert of(CloseStream, actions) == [CloseStream(1)]
    assert of(Transition, actions) == of(Transition, actions)[:1]
    (join,) = feed(scheduler, Supply(1, 1))
    assert (join.cell, join.role) == (1, "training")
    assert feed(scheduler, Supply(1, 1)) == []
    assert feed(scheduler, Supply(1, 0), StreamDrained(1)) == []
    assert feed(scheduler, RoleChanged(1, "training")) == [Step(1, (0, 1))]
    assert feed(scheduler, Supply(1, 9)) == []


def test_the_oldest_version_is_admitted_first():
    scheduler = machine(mu=1, steps=3, phi=1.0, streaming=False)
    scheduler.handle(Started())
    train_one_step(scheduler, 1, groups=(0, 1))
    settle(scheduler)
    assert [scheduler.ledger.groups[group].version for group in (2, 3, 4, 5)] == [0, 0, 1, 1]
    close_groups(scheduler, 5)
    assert of(Admit, close_groups(scheduler, 3)) == [Admit(3, 2, members(3)), Admit(5, 2, members(5))]


def train_one_step(scheduler, step, groups):
    """Close groups and go through the step; returns the actions of StepTrained."""
    settle(scheduler)
    close_groups(scheduler, *groups)
    settle(scheduler)
    feed(scheduler, Supply(step, 0), StreamDrained(step))
    actions = scheduler.handle(StepTrained(step)) + settle(scheduler)
    return actions + (scheduler.handle(Published(step)) if scheduler.phase == "publish" else [])


def settle(scheduler):
    """Complete every transition that is under way."""
    actions = []
    for role in ("training", "rollout"):
        for cell in scheduler.cells.with_role(f"to_{role}"):
            actions += scheduler.handle(RoleChanged(cell, role))
    return actions


def test_a_burst_ends_with_returns_publication_refill_and_the_core_decision():
    scheduler = machine(cells=(4, 4, 3))
    scheduler.handle(Started())
    close_groups(scheduler, 0, 1, 2, 3)
    feed(scheduler, RoleChanged(0, "training"), Supply(1, 3))
    close_groups(scheduler, 4)
    settle(scheduler)
    assert feed(scheduler, Supply(1, 0), StreamDrained(1)) == [Step(1, (0, 1, 2))]
    assert of(Admit, scheduler.handle(StepTrained(1))) == [Admit(2, 2, members(2)), Admit(3, 2, members(3))]
    scheduler.handle(StreamDrained(2))
    assert scheduler.handle(StepTrained(2)) == [Transition(1, "rollout", {}), Transition(2, "rollout", {})]
    assert scheduler.handle(RoleChanged(2, "rollout")) == []
    assert scheduler.handle(RoleChanged(1, "rollout")) == [Publish(2)]
    actions = scheduler.handle(Published(2))
    assert of(Dispatch, actions) == [Dispatch(group, 2) for group in range(5, 9)]
    assert of(Transition, actions) == [Transition(0, "rollout", {})]
    assert {launch.cell for launch in of(Launch, actions)} <= {1, 2}


def test_the_core_stays_when_the_refilled_waterlevel_fits_without_it():
    scheduler = machine(phi=1.0, cells=(2, 20))
    scheduler.handle(Started())
    close_groups(scheduler, 0, 1, 2, 3, 4)
    feed(scheduler, RoleChanged(0, "training"))
    train_one_step(scheduler, 1, groups=())
    actions = train_one_step(scheduler, 2, groups=())
    assert Publish(2) in actions and not of(Transition, actions)
    assert of(Admit, actions) == [Admit(4, 3, members(4))]


def test_nothing_launches_on_a_returned_satellite_before_the_publication():
    scheduler = machine(cells=(2, 2), phi=2.0)
    scheduler.handle(Started())
    scheduler.cells.roles = ["training", "restored"]
    scheduler.phase = "publish"
    scheduler.version = 2
    queued = len(scheduler.ledger.queue)
    assert queued and scheduler.cells.free_place() is None
    assert {launch.cell for launch in of(Launch, scheduler.handle(Published(2)))} == set()
    assert scheduler.cells.roles[1] == "rollout"


@pytest.mark.parametrize("mu", [1, 2])
def test_without_streaming_the_core_waits_for_all_groups_of_its_burst(mu):
    scheduler = machine(streaming=False, mu=mu)
    scheduler.handle(Started())
    *before, last = range(mu * scheduler.settings.groups_per_step)
    assert not of(Transition, close_groups(scheduler, *before))
    assert of(Transition, close_groups(scheduler, last))


def test_async_trains_on_its_cells_from_the_start_and_never_rolls_out_there():
    scheduler = machine(policy="async", training_cells=2)
    actions = scheduler.handle(Started())
    assert of(Transition, actions) == [Transition(0, "training", {})]
    assert {launch.cell for launch in of(Launch, actions)} == {2}
    assert feed(scheduler, RoleChanged(0, "training")) == [Transition(1, "training", {})]
    feed(scheduler, RoleChanged(1, "training"))
    close_groups(scheduler, 0, 1)
    feed(scheduler, StreamDrained(1), StepTrained(1))
    close_groups(scheduler, 2, 3)
    scheduler.handle(StreamDrained(2))
    assert scheduler.handle(StepTrained(2)) == [Publish(2)]


def test_colocate_switches_the_pool_after_the_last_execution_closed():
    scheduler = machine(policy="colocate", phi=0, cells=(4, 4))
    scheduler.handle(Started())
    assert not of(Transition, close_groups(scheduler, 0, 1, 2))
    assert of(Transition, close_groups(scheduler, 3)) == [Transition(0, "training", {})]
    assert of(Transition, feed(scheduler, RoleChanged(0, "training"))) == [Transition(1, "training", {})]


def test_streaming_colocate_with_a_standalone_pool_switches_at_its_capacity():
    scheduler = machine(policy="colocate", cells=(4, 4), standalone=4)
    scheduler.handle(Started())
    assert not of(Transition, close_groups(scheduler, 0, 1))
    (transition,) = of(Transition, close_groups(scheduler, 2))
    assert transition.cell == 0 and scheduler.waterlevel == 4


def test_a_group_trains_on_two_valid_members_of_three():
    scheduler = machine(group_size=3, cells=(20, 20))
    scheduler.handle(Started())
    close(scheduler, "g00000-0", "g00000-1")
    actions = close(scheduler, "g00000-2", valid=False)
    assert Admit(0, 1, members(0)) in actions and not of(Drop, actions)


def test_an_untrainable_group_is_replaced_at_the_published_version():
    scheduler = machine()
    scheduler.handle(Started())
    close(scheduler, "g00001-0")
    actions = close(scheduler, "g00001-1", valid=False)
    assert actions[:2] == [
        Drop(1, "1 of 2 executions have a valid reward"),
        Dispatch(5, 0, replaces=1),
    ]
    assert scheduler.ledger.replaced == 1


def test_endless_invalid_groups_abort_with_the_reason():
    scheduler = machine(cells=(40,), untrainable_limit=3)
    scheduler.handle(Started())
    actions = []
    for group in range(3):
        actions += close(scheduler, f"g{group:05d}-0", f"g{group:05d}-1", valid=False)
    assert isinstance(actions[-1], Abort) and "3 groups in a row" in actions[-1].reason
    assert "0 of 2 executions have a valid reward" in actions[-1].reason
    assert scheduler.handle(Supply(1, 3)) == []


def test_a_lost_rollout_cell_hands_its_executions_on_even_above_the_limit():
    scheduler = machine(cells=(2, 2, 2))
    scheduler.handle(Started())
    held = set(scheduler.cells.places[2])
    (reroute,) = of(Reroute, scheduler.handle(CellLost(2)))
    assert reroute.cell == 2 and set(reroute.moves) == held
    assert sorted(reroute.moves.values()) == [0, 1]
    assert scheduler.handle(CellLost(2)) == []


def test_executions_of_the_only_rollout_cell_stay_until_it_is_back():
    scheduler = machine(cells=(4, 10))
    scheduler.handle(Started())
    close_groups(scheduler, 0)
    scheduler.handle(RoleChanged(0, "training"))
    assert scheduler.handle(CellLost(1)) == []
    assert scheduler.handle(CellBack(1)) == []
    assert len(scheduler.cells.places[1]) == 8


def test_a_lost_training_satellite_leaves_the_prefix():
    scheduler = machine(cells=(4, 4, 4))
    scheduler.handle(Started())
    close_groups(scheduler, 0, 1, 2, 3)
    feed(scheduler, RoleChanged(0, "training"), Supply(1, 9))
    close_groups(scheduler, 4)
    settle(scheduler)
    scheduler.handle(CellLost(1))
    assert scheduler.handle(StreamDrained(1)) == [Step(1, (0, 2))]


def test_a_cell_lost_on_its_way_does_not_hold_the_step_up():
    scheduler = machine()
    scheduler.handle(Started())
    close_groups(scheduler, 0, 1, 2)
    feed(scheduler, RoleChanged(0, "training"), Supply(1, 1))
    assert scheduler.cells.roles[1] == "to_training"
    assert scheduler.handle(StreamDrained(1)) == []
    assert Step(1, (0,)) in scheduler.handle(CellLost(1))
    assert scheduler.handle(RoleChanged(1, "training")) == []


def test_a_lost_core_aborts():
    scheduler = machine()
    scheduler.handle(Started())
    (abort,) = scheduler.handle(CellLost(0))
    assert isinstance(abort, Abort) and "core" in abort.reason
    assert scheduler.done


def test_the_run_ends_after_a_shorter_last_burst_and_counts_what_still_ends():
    scheduler = machine(steps=1)
    scheduler.handle(Started())
    actions = train_one_step(scheduler, 1, groups=(0, 1))
    assert actions[-1] == Finish()
    assert of(Drop, actions) == [Drop(group, "the run is over") for group in (2, 3, 4)]
    running = next(iter(scheduler.cells.place_of))
    assert (
        feed(scheduler, Launched(running), Terminated(running, "cancelled"), Assessed(running, False)) == []
    )
    assert scheduler.ledger.terminated == 5


def test_staleness_counts_versions_from_publication_to_consumption():
    scheduler = machine(mu=1, phi=1.0, steps=3)
    scheduler.handle(Started())
    train_one_step(scheduler, 1, groups=(0, 1))
    train_one_step(scheduler, 2, groups=(2, 3))
    train_one_step(scheduler, 3, groups=(4, 5))
    assert scheduler.ledger.staleness == [0, 0, 1, 1, 1, 1]
    assert scheduler.staleness_mean == scheduler.settings.staleness_target * 4 / 6


@pytest.mark.parametrize(
    "events",
    [
        [Launched("g00000-0")],
        [Started(), Started()],
        [Started(), Terminated("g00000-0", "failed")],
        [Started(), Launched("g00000-0"), Launched("g00000-0")],
        [Started(), Launched("g00000-0"), Assessed("g00000-0", True)],
        [Started(), Launched("g99999-0")],
        [Started(), Launched("nonsense")],
        [Started(), StreamDrained(1)],
        [Started(), StepTrained(1)],
        [Started(), Published(2)],
        [Started(), RoleChanged(0, "training")],
        [Started(), RoleChanged(7, "training")],
        [Started(), CellBack(1)],
    ],
)
def test_an_impossible_event_is_refused_and_changes_nothing(events):
    scheduler = machine()
    for event in events[:-1]:
        scheduler.handle(event)
    before = scheduler.to_state()
    with pytest.raises(ProtocolError) as refused:
        scheduler.handle(events[-1])
    assert "\n" not in str(refused.value)
    assert scheduler.to_state() == before
