import math

import numpy as np
import pytest
from gyre_trajtree import RewardError, group_advantages
from hypothesis import given
from hypothesis import strategies as st

rewards = st.lists(st.none() | st.floats(0, 1), max_size=16)


@given(rewards, st.sampled_from(["mean", "mean_std"]))
def test_advantages_of_the_valid_sum_to_zero_and_the_unresolved_change_nothing(rewards, normalise):
    advantages = group_advantages(rewards, normalise)
    valid = [reward for reward in rewards if reward is not None]
    assert [a is None for a in advantages] == [r is None for r in rewards]
    assert abs(math.fsum(a for a in advantages if a is not None)) < 1e-6
    assert [a for a in advantages if a is not None] == group_advantages(valid, normalise)


@given(rewards)
def test_scaled_advantages_have_unit_deviation_or_are_zero(rewards):
    advantages = [a for a in group_advantages(rewards, "mean_std") if a is not None]
    square = math.fsum(a * a for a in advantages)
    assert square == 0.0 or math.isclose(square, len(advantages), rel_tol=1e-6)


def test_mean_only():
    assert group_advantages([1.0, 0.0, None, 0.5]) == [0.5, -0.5, None, 0.0]


def test_groups_without_contrast_carry_no_signal():
    assert group_advantages([]) == []
    assert group_advantages([None, None]) == [None, None]
    assert group_advantages([0.7, None], "mean_std") == [0.0, None]
    assert group_advantages([0.35] * 8, "mean_std") == [0.0] * 8


def test_rounding_residue_is_not_amplified():
    noisy = [0.35] * 7 + [0.35 + 1e-8]
    assert group_advantages(noisy, "mean_std") == [0.0] * 8


def test_seven_against_one():
    advantages = group_advantages([0.35] * 7 + [1.0], "mean_std")
    assert advantages[7] == pytest.approx(math.sqrt(7))
    assert advantages[:7] == pytest.approx([-1 / math.sqrt(7)] * 7)


def test_a_rewards_magnitude_does_not_matter():
    for scale in (1e-3, 1.0, 1e99):
        advantages = group_advantages([0.0, scale, scale], "mean_std")
        assert advantages == pytest.approx([-math.sqrt(2), math.sqrt(0.5), math.sqrt(0.5)])


def test_rewards_may_be_any_real_number():
    assert group_advantages([True, np.float32(0.5), 0]) == [0.5, 0.0, -0.5]


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), 10**400, 1e200, "1.0", [1.0]]
)
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(RewardError, match="unresolved"):
        group_advantages([1.0, bad])


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(RewardError, match="mean_std"):
        group_advantages([1.0], "batch")
