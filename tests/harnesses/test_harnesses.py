"""Real harnesses through the proxy: they end as with the real API, and the log holds exactly the tree of what was said."""

import harness_scenarios
from harness_all import each_harness, harnesses, need
from harness_scenarios import chains, leaf_roles, roles, work_tree
from harness_trial import Trial
from proxy_stage import wait_until

HELD_TOKENS = 15
"""Shorter than any answer of the scripts; longer than the thinking of `errands`."""

UNSEEN_TOKENS = 1
"""The mark that opens the thinking: nothing that a client sees, so none keeps a part of the answer."""

LOST_S = 6.0
"""Longest time of a call where engines are lost for good."""


@each_harness
def test_tools_images_and_sub_agents(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.work(harness)
    result = Trial(harness_stage, harness, script, tmp_path).run()
    result.sound()
    assert result.tree == work_tree(harness, script)
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
    assert result.tree == work_tree(harness, script)
    assert result.roles == roles(script)
    for mark, call in result.calls.items():
        assert {version for version, _, _ in call.versions} == {1, 2}, mark
    assert trial.proxy.admin("GET", "status")["reroutes"] >= len(result.calls)


@harnesses(lambda harness: harness.compacted)
def test_compaction(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.compaction(harness)
    prompts = 2 if harness.compacts_between_prompts else 1
    result = Trial(harness_stage, harness, script, tmp_path, prompts=prompts, **harness.compaction).run()
    result.sound()
    assert result.tree == chains(script) | harness.compacted
    assert result.roles == leaf_roles(script, result.tree)


@harnesses(lambda harness: harness.sub_compacted)
def test_a_sub_agent_compacts(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.long_errand(harness)
    result = Trial(harness_stage, harness, script, tmp_path, **harness.compaction).run()
    result.sound()
    assert result.tree == chains(script) | harness.sub_compacted
    assert result.roles == leaf_roles(script, result.tree, "sub-agent-summary")


@harnesses(lambda harness: harness.overflowed or harness.gives_up)
def test_a_prompt_that_is_too_long(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.compaction(harness)
    trial = Trial(harness_stage, harness, script, tmp_path, context_length=harness.overflow)
    if harness.gives_up:
        assert harness.gives_up in trial.run_to_failure()
        return
    result = trial.run(code=int(harness.complains))
    result.sound()
    assert result.tree == chains(script) | harness.overflowed
    assert result.roles == leaf_roles(script, result.tree)


@each_harness
def test_engines_die_in_the_middle_of_an_answer(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.errands(harness)
    trial = Trial(harness_stage, harness, script, tmp_path, engines=2, call_deadline_s=LOST_S)
    trial.hold(HELD_TOKENS, {"main.2", "main.3"})
    lost = []

    def lose(engine) -> None:
        """The first answer goes on at the other engine. The second finds none: the harness has to ask again."""
        trial.kill(engine)
        lost.append(engine)
        if len(lost) == 2:
            wait_until(lambda: trial.proxy.calls()[-1].finish != "stop")
            trial.revive(engine)

    result = trial.run(lose)
    result.sound()
    assert result.tree == chains(script) | {"main.3'": "main.2", "main.4": "main.3'"} | harness.after_loss
    assert result.roles == leaf_roles(script, result.tree)
    assert {mark for mark, end in result.ends.items() if end != "stop"} == {"main.3"}
    assert result.dead == (set() if harness.reminds else {"main.3"})
    moved = result.calls["main.2"]
    whole = len(moved.output_ids)
    assert [end for _, _, end in moved.versions] == ([HELD_TOKENS, whole] if harness.streams else [whole])


@each_harness
def test_the_proxy_is_killed_in_the_middle_of_an_answer(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.errands(harness)
    trial = Trial(harness_stage, harness, script, tmp_path, own_process=True)
    trial.hold(UNSEEN_TOKENS, {"main.2"})
    result = trial.run(lambda _: trial.replace_proxy())
    result.sound()
    assert result.tree == chains(script)
    assert result.roles == roles(script)
