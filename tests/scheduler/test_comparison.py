"""Runs side by side: Table 1 from one calibration, the paper's other comparisons, bounds, and the search for the best."""

from dataclasses import replace

import pytest
from gyre_scheduler.comparison import bounds, compare, deviation
from gyre_scheduler.dispatch import groups_of_run
from gyre_scheduler.errors import SettingsError
from gyre_scheduler.planning import SLOTS, TAIL, TRAINING, plan
from gyre_scheduler.presets import COMPARISONS, PRESETS, TABLE1, Preset
from gyre_scheduler.settings import SchedulerSettings
from gyre_scheduler.simulator import Costs, simulate
from gyre_scheduler.workloads import SampledGroups, TwoLevelLognormal


def test_table1_comes_out_of_one_calibration():
    rows = compare(TABLE1, seeds=2)
    found = deviation(rows)
    assert found.rms <= 0.03 and found.worst <= 0.06 and found.same_order
    assert {row.preset.workload for row in rows} == {TABLE1["E0"].workload}
    assert {row.preset.costs for row in rows} == {TABLE1["E0"].costs}
    nodes = {(sum(row.preset.settings.cells) + row.preset.settings.standalone) / 36 for row in rows}
    assert nodes == {32}


def test_the_long_runs_show_the_papers_speedups_which_nothing_was_fitted_to():
    hours = {row.name: row.hours for row in compare(COMPARISONS["nl2repo"], seeds=1)}
    over_async = [hours[f"async-{target}"] / hours[f"elastic-{target}"] for target in ("1", "1.5")]
    over_colocate = [hours[f"colocate-{target}"] / hours[f"elastic-{target}"] for target in ("1", "1.5")]
    assert all(1.42 - 0.06 <= speedup <= 1.53 + 0.06 for speedup in over_async)
    assert all(1.36 - 0.06 <= speedup <= 1.47 + 0.06 for speedup in over_colocate)


def test_the_large_model_takes_the_papers_hours():
    found = deviation(compare(COMPARISONS["2.4t"], seeds=1))
    assert found.worst <= 0.06 and found.same_order


def test_every_comparison_keeps_staleness_and_nodes():
    for name, rows in COMPARISONS.items():
        for row, preset in rows.items():
            nodes = sum(preset.settings.cells) + preset.settings.standalone
            first = next(iter(rows.values())).settings
            assert nodes == pytest.approx(sum(first.cells) + first.standalone, abs=1), (name, row)
            if name != "table1":
                assert float(preset.settings.staleness_target) == float(row.rsplit("-", 1)[1])
            else:
                assert preset.settings.staleness_target == 1.5


SMALL = Preset(
    SchedulerSettings(group_size=4, groups_per_step=4, phi=0.5, mu=2, steps=8, cells=(8, 8, 8, 8)),
    TwoLevelLognormal(),
    Costs(node_hours_per_step=4.0, executions_per_node=4.0),
)


@pytest.mark.parametrize(
    "changes", [{}, {"dispatch": "continuous"}, {"oversample": 3, "launch_order": "longest"}]
)
@pytest.mark.parametrize("name", ["nl2repo-e0", "nl2repo-c2", "nl2repo-a3", "deepswe-elastic-1", "small"])
def test_no_run_is_faster_than_its_bounds(name, changes):
    chosen = SMALL if name == "small" else PRESETS[name]
    settings = chosen.settings.model_copy(update={"steps": 7, **changes})
    found = bounds(settings, chosen.workload, chosen.costs)
    assert found.rollout > 0 and found.training > 0 and found.work == found.rollout + found.training
    assert simulate(settings, chosen.workload, chosen.costs).hours >= found.work


def test_bounds_of_a_run_that_can_be_counted_by_hand():
    settings = SchedulerSettings(group_size=2, groups_per_step=1, phi=0, mu=1, steps=3, cells=(2, 2))
    found = bounds(
        settings, SampledGroups(((3.0, 1.0),)), Costs(node_hours_per_step=5.0, executions_per_node=2.0)
    )
    assert (found.rollout, found.training) == (3 * 4.0 / 4, 3 * 5.0 / 2)


def test_errors_are_those_of_the_rows_that_the_paper_has():
    rows = compare({"a": replace(SMALL, paper_hours=None), "b": SMALL}, seeds=1)
    assert deviation(rows) is None and rows[0].error is None and rows[0].spread == 0
    hours = rows[0].hours
    known = compare(
        {"a": replace(SMALL, paper_hours=hours / 1.1), "b": replace(SMALL, paper_hours=hours)}, seeds=1
    )
    found = deviation(known)
    assert (found.worst, found.rms) == (pytest.approx(0.1), pytest.approx((0.01 / 2) ** 0.5))
    with pytest.raises(SettingsError, match="seeds must be at least 1"):
        compare({"a": SMALL}, seeds=0)


def test_a_plan_keeps_staleness_and_cells_and_is_sorted():
    done = []
    found = plan(SMALL, 1.0, seeds=2, progress=done.append)
    assert sum(done) == done.count(0) > 0
    assert [row.hours for row in found.rows] == sorted(row.hours for row in found.rows)
    assert {len(row.results) for row in found.rows} == {2} and {len(row.results) for row in found.others} == {
        1
    }
    for row in (*found.rows, *found.others):
        settings = row.preset.settings
        assert settings.staleness_target == 1 and sum(settings.cells) + settings.standalone == 32
    policies = {row.preset.settings.policy for row in (*found.rows, *found.others)}
    assert policies == {"elastic", "async", "colocate"}
    best = found.rows[0]
    assert best.hours >= found.bounds.work and found.by_j_max[5] == pytest.approx(best.hours)
    assert found.by_j_max[1] <= found.by_j_max[5] <= found.by_j_max[0]


def test_a_plan_keeps_the_standalone_pool_that_there_is():
    base = replace(SMALL, settings=SMALL.settings.model_copy(update={"cells": (8, 8, 8), "standalone": 8}))
    found = plan(base, 1.0, seeds=1)
    for row in (*found.rows, *found.others):
        assert sum(row.preset.settings.cells) + row.preset.settings.standalone == 32, row.name


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"costs": Costs(node_hours_per_step=60.0, executions_per_node=4.0)}, TRAINING),
        ({"settings": SMALL.settings.model_copy(update={"cells": (2, 2)})}, SLOTS),
        (
            {
                "settings": SMALL.settings.model_copy(update={"cells": (100, 100)}),
                "costs": Costs(node_hours_per_step=0.1, executions_per_node=4.0),
            },
            TAIL,
        ),
    ],
)
def test_a_plan_says_what_limits_it(changes, limit):
    assert plan(replace(SMALL, **changes), 1.0, seeds=1).limit == limit


def test_a_staleness_that_no_schedule_has_is_refused():
    with pytest.raises(SettingsError, match=r"no schedule has a mean staleness of 0.3: phi \+ \(mu - 1\)/2"):
        plan(SMALL, 0.3)


@pytest.mark.parametrize("dispatch", ["boundary", "continuous"])
@pytest.mark.parametrize(("mu", "steps"), [(3, 8), (3, 9), (1, 4), (4, 3)])
def test_groups_of_a_run_are_those_that_a_run_dispatches(dispatch, mu, steps):
    settings = SMALL.settings.model_copy(update={"dispatch": dispatch, "mu": mu, "steps": steps})
    result = simulate(settings, SMALL.workload, SMALL.costs)
    assert result.groups == groups_of_run(settings)
