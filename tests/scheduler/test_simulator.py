"""The simulator drives the scheduler itself, and the paper's figures come out of its workload."""

import json
import math
from dataclasses import asdict, fields, replace
from statistics import mean

import pytest
from gyre_scheduler.errors import SettingsError, WorkloadError
from gyre_scheduler.presets import PRESETS, preset
from gyre_scheduler.settings import SchedulerSettings
from gyre_scheduler.simulator import Costs, simulate, training_hours
from gyre_scheduler.workloads import SampledGroups, TwoLevelLognormal
from hypothesis import given, settings
from hypothesis import strategies as st

DIVISORS = {"executions_per_node": 36.0, "micro_steps_per_group": 4}


def run(name, seed=0):
    chosen = preset(name)
    return simulate(chosen.settings, chosen.workload, chosen.costs, seed)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_to_its_end(name):
    chosen = preset(name)
    short = chosen.settings.model_copy(update={"steps": 6})
    result = simulate(short, chosen.workload, chosen.costs)
    assert result.steps == 6 == len(result.step_times)
    assert result.step_times == sorted(result.step_times)
    assert 0 < result.utilisation <= 1
    assert result.waterlevel[0] == (0.0, short.queue_depth * short.group_size)
    assert json.loads(json.dumps(asdict(result)))["hours"] == result.hours


def test_cold_start_staleness_is_that_of_first_in_first_out():
    assert run("nl2repo-e0").staleness_mean == pytest.approx(1.375)
    assert run("nl2repo-a0").staleness_mean == pytest.approx(4 / 3, abs=0.01)  # now and then one overtakes
    assert run("nl2repo-c0").staleness_mean == pytest.approx(1.5)


def test_elastic_is_faster_than_both_baselines_at_the_same_staleness_target():
    elastic, fixed, colocate = (run(f"nl2repo-{row}").hours for row in ("e0", "a0", "c0"))
    assert elastic < colocate < fixed
    assert elastic == pytest.approx(PRESETS["nl2repo-e0"].paper_hours, rel=0.15)


def test_earlier_cells_train_longer():
    shares = run("nl2repo-e0").training_share
    assert shares == sorted(shares, reverse=True) and shares[0] > 0


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    assert run("nl2repo-e0") == run("nl2repo-e0")
    assert run("nl2repo-e0").hours != run("nl2repo-e0", seed=1).hours


def test_one_cell_without_overlap_takes_rollout_plus_training():
    chosen = SchedulerSettings(group_size=2, groups_per_step=1, phi=0, mu=1, steps=1, cells=(2,))
    costs = Costs(
        node_hours_per_step=1.0,
        executions_per_node=2.0,
        to_training_hours=0.25,
        to_rollout_hours=0.5,
        update_hours=0.125,
        publish_hours=0.0625,
    )
    result = simulate(chosen, SampledGroups(((3.0, 1.0),)), costs)
    assert result.hours == pytest.approx(3.0 + 0.25 + 1.0 + 0.125 + 0.0625)
    assert result.step_times == [pytest.approx(4.375)]
    assert result.utilisation == pytest.approx((4.0 / 2 + 1.0) / result.hours)
    assert result.timeline == [(0.0, 0, "rollout"), (3.0, 0, "to_training"), (3.25, 0, "training")]


def test_training_hours_follow_the_timeline():
    timeline = [(0.0, 0, "rollout"), (1.0, 1, "training"), (2.0, 0, "training"), (5.0, 0, "rollout")]
    assert training_hours(timeline, 0, end=7.0) == 3.0
    assert training_hours(timeline, 1, end=7.0) == 6.0


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["elastic", "async", "colocate"]),
    st.booleans(),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_no_configuration_gets_stuck(policy, streaming, extra, mu, seed):
    chosen = SchedulerSettings(
        policy=policy,
        streaming=streaming,
        group_size=4,
        groups_per_step=2,
        phi=extra / 2,
        mu=mu,
        steps=7,
        cells=(3, 5, 4),
    )
    assert simulate(chosen, TwoLevelLognormal(), Costs(), seed).steps == 7


def test_more_training_work_never_makes_a_run_faster():
    chosen = preset("nl2repo-e0")
    cheap, dear = (
        simulate(chosen.settings, chosen.workload, replace(chosen.costs, node_hours_per_step=hours))
        for hours in (5.0, 40.0)
    )
    assert cheap.hours < dear.hours


