"""Owns the list of harnesses that every test of this folder runs with."""

import os

import pytest
from harness_adapter import Harness
from harness_claude_code import ClaudeCode
from harness_codex import Codex
from harness_install import missing
from harness_pi import Pi

HARNESSES: tuple[Harness, ...] = (ClaudeCode(), Codex(), Pi())

each_harness = pytest.mark.parametrize("harness", [pytest.param(each, id=each.name) for each in HARNESSES])


def need(harness: Harness, ability: str | None = None) -> None:
    """Skip where the harness cannot do this, or is not installed; in CI it must be installed."""
    if ability is not None and ability not in harness.abilities:
        pytest.skip(f"{harness.name} knows no {ability}")
    reason = missing(harness.name)
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
