"""What a run leaves behind is whole, true and replayable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from gyre_cli.quickstart import model_path
from gyre_scheduler import SchedulerSettings
from gyre_scheduler.actions import Action
from gyre_scheduler.events import Event
from gyre_scheduler.replay import replay
from gyre_trajtree import Tree, executions, infer_roles, read_run_log, tree_digest
from transformers import AutoModelForCausalLM


def gyre(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "gyre_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_summary_reports_a_complete_run(short_run):
    run, summary = short_run
    assert summary["steps"] == 6
    assert len((run.run_dir / "metrics.jsonl").read_text().splitlines()) == 6
    assert summary["staleness_target"] == 1.5
    assert 0 < summary["staleness_mean"] <= 1.5
    assert summary["role_switches"] >= 3
    for key in ("reward_first3", "reward_last3", "reroutes", "max_logprob_mismatch", "executions", "run_dir"):
        assert key in summary
    assert json.loads((run.run_dir / "summary.json").read_text()) == summary


def test_sampled_tokens_are_trained_or_excluded_with_a_reason(short_run):
    run, summary = short_run
    recorded = executions(read_run_log(run.log))
    in_the_log = sum(len(call.output_ids) for each in recorded.values() for call in each.calls)
    assert summary["sampled_tokens"] == in_the_log
    assert summary["sampled_tokens"] == summary["trained_tokens"] + sum(summary["excluded_tokens"].values())
    metrics = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["trained_tokens"] for row in metrics) == summary["trained_tokens"] > 0


def test_every_execution_is_accounted_for(short_run):
    run, summary = short_run
    recorded = executions(read_run_log(run.log))
    assert len(recorded) == summary["executions"]
    for each in recorded.values():
        assert Counter(state.state for state in each.states) == {"opened": 1, "closed": 1}, each.id
        if each.states[-1].termination != "cancelled":
            assert each.calls, each.id
    launched = [e["execution"] for t in run.events("schedule") if (e := t["event"])["name"] == "Launched"]
    assert sorted(launched) == sorted(recorded)
    assert sum(n for k, n in summary["outcomes"].items() if k != "unassessed") == summary["executions"]


def test_trees_have_summaries_and_sub_agents(short_run):
    run, summary = short_run
    result = gyre("tree", "inspect", str(run.log), "--json")
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    roles = shown["totals"]["roles"]
    assert roles["main"] > 0 and roles["main-summary"] > 0 and roles["sub-agent"] > 0
    assert len(shown["executions"]) == summary["executions"]
    first = shown["executions"][0]["id"]
    assert "sampled" in gyre("tree", "inspect", str(run.log), "--execution", first).stdout


def test_every_leaf_has_the_role_that_the_harness_gave_it(short_run):
    """The harness is known here: an agent keeps its system text and tools, and asks for summaries in one word."""
    run, _ = short_run
    judged = Counter()
    for each in executions(read_run_log(run.log)).values():
        if not each.calls:
            continue
        tree = Tree.from_calls(each.calls)
        decisions = infer_roles(tree)
        main = each.calls[0].evidence
        for leaf in tree.leaves():
            own = leaf.call.evidence
            role = "main" if (own["system"], own["tools"]) == (main["system"], main["tools"]) else "sub-agent"
            role += "-summary" if own["last_user"] == "summary" else ""
            judged[role, decisions[leaf.id].role] += 1
    assert all(given == inferred for given, inferred in judged), judged
    assert {given for given, _ in judged} >= {"main", "main-summary", "sub-agent"}


def test_the_log_replays_into_identical_trees_and_actions(short_run):
    run, _ = short_run

    def digests() -> dict[str, str]:
        recorded = executions(read_run_log(run.log))
        return {
            name: tree_digest(Tree.from_calls(each.calls)) for name, each in recorded.items() if each.calls
        }

    assert digests() == digests()
    turns = [
        (Event.from_dict(turn["event"]), [Action.from_dict(action) for action in turn["actions"]])
        for turn in run.events("schedule")
    ]
    settings = SchedulerSettings(steps=6, groups_per_step=4, group_size=6, cells=(24, 24))
    assert replay(settings, turns).version == 6


def test_trees_built_by_token_prefix_alone_have_the_same_paths(short_run):
    run, _ = short_run
    for each in list(executions(read_run_log(run.log)).values())[:40]:
        known = Tree.from_calls(each.calls)
        prompts = {node.id: known.path_tokens(node)[: node.output_start] for node in known.nodes}
        blind = Tree(each.id)
        for node in known.nodes:
            call = node.call
            blind.add(
                type(call)(call.id, call.execution, prompts[call.id], call.output_ids, logprobs=call.logprobs)
            )
        for node in known.nodes:
            assert np.array_equal(known.path_tokens(node), blind.path_tokens(blind[node.id]))


def test_recorded_logprobs_are_those_of_the_recorded_weights(short_run):
    """Every sampled token of the run, recomputed by transformers from the published weights that sampled it."""
    run, summary = short_run
    assert summary["max_logprob_mismatch"] < 1e-3 and summary["same_version_tokens"] > 0
    paths = {0: model_path()} | {e["version"]: e["path"] for e in run.events("publication")}
    models = {
        v: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for v, path in paths.items()
    }
    compared, worst = Counter(), 0.0
    for each in executions(read_run_log(run.log)).values():
        if not each.calls:
            continue
        tree = Tree.from_calls(each.calls)
        for leaf in tree.leaves():
            path = tree.path(leaf)
            ids = torch.tensor(tree.path_tokens(leaf), dtype=torch.long)[None]
            for version in {int(v) for node in path for v in node.call.token_versions()}:
                with torch.inference_mode():
                    logits = models[version](ids).logits[0].float()
                expected = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
                for node in path:
                    mine = node.call.token_versions() == version
                    there = expected[node.output_start - 1 : node.end - 1]
                    if mine.any():
                        worst = max(worst, float(np.abs(there - node.call.logprobs)[mine].max()))
                        compared[version] += int(mine.sum())
    assert worst < 1e-3, worst
    assert compared.total() >= summary["sampled_tokens"] and len(compared) >= 2


def test_the_report_shows_rewards_and_roles(short_run, tmp_path):
    run, _ = short_run
    target = tmp_path / "page.html"
    result = gyre("report", str(run.run_dir), "--html", str(target))
    assert result.returncode == 0, result.stderr
    page = target.read_text()
    for part in (
        "<h2>Reward</h2>",
        "Roles of the cells",
        'class="role training"',
        'class="role rollout"',
        "<polyline",
    ):
        assert part in page
    assert (run.run_dir / "report.html").exists()


def test_the_checkpoint_is_a_model_directory(short_run):
    run, _ = short_run
    newest = run.run_dir / "checkpoints" / "v6"
    model = AutoModelForCausalLM.from_pretrained(newest)
    assert model.num_parameters() == AutoModelForCausalLM.from_pretrained(model_path()).num_parameters()
    assert any((a != b).any() for a, b in zip(model.parameters(), _shipped().parameters(), strict=True))


def _shipped():
    return AutoModelForCausalLM.from_pretrained(model_path())


def test_nothing_of_a_run_outlives_it(short_run):
    run, _ = short_run
    assert run.processes("gyre_proxy", "gyre_trainer", "harness") == []


@pytest.mark.parametrize("policy", ["async", "colocate"])
def test_the_other_policies_run_too(start, policy):
    steps = {"async": 3, "colocate": 4}[policy]
    run = start(
        "schedule.groups_per_step=2",
        "schedule.group_size=4",
        f"schedule.steps={steps}",
        f"schedule.policy={policy}",
    )
    summary = run.summary()
    assert summary["steps"] == steps and summary["policy"] == policy
    assert summary["staleness_target"] == 1.5
    assert summary["sampled_tokens"] == summary["trained_tokens"] + sum(summary["excluded_tokens"].values())


def test_one_seed_dispatches_the_same_work(short_run, start):
    run, _ = short_run
    again = start("schedule.steps=3", "schedule.groups_per_step=4", "schedule.group_size=6")
    assert again.summary()["steps"] == 3

    def work(which) -> list[tuple]:
        return [(e["group"], e["task"]) for e in which.events("dispatch")]

    assert len(work(again)) >= 14
    assert work(again) == work(run)[: len(work(again))]
