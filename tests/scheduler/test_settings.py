"""Settings that cannot work are refused with the formula they break."""

from fractions import Fraction

import pytest
from gyre_scheduler.errors import SettingsError
from gyre_scheduler.settings import SchedulerSettings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phi": 0.3}, "phi*B must be a whole number"),
        ({"phi": -1}, "phi*B"),
        ({"phi": float("nan")}, "phi*B"),
        ({"phi": float("inf")}, "phi*B"),
        ({"mu": 0}, "mu must be at least 1"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"groups_per_step": 0}, "groups_per_step"),
        ({"steps": 0}, "steps"),
        ({"cells": ()}, "cells"),
        ({"cells": (4, 0)}, "cells"),
        ({"standalone": -1}, "standalone"),
        ({"untrainable_limit": 0}, "untrainable_limit"),
        ({"policy": "async", "training_cells": 3}, "training_cells must be 1 to 2"),
        ({"policy": "async", "training_cells": 2}, "no rollout capacity"),
    ],
)
def test_an_impossible_setting_is_one_line(changes, words):
    with pytest.raises(SettingsError) as refused:
        SchedulerSettings(**changes)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("phi", "mu", "batch", "target", "depth"),
    [
        (0.5, 3, 8, Fraction(3, 2), 28),
        (1.5, 1, 32, Fraction(3, 2), 80),
        (0, 4, 32, Fraction(3, 2), 128),
        (1 / 3, 1, 48, Fraction(1, 3), 64),
    ],
)
def test_queue_depth_and_staleness_target_are_exact(phi, mu, batch, target, depth):
    settings = SchedulerSettings(phi=phi, mu=mu, groups_per_step=batch)
    assert settings.staleness_target == target
    assert settings.queue_depth == depth


def test_async_may_train_on_every_cell_beside_a_standalone_pool():
    settings = SchedulerSettings(policy="async", training_cells=2, standalone=4)
    assert settings.training_cells == 2
