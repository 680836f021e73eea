"""Answers that end for their length: what harnesses make of them, and what the log holds of that."""

import harness_scenarios
import pytest
from harness_all import need
from harness_mini_swe_agent import MiniSweAgent
from harness_opencode import OpenCode
from harness_qwen_code import QwenCode
from harness_scenarios import chains, leaf_roles
from harness_trial import Trial

IN_THE_TEXT = 30
IN_THE_CALL = 70
"""Tokens of an answer of `errands`: its thinking and part of its text; all its text and part of its call."""


@pytest.mark.parametrize(
    ("harness", "tokens"),
    [
        pytest.param(QwenCode(), IN_THE_CALL, id="qwen-code"),
        pytest.param(MiniSweAgent(), IN_THE_TEXT, id="mini-swe-agent"),
    ],
)
def test_a_cut_answer_is_dropped_and_asked_for_again(harness, tokens, harness_stage, tmp_path):
    """Qwen Code asks the same with more room, mini-swe-agent with a complaint instead of the answer."""
    need(harness)
    script = harness_scenarios.errands(harness)
    trial = Trial(harness_stage, harness, script, tmp_path)
    trial.engines[0].cut["main.2"] = tokens
    result = trial.run()
    result.sound()
    assert result.tree == chains(script) | {"main.2'": "main.1", "main.3": "main.2'"}
    assert result.roles == leaf_roles(script, result.tree)
    assert {mark: end for mark, end in result.ends.items() if end != "stop"} == {"main.2": "length"}
    assert len(result.calls["main.2"].output_ids) == tokens


def test_opencode_ends_with_a_cut_answer(harness_stage, tmp_path):
    harness = OpenCode()
    need(harness)
    script = harness_scenarios.errands(harness)
    trial = Trial(harness_stage, harness, script, tmp_path)
    trial.engines[0].cut["main.2"] = IN_THE_TEXT
    result = trial.run(last="Part 2, with some")
    assert result.tree == {"title": None, "main.1": None, "main.2": "main.1"}
    assert result.roles == {"title": "auxiliary", "main.2": "main"}
    assert result.ends == {"title": "stop", "main.1": "stop", "main.2": "length"}
