"""The settings of a harness: a preset, and what changes it."""

import pytest
from gyre_cli import preflight
from gyre_cli.config import load_config
from gyre_cli.errors import MisuseError
from gyre_scheduler.errors import TemplateError


def harness(*assignments: str):
    return preflight._harness(load_config(None, list(assignments)))


def test_a_preset_learns_window_and_answer_from_the_run():
    found = harness(
        *(
            "harness.preset=opencode",
            'harness.program=["{python}"]',
            "harness.model=m",
            "cells.context_length=5000",
        ),
        *("sampling.max_new_tokens=77", 'harness.prefix=["nice"]', 'harness.stop=["true", "{name}"]'),
    )
    assert found.command[:2] == ("{python}", "run")
    (config,) = found.files.values()
    assert '"context": 5000' in config and '"output": 77' in config and "gyre/m" in config
    assert (found.prefix, found.stop) == (("nice",), ("true", "{name}"))


def test_without_a_preset_it_is_the_quickstart():
    assert harness().command[-1] == "{quickstart_harness}"
    assert harness('harness.command=["{python}", "{quickstart_harness}", "{model}"]').check() is None
    assert harness('harness.command=["{python}"]').command == ("{python}",)


@pytest.mark.parametrize(
    ("assignments", "told"),
    [
        (["harness.preset=cursor"], "harness.preset"),
        (['harness.program=["x"]'], "set preset"),
        (["harness.preset=pi", 'harness.program=["/no/pi"]'], "install pi, or set harness.program"),
        (['harness.prefix=["/no/bwrap"]'], "set harness.prefix"),
        (['harness.stop=["/no/docker"]'], "set harness.stop"),
    ],
)
def test_a_harness_that_cannot_run_is_refused_with_what_to_set(assignments, told):
    with pytest.raises(MisuseError, match=told):
        harness(*assignments)


def test_a_placeholder_that_nobody_fills_is_refused():
    with pytest.raises(TemplateError, match=r"\{nope\}"):
        harness('harness.files={"x": "{nope}"}')
