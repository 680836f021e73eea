"""Invariants of the state machine over random event orders, failures and losses."""

import json

from gyre_scheduler.actions import Abort, Action, Finish
from gyre_scheduler.events import Event
from gyre_scheduler.replay import replay
from gyre_scheduler.settings import SchedulerSettings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def scheduler_settings(draw, policies=("elastic", "async", "colocate")):
    policy = draw(st.sampled_from(policies))
    groups = draw(st.integers(1, 4))
    standalone = draw(st.sampled_from([0, 0, 1, 5]))
    cells = draw(st.lists(st.integers(1, 8), min_size=2 if policy == "async" else 1, max_size=4))
    return SchedulerSettings(
        policy=policy,
        group_size=draw(st.integers(2, 4)),
        oversample=draw(st.sampled_from([0, 0, 1, 3])),
        groups_per_step=groups,
        phi=draw(st.integers(0, 2 * groups)) / groups,
        mu=draw(st.integers(1, 4)),
        steps=draw(st.integers(1, 9)),
        cells=tuple(cells),
        standalone=standalone,
        training_cells=draw(st.integers(1, len(cells) - (not standalone))) if policy == "async" else 1,
        streaming=draw(st.booleans()),
        dispatch=draw(st.sampled_from(["boundary", "continuous"])),
        launch_order=draw(st.sampled_from(["fifo", "longest"])),
        untrainable_limit=10**6,
    )


@QUICK
@given(scheduler_settings(), SEEDS, st.sampled_from([0.0, 0.1, 0.4]))
def test_every_order_of_events_ends_in_finish(random_environment, chosen, seed, invalid):
    environment = random_environment(chosen, seed, invalid)
    assert environment.drive() == Finish()
    assert replay(chosen, environment.log).to_state() == environment.scheduler.to_state()


@QUICK
@given(scheduler_settings(("elastic", "colocate")), SEEDS, st.sampled_from([0.01, 0.1]))
def test_lost_satellites_that_come_back_never_stop_a_run(random_environment, chosen, seed, losses):
    assert random_environment(chosen, seed, losses=losses).drive() == Finish()


@QUICK
@given(scheduler_settings(("async",)), SEEDS)
def test_async_survives_lost_cells_of_both_roles(random_environment, chosen, seed):
    assert random_environment(chosen, seed, losses=0.05).drive() == Finish()


@QUICK
@given(scheduler_settings(), SEEDS)
def test_permanent_losses_end_in_finish_or_a_reasoned_abort(random_environment, chosen, seed):
    end = random_environment(chosen, seed, losses=0.03, permanent=0.5).drive()
    assert isinstance(end, Finish | Abort)
    if isinstance(end, Abort):
        assert end.reason.startswith("no rollout capacity is left")


@QUICK
@given(scheduler_settings(), SEEDS)
def test_messages_survive_json(random_environment, chosen, seed):
    environment = random_environment(chosen, seed, losses=0.02)
    environment.drive()
    for event, actions in environment.log:
        assert Event.from_dict(json.loads(json.dumps(event.to_dict()))) == event
        for action in actions:
            assert Action.from_dict(json.loads(json.dumps(action.to_dict()))) == action
