"""A setting that cannot work is refused when it is made, in one line that names it."""

from pathlib import Path

import pytest
from gyre_trainer.errors import SettingsError
from gyre_trainer.settings import AdamSettings, CellSettings, EngineSettings, ObjectiveSettings

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (AdamSettings, "lr", (0, -1e-6, NAN, INF, "1", True, None)),
        (AdamSettings, "betas", ((0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), (0.9,), 0.9, (0.9, "a"))),
        (AdamSettings, "eps", (0.0, NAN, INF)),
        (AdamSettings, "weight_decay", (-0.1, NAN, INF)),
        (AdamSettings, "clip_grad", (-1.0, NAN, INF)),
        (ObjectiveSettings, "clip_low", (0.0, 1.1, NAN)),
        (ObjectiveSettings, "clip_high", (0.9, NAN, INF)),
        (ObjectiveSettings, "token_weight_cap", (0.0, NAN, INF)),
        (ObjectiveSettings, "temperature", (0.0, NAN, INF)),
        (EngineSettings, "max_running", (0, -1, 10**8, 1.5)),
        (EngineSettings, "context_length", (1, 2.5)),
        (EngineSettings, "threads", (0, 10**6)),
        (EngineSettings, "start_timeout_s", (0, NAN, INF)),
        (EngineSettings, "request_timeout_s", (-1, NAN, INF)),
        (EngineSettings, "health_interval_s", (0, NAN, 1e12)),
        (CellSettings, "threads", (0, 1.0)),
        (CellSettings, "version", (-1, 0.0)),
        (CellSettings, "start_timeout_s", (0, NAN)),
        (CellSettings, "operation_timeout_s", (0, INF)),
        (CellSettings, "collective_timeout_s", (0, "30")),
    ],
)
def test_a_value_out_of_range_is_named(kind, name, values):
    needed = {"model": Path("model")} if kind is CellSettings else {}
    kind(**needed)
    for value in values:
        with pytest.raises(SettingsError) as error:
            kind(**needed, **{name: value})
        assert str(error.value).startswith(name) and "\n" not in str(error.value)


def test_the_bounds_themselves_work():
    AdamSettings(betas=(0.0, 0.999), weight_decay=0, clip_grad=0)
    ObjectiveSettings(clip_low=1, clip_high=1)
    EngineSettings(max_running=1, context_length=2)
