"""opencode by the other protocols that it speaks, through packages that it carries with it."""

import harness_scenarios
import pytest
from harness_all import need
from harness_opencode import OpenCode
from harness_scenarios import roles, work_tree
from harness_trial import Trial


@pytest.mark.parametrize("provider", ["@ai-sdk/anthropic", "@ai-sdk/openai"], ids=["messages", "responses"])
def test_tools_images_and_sub_agents(provider, harness_stage, tmp_path):
    harness = OpenCode(provider)
    need(harness)
    script = harness_scenarios.work(harness)
    result = Trial(harness_stage, harness, script, tmp_path).run()
    result.sound()
    assert result.tree == work_tree(harness, script)
    assert result.roles == roles(script)
