"""Real harnesses through the proxy: they end as with the real API, and the log holds exactly the tree of what was said."""

import harness_scenarios
from harness_all import each_harness, need
from harness_scenarios import chains, roles
from harness_trial import Trial

HELD_TOKENS = 15
"""Shorter than any answer of the scripts."""


@each_harness
def test_tools_images_and_sub_agents(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.work(harness)
    result = Trial(harness_stage, harness, script, tmp_path).run()
    result.sound()
    assert result.tree == chains(script, **harness.origins)
    assert result.roles == roles(script)
    assert set(result.ends.values()) == {"stop"}


@each_harness
def test_a_reroute_in_the_middle_of_every_answer(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.work(harness)
    trial = Trial(harness_stage, harness, script, tmp_path, engines=2)
    trial.hold(HELD_TOKENS)
    result = trial.run(trial.move_all)
    result.sound()
    assert result.tree == chains(script, **harness.origins)
    assert result.roles == roles(script)
    for mark, call in result.calls.items():
        assert {version for version, _, _ in call.versions} == {1, 2}, mark
    assert trial.proxy.admin("GET", "status")["reroutes"] >= len(result.calls)
