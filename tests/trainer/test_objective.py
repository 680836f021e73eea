"""The objective alone: bounds, caps, and where executions without targets stand."""

import math

import pytest
import torch
from gyre_trainer.errors import RowError, TrainerError
from gyre_trainer.objective import gspo_loss
from gyre_trainer.settings import ObjectiveSettings
from gyre_trainer.statistics import TrainStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

WIDE = ObjectiveSettings(clip_low=0.5, clip_high=2.0)


def coefficients(log_rho, owner, advantages, objective=WIDE):
    """d(-loss)/d(log pi) of each target."""
    log_pi = torch.tensor(log_rho, dtype=torch.float32, requires_grad=True)
    loss, statistics = gspo_loss(
        log_pi, torch.zeros(len(log_rho)), torch.tensor(owner), torch.tensor(advantages), objective
    )
    loss.backward()
    return (-log_pi.grad).tolist(), statistics


def test_each_target_weighs_its_capped_ratio_times_advantage_over_length():
    log_rho = [math.log(2.0), math.log(0.25), math.log(9.0)]
    got, statistics = coefficients(
        log_rho, [0, 0, 1], [3.0, -1.0], ObjectiveSettings(clip_low=0.1, clip_high=10)
    )
    assert got == pytest.approx([3.0 * 2.0 / 2, 3.0 * 0.25 / 2, -1.0 * 5.0])
    assert statistics.capped_targets == 1 and statistics.clipped_high == statistics.clipped_low == 0


@pytest.mark.parametrize(
    ("advantage", "ratio", "trains"),
    [
        (1.0, 2.1, False),
        (1.0, 0.1, True),
        (-1.0, 0.4, False),
        (-1.0, 9.0, True),
        (1.0, 1.9, True),
        (-1.0, 0.6, True),
    ],
)
def test_clipping_masks_the_whole_execution_on_the_side_that_already_moved(advantage, ratio, trains):
    spread = [math.log(ratio) + 0.3, math.log(ratio) - 0.3]
    got, statistics = coefficients(spread, [0, 0], [advantage])
    assert all((value != 0) == trains for value in got)
    assert statistics.clipped_high + statistics.clipped_low == (not trains)


def test_an_execution_exactly_at_a_bound_trains():
    at_one = ObjectiveSettings(clip_low=1.0, clip_high=1.0)
    got, _ = coefficients([0.0, 0.0], [0, 1], [1.0, -1.0], at_one)
    assert got == [1.0, -1.0]


def test_the_ratio_spans_all_targets_of_the_execution():
    """One token far off does not clip; the mean over the execution decides."""
    got, statistics = coefficients([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], [1.0])
    assert statistics.ratio_max == pytest.approx(math.exp(0.25)) and all(got)


def test_an_execution_without_targets_never_reaches_the_objective():
    with pytest.raises(RowError, match="without targets"):
        gspo_loss(torch.zeros(1), torch.zeros(1), torch.tensor([1]), torch.tensor([1.0, 1.0]), WIDE)


def test_a_single_target_and_a_zero_advantage():
    got, statistics = coefficients([0.1, 0.2], [0, 1], [0.0, 2.0])
    assert got[0] == 0.0 and got[1] == pytest.approx(2.0 * math.exp(0.2))
    assert statistics.executions == 2 and statistics.targets == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_any_split_into_whole_executions_sums_to_the_same(executions, data):
    advantages = data.draw(st.lists(st.floats(-2, 2), min_size=len(executions), max_size=len(executions)))
    whole, total = coefficients(
        sum(executions, []), [i for i, e in enumerate(executions) for _ in e], advantages
    )
    parts, merged = [], TrainStatistics()
    for log_rho, advantage in zip(executions, advantages, strict=True):
        got, statistics = coefficients(log_rho, [0] * len(log_rho), [advantage])
        parts += got
        merged += statistics
    assert parts == pytest.approx(whole, rel=1e-6, abs=1e-7)
    assert (merged.clipped_high, merged.clipped_low) == (total.clipped_high, total.clipped_low)
    assert merged.loss == pytest.approx(total.loss, rel=1e-4, abs=1e-4)
    assert (merged.ratio_min, merged.ratio_max) == pytest.approx((total.ratio_min, total.ratio_max))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(TrainerError, match="clip_low"):
        ObjectiveSettings(clip_low=1.1)
    with pytest.raises(TrainerError, match="temperature"):
        ObjectiveSettings(temperature=0.0)