def test_the_default_workload_gives_the_papers_figures():
    groups = [TwoLevelLognormal().hours(0, group, 16) for group in range(4000)]
    longest = [max(group) for group in groups]
    assert mean(map(mean, groups)) == pytest.approx(1.93, rel=0.02)
    assert mean(longest) == pytest.approx(2.96, rel=0.02)
    assert mean(hours >= 4 for hours in longest) == pytest.approx(0.0951, abs=0.02)
    assert max(longest) <= 4.5


def test_sampled_groups_come_from_the_samples():
    workload = SampledGroups(((1.0, 2.0, 3.0), (7.0,)))
    drawn = [workload.hours(0, group, 3) for group in range(20)]
    assert {tuple(sorted(group)) for group in drawn} == {(1.0, 2.0, 3.0), (7.0, 7.0, 7.0)}
    assert workload.hours(0, 5, 3) == drawn[5]


@pytest.mark.parametrize("groups", [(), ((),), ((1.0, 0.0),), ((1.0, math.nan),), ((math.inf,),)])
def test_an_empty_sample_is_refused(groups):
    with pytest.raises(WorkloadError):
        SampledGroups(groups)


BAD_NUMBERS = [-1, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize("name", [field.name for field in fields(Costs)])
def test_costs_refuse_negative_and_infinite_numbers_by_name(name, bad):
    with pytest.raises(SettingsError, match=f"^{name} must be a finite number of 0 or more, not"):
        Costs(**{name: bad})


@pytest.mark.parametrize("name", ["executions_per_node", "micro_steps_per_group"])
def test_costs_that_are_divided_by_cannot_be_zero(name):
    with pytest.raises(SettingsError, match=f"^{name} must be above 0"):
        Costs(**{name: 0})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *((name, bad) for name in ("between", "within", "cap_hours") for bad in BAD_NUMBERS),
        *(("mean_log", bad) for bad in (math.nan, math.inf, 1000, -1000)),
        ("cap_hours", 0),
    ],
)
def test_a_lognormal_that_cannot_be_drawn_from_is_refused(name, bad):
    with pytest.raises(WorkloadError, match="a lognormal workload needs"):
        TwoLevelLognormal(**{name: bad})


@given(st.floats(-100, 100), st.floats(0, 10), st.floats(0, 10), st.floats(0, 1e300, exclude_min=True))
def test_every_lognormal_gives_durations_above_zero_up_to_its_cap(mean_log, between, within, cap):
    drawn = TwoLevelLognormal(mean_log, between, within, cap).hours(0, 0, 8)
    assert all(0 < hours <= cap for hours in drawn)


def test_a_run_without_any_cost_of_training_still_has_positive_figures():
    chosen = preset("nl2repo-e0")
    costs = Costs(**{**dict.fromkeys((field.name for field in fields(Costs)), 0.0), **DIVISORS})
    result = simulate(chosen.settings, chosen.workload, costs)
    assert result.hours > 0 and 0 < result.utilisation <= 1


def test_an_unknown_preset_lists_those_that_exist():
    with pytest.raises(SettingsError, match="nl2repo-e0"):
        preset("nl2repo-e9")


def test_lost_satellites_cost_time_and_nothing_else():
    chosen = preset("nl2repo-e0")
    plain = run("nl2repo-e0")
    faulty = simulate(
        chosen.settings, chosen.workload, replace(chosen.costs, loss_hours=3.0, repair_hours=1.0)
    )
    assert faulty.hours > plain.hours
    assert faulty.steps == plain.steps and faulty.staleness_mean == pytest.approx(
        plain.staleness_mean, abs=0.05
    )
    lost = [cell for _, cell, role in faulty.timeline if role == "lost"]
    assert len(lost) > 10 and 0 not in lost
    never = replace(chosen.costs, loss_hours=1e9, repair_hours=1.0)
    assert simulate(chosen.settings, chosen.workload, never).hours == plain.hours


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["elastic", "async", "colocate"]),
    st.booleans(),
    st.sampled_from(["boundary", "continuous"]),
    st.sampled_from([0, 2]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.5, 5.0]),
    st.integers(0, 1000),
)
def test_no_faults_get_a_run_stuck(policy, streaming, dispatch, oversample, invalid, loss_hours, seed):
    chosen = SchedulerSettings(
        policy=policy,
        streaming=streaming,
        dispatch=dispatch,
        oversample=oversample,
        launch_order="longest",
        group_size=4,
        groups_per_step=2,
        phi=0.5,
        mu=3,
        steps=7,
        cells=(3, 5, 4),
        untrainable_limit=10**6,
    )
    costs = Costs(invalid=invalid, loss_hours=loss_hours, repair_hours=0.2)
    assert simulate(chosen, TwoLevelLognormal(queries=5), costs, seed).steps == 7
