"""A whole run whose evaluator is a model behind HTTP: its scores train, and its key stays with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gyre_trajtree import executions, read_run_log

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))
from evaluation_server import reply, serving

KEY = "sk-judge-4711"
SMALL = (
    *("schedule.steps=1", "schedule.mu=1", "schedule.phi=0", "schedule.groups_per_step=1"),
    *("schedule.group_size=2", "harness.keep_workspaces=true"),
)
TELLS_WHAT_IT_KNOWS = """
import json, os
open("known.json", "w").write(json.dumps(dict(os.environ)))
"""


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "a", "prompt": "p", "rubric": "r"}) + "\n")
    (tmp_path / "tells.py").write_text(TELLS_WHAT_IT_KNOWS)
    command = json.dumps(["{python}", str(tmp_path / "tells.py")])
    return [*SMALL, f"task.source={tmp_path / 'tasks.jsonl'}", f"harness.command={command}"]


def called(tool: str, **arguments: object) -> dict:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"choices": [{"message": {"tool_calls": [{"id": "c", "type": "function", "function": function}]}}]}


def judged(handler) -> None:
    """Read the one file, then score it."""
    read = handler.server.told.asked[-1]["messages"][-1]["role"] == "tool"
    reply(called("submit_score", score=0.5, reason="so") if read else called("read_file", path="known.json"))(
        handler
    )


def test_a_judge_scores_a_run_and_its_key_goes_nowhere_else(start, own, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving() as server:
        server.answers = [judged]
        judge = {"url": server.url.replace("/score", "/v1"), "model": "m", "key_env": "JUDGE_KEY"}
        run = start(*own, f"task.evaluator={json.dumps(judge)}")
        assert run.summary()["rewards"] == [0.5]
        assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
        assert "GYRE_API_KEY" in json.dumps(server.asked), "the harness told its environment"
        assert KEY not in json.dumps(server.asked)
    recorded = executions(read_run_log(run.log)).values()
    assert [each.designated.detail for each in recorded] == ["so", "so"]
    assert all(each.designated.artifact.startswith("sha256:") for each in recorded)
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert files and not any(KEY.encode() in path.read_bytes() for path in files)


def test_a_service_scores_a_run_and_what_it_says_of_earlier_states_is_kept(start, own):
    early = [{"score": 1, "artifact": "git:a", "branch": "try-1"}]
    with serving() as server:
        server.answers = [{"score": 0.25, "artifact": "git:b", "intermediate": early}]
        run = start(*own, f"task.evaluator={server.url}")
        assert run.summary()["rewards"] == [0.25]
        assert {asked["task"]["rubric"] for asked in server.asked} == {"r"}
    for each in executions(read_run_log(run.log)).values():
        first, last = each.assessments
        assert (first.artifact, first.designated, first.extra) == ("git:a", False, {"branch": "try-1"})
        assert (last.artifact, last.designated, each.reward) == ("git:b", True, 0.25)


def test_a_container_that_cannot_be_made_is_a_placeholder_and_its_work_none(start, own):
    with serving() as server:
        run = start(
            *own, f"task.evaluator={server.url}", 'harness.prefix=["sh", "-c", "echo no image >&2; exit 125"]'
        )
        assert run.summary()["rewards"] == [0.0]
        assert server.asked == []
    for each in executions(read_run_log(run.log)).values():
        assert (each.designated.status, each.reward) == ("placeholder", 0.0)
        assert each.designated.detail == "its container could not be made: exit status 125: no image"


def test_a_judge_without_its_key_is_refused(start, own, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "key_env": "JUDGE_KEY"}
    run = start(*own, f"task.evaluator={json.dumps(judge)}")
    code, _, err = run.finish()
    assert code == 2 and "JUDGE_KEY is not set" in err.splitlines()[-1]
    assert run.processes("gyre_proxy", "gyre_trainer") == []
