"""Owns the list of harnesses that every test of this folder runs with."""

import os

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

each_harness = pytest.mark.parametrize("harness", [pytest.param(each, id=each.name) for each in HARNESSES])


def need(harness: Harness, ability: object = True, otherwise: str = "") -> None:
    """Skip where the harness lacks an ability, or is not installed; in CI it must be installed."""
    if not ability:
        pytest.skip(f"{harness.name} {otherwise}")
    reason = missing(harness.name)
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
