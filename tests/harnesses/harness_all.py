"""Owns the list of harnesses that every test of this folder runs with."""

import os
from collections.abc import Callable

import pytest
from harness_adapter import Harness
from harness_claude_code import ClaudeCode
from harness_codex import Codex
from harness_install import missing
from harness_mini_swe_agent import MiniSweAgent
from harness_opencode import OpenCode
from harness_pi import Pi
from harness_qwen_code import QwenCode

HARNESSES: tuple[Harness, ...] = (ClaudeCode(), Codex(), QwenCode(), OpenCode(), Pi(), MiniSweAgent())


def harnesses(able: Callable[[Harness], object] = lambda harness: True) -> pytest.MarkDecorator:
    """Runs a test with each harness that has the ability."""
    able_ones = [pytest.param(each, id=each.name) for each in HARNESSES if able(each)]
    return pytest.mark.parametrize("harness", able_ones)


each_harness = harnesses()


def need(harness: Harness) -> None:
    """Skip where the harness is not installed; in CI it must be."""
    reason = missing(harness.name)
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
