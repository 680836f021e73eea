"""Launch order "longest": older versions first, then by what the history of a query says; the staleness stays."""

import json
from dataclasses import replace

import pytest
from gyre_scheduler.actions import Launch
from gyre_scheduler.errors import ProtocolError
from gyre_scheduler.events import Assessed, Expected, Launched, Published, Started, Terminated
from gyre_scheduler.history import DurationHistory
from gyre_scheduler.presets import PRESETS
from gyre_scheduler.scheduler import Scheduler
from gyre_scheduler.settings import SchedulerSettings
from gyre_scheduler.simulator import simulate


def machine(**changes):
    defaults = dict(
        group_size=2, groups_per_step=2, phi=0.5, mu=2, steps=4, cells=(2,), launch_order="longest"
    )
    return Scheduler(SchedulerSettings(**{**defaults, **changes}))


def launched(actions):
    return [action.execution for action in actions if isinstance(action, Launch)]


def drained(scheduler, actions):
    """The groups in the order of their launches, when each execution ends at once."""
    order, waiting = [], launched(actions)
    while waiting:
        execution = waiting.pop(0)
        order.append(execution)
        scheduler.handle(Launched(execution))
        waiting += launched(scheduler.handle(Terminated(execution, "completed")))
    return [int(execution[1:6]) for execution in order]


def test_groups_launch_by_falling_expectation_each_as_a_whole():
    scheduler = machine()
    for group, duration in ((0, 1.0), (1, 3.0), (2, 2.0), (3, 5.0), (4, 4.0)):
        assert scheduler.handle(Expected(group, duration)) == []
    assert drained(scheduler, scheduler.handle(Started())) == [3, 3, 4, 4, 1, 1, 2, 2, 0, 0]


def test_groups_of_which_nothing_is_known_count_as_average():
    scheduler = machine()
    for group, duration in ((1, 9.0), (3, 1.0)):
        scheduler.handle(Expected(group, duration))
    assert drained(scheduler, scheduler.handle(Started())) == [1, 1, 0, 0, 2, 2, 4, 4, 3, 3]


def test_without_expectations_and_in_fifo_order_groups_launch_as_dispatched():
    for order, expected in (("longest", []), ("fifo", [(4, 9.0)])):
        scheduler = machine(launch_order=order)
        for group, duration in expected:
            scheduler.handle(Expected(group, duration))
        assert drained(scheduler, scheduler.handle(Started())) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_an_older_version_goes_first_however_short_it_is():
    scheduler = machine()
    scheduler.handle(Started())
    scheduler.published = scheduler.version = 2
    scheduler.handle(Expected(5, 100.0))
    scheduler._refill(Published(2))
    queued = [int(execution[1:6]) for execution in scheduler.ledger.queue]
    assert queued[-8:] == [5, 5, 6, 6, 7, 7, 8, 8] and set(queued[:-8]) == {1, 2, 3, 4}


@pytest.mark.parametrize("duration", [0, -1.0, float("nan"), float("inf")])
def test_a_duration_that_is_none_is_refused(duration):
    with pytest.raises(ProtocolError, match="a finite number above 0"):
        machine().handle(Expected(0, duration))


def test_expectations_survive_a_snapshot_and_go_with_their_groups():
    scheduler = machine(mu=1, phi=0, cells=(4,))
    for group in range(6):
        scheduler.handle(Expected(group, 1.0 + group))
    scheduler.handle(Started())
    copy = Scheduler.from_state(json.loads(json.dumps(scheduler.to_state())))
    assert copy.ledger.expected == scheduler.ledger.expected and 5 in copy.ledger.expected
    for execution in ("g00001-0", "g00001-1"):
        for event in (Launched(execution), Terminated(execution, "failed"), Assessed(execution, False)):
            assert copy.handle(event) == scheduler.handle(event)
    assert 1 not in scheduler.ledger.expected  # dropped as untrainable
    scheduler.handle(Expected(1, 2.0))
    assert 1 not in scheduler.ledger.expected


def test_history_is_the_mean_of_the_query_and_of_all_for_others():
    history = DurationHistory()
    assert history.expected("a") is None
    for query, duration in (("a", 1.0), ("a", 3.0), ("b", 8.0)):
        history.observe(query, duration)
    assert [history.expected(query) for query in ("a", "b", "new")] == [2.0, 8.0, 4.0]


@pytest.mark.parametrize(
    ("name", "steps", "changes"),
    [
        ("nl2repo-elastic-1.5", 24, {}),
        ("deepswe-elastic-1.5", 24, {}),
        ("2.4t-elastic-1.5", 24, {"phi": 0.0, "mu": 4}),
    ],
)
def test_longest_first_is_at_least_four_percent_faster_at_the_same_staleness(name, steps, changes):
    """Queries come back after 128 groups; the first time nothing is known of them."""
    chosen = PRESETS[name]
    workload = replace(chosen.workload, queries=128)
    settings = chosen.settings.model_copy(update={"steps": steps})
    better = settings.model_copy(update={"launch_order": "longest", **changes})
    assert better.staleness_target == settings.staleness_target
    before, after = (simulate(each, workload, chosen.costs) for each in (settings, better))
    assert before.hours > 1.04 * after.hours
    assert abs(after.staleness_mean - after.staleness_target) < 0.15
