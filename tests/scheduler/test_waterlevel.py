"""Eq. 3 to 6."""

from gyre_scheduler.cells import CellTable
from gyre_scheduler.waterlevel import (
    core_has_supply,
    may_leave,
    rollout_capacity,
    satellite_has_supply,
    waterlevel,
)
from hypothesis import given
from hypothesis import strategies as st


def test_eight_cells_of_144_leave_at_the_papers_thresholds():
    cells = CellTable([144] * 8, standalone=0, serving=range(8))
    left = [cells.capacity(without=range(k + 1)) for k in range(8)]
    assert left == [1008, 864, 720, 576, 432, 288, 144, 0]


def test_the_waterlevel_counts_queued_and_running_executions():
    assert waterlevel(dispatched=1792, terminated=0) == 1792
    assert waterlevel(dispatched=10, terminated=10) == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 50))
def test_capacity_falls_by_each_cells_limit_down_to_the_standalone_pool(limits, standalone):
    levels = [rollout_capacity(limits[k:], standalone) for k in range(len(limits) + 1)]
    assert [high - low for high, low in zip(levels, levels[1:], strict=False)] == limits
    assert levels[-1] == standalone


def test_a_cell_leaves_at_exactly_the_capacity_that_is_left():
    assert may_leave(144, 144, burst_is_ready=False)
    assert not may_leave(145, 144, burst_is_ready=True)


def test_the_last_capacity_leaves_only_when_the_burst_needs_no_more_rollouts():
    assert not may_leave(0, 0, burst_is_ready=False)
    assert may_leave(0, 0, burst_is_ready=True)


def test_each_joining_satellite_needs_a_micro_step_of_its_own():
    assert satellite_has_supply(unclaimed=1, joining=0)
    assert not satellite_has_supply(unclaimed=1, joining=1)


def test_the_core_needs_a_ready_group_even_when_its_batch_waits_for_none():
    assert not core_has_supply(ready_groups=0, wanted=0)
    assert core_has_supply(ready_groups=2, wanted=2)
