"""A model as judge, behind a real server that plays the model: it reads within the workspace alone, and a score comes
from its word or not at all."""

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path

import pytest
from gyre_scheduler.errors import EvaluatorNotFound
from gyre_scheduler.evaluation import Evaluator, JudgeSettings
from gyre_scheduler.evaluation_tools import CALLS, LISTED, READ, READ_IN_ALL
from gyre_scheduler.executions import ExecutionFolder, Harness
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parent))
from evaluation_server import dies, hangs_up, reply, serving

TASK = {"id": "t", "prompt": "write a poem", "files": {"poem.txt": "roses\n"}, "solution": "never shown"}
KEY = "sk-judge-4711"


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    return ExecutionFolder.create(tmp_path / "execution", TASK)


def judge(server, **settings):
    return JudgeSettings(
        **{"url": server.url.replace("/score", "/v1"), "model": "m", "rubric": "half for roses", **settings}
    )


def assess(folder, settings, task=TASK, budget_s=60.0, **options):
    async def once():
        async with Evaluator(settings, **{"timeout_s": 60.0, "attempts": 1, **options}) as evaluator:
            return await evaluator.assess(folder, task, time.monotonic() + budget_s)

    return asyncio.run(once())


def says(content=None, *calls, **more):
    """A completion: text, and calls as (tool, arguments)."""
    tool_calls = [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for number, (name, given) in enumerate(calls)
    ]
    message = {
        "role": "assistant",
        "content": content,
        **({"tool_calls": tool_calls} if calls else {}),
        **more,
    }
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def submits(score, reason="so"):
    return says(None, ("submit_score", {"score": score, "reason": reason}))


def results(server):
    """What the tools answered in the whole of the last request."""
    return [message["content"] for message in server.asked[-1]["messages"] if message["role"] == "tool"]


def test_a_judge_reads_the_workspace_and_submits_a_score(folder, server):
    server.answers = [
        says("", ("list_files", {})),
        says(None, ("read_file", {"path": "poem.txt"}), ("read_file", {"path": "none"})),
        submits(0.5, "there are roses"),
    ]
    found = assess(folder, judge(server))
    assert (found.status, found.score, found.detail) == ("valid", 0.5, "there are roses")
    assert found.artifact.startswith("sha256:")
    assert results(server) == [
        "poem.txt  6",
        "roses\n",
        "Error: 'none' cannot be read: No such file or directory",
    ]
    first = server.asked[0]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    question = first["messages"][1]["content"]
    assert "write a poem" in question and "half for roses" in question and "never shown" not in str(first)
    assert first["model"] == "m" and {tool["function"]["name"] for tool in first["tools"]} == {
        *("list_files", "read_file", "submit_score")
    }
    assert server.paths == ["/v1/chat/completions"] * 3


def test_options_go_along_and_the_whole_address_is_taken_too(folder, server):
    server.answers = [submits(1)]
    url = server.url.replace("/score", "/v1/chat/completions/")
    assert assess(folder, judge(server, url=url, options={"temperature": 0})).score == 1.0
    assert server.asked[0]["temperature"] == 0 and server.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("rubric", "words"), [("by the task", "by the task"), ([{"roses": 1}], '"roses": 1')]
)
def test_the_rubric_of_a_task_takes_the_place_of_the_general_one(folder, server, rubric, words):
    server.answers = [submits(1)]
    assert assess(folder, judge(server), {**TASK, "rubric": rubric}).score == 1.0
    question = server.asked[0]["messages"][1]["content"]
    assert words in question and "half for roses" not in question


def test_without_a_rubric_there_is_no_score(folder, server):
    found = assess(folder, judge(server, rubric=None))
    assert found.status == "unresolved" and "no rubric" in found.detail and server.asked == []


@pytest.mark.parametrize(
    "content",
    [
        '{"score": 0.25, "reason": "so"}',
        '```json\n{"score": 0.25, "reason": "so"}\n```',
        'I think {"score": 1}\n</think>\n\n{"score": 0.25, "reason": "so"}',
        [{"type": "text", "text": '{"score": 0.25, "reason": "so"}'}],
    ],
)
def test_a_message_that_is_one_object_is_a_score(folder, server, content):
    server.answers = [says(content)]
    found = assess(folder, judge(server))
    assert (found.score, found.detail) == (0.25, "so")


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (says("I give it a score: 1.0"), "neither a tool call nor one JSON object"),
        (says('I would say {"score": 1}'), "neither a tool call nor one JSON object"),
        (says(None), "neither a tool call nor one JSON object"),
        (says('{"points": 1}'), "not a number"),
        (submits(8), "outside [0, 1]"),
        (submits(-0.5), "outside [0, 1]"),
        (submits("high"), "not a number"),
        (submits(True), "not a number"),
        (says(None, ("submit_score", '{"score": NaN}')), "outside [0, 1]"),
        (says(None, ("submit_score", '{"score": 0.')), "not a number"),
        (says(None, ("submit_score", "[1]")), "not a number"),
        (says(None, ("submit_score", "[" * 50_000)), "not a number"),
    ],
)
def test_what_is_no_score_is_told_to_the_model_and_never_guessed_at(folder, server, first, words):
    server.answers = [first, submits(0.75)]
    assert assess(folder, judge(server)).score == 0.75
    told = server.asked[1]["messages"][-1]
    assert (
        told["role"] == "user" and told["content"].startswith("Not accepted: ") and words in told["content"]
    )
    server.asked.clear()
    server.answers = [first]
    found = assess(folder, judge(server, turns=2))
    assert (found.status, found.score) == ("unresolved", None)
    assert "no score in 2 turns" in found.detail and words in found.detail and "\n" not in found.detail


def test_a_judge_that_never_ends_reading_is_ended_after_its_turns(folder, server):
    server.answers = [says(None, ("list_files", {}))]
    found = assess(folder, judge(server, turns=5))
    assert (found.status, found.detail) == ("unresolved", "the judge gave no score in 5 turns")
    assert len(server.asked) == 5
    assert server.asked[4]["messages"][-1]["content"].endswith("call submit_score now.")


def test_a_judge_that_answers_slowly_is_ended_by_the_deadline(folder, server):
    server.answers = [says(None, ("list_files", {})), server.held(submits(1))]
    found = assess(folder, judge(server), budget_s=0.5)
    assert found.status == "unresolved" and "gave no score within" in found.detail


@pytest.mark.parametrize(
    "path",
    ["link", "folder/secret", "../secret", "/etc/passwd", "poem.txt/../../secret", "pipe", "\ud800", 7, None],
)
def test_nothing_outside_the_workspace_is_read(folder, server, path):
    (folder.path / "secret").write_text("the secret")
    (folder.path / "outside").mkdir()
    (folder.path / "outside/secret").write_text("the secret")
    (folder.workspace / "link").symlink_to(folder.path / "secret")
    (folder.workspace / "folder").symlink_to("../outside")
    os.mkfifo(folder.workspace / "pipe")
    server.answers = [
        says(None, ("list_files", {"path": path}), ("read_file", {"path": path})),
        says(None, ("list_files", {"path": "folder"})),
        submits(1),
    ]
    assert assess(folder, judge(server)).score == 1.0
    assert all(text.startswith("Error: ") for text in results(server))
    assert "the secret" not in json.dumps(server.asked)


def test_a_workspace_that_vanishes_meanwhile_is_not_judged(folder, server):
    def vanish(handler):
        folder.workspace.rename(folder.path / "elsewhere")
        folder.workspace.symlink_to("elsewhere")
        reply(says(None, ("list_files", {})))(handler)

    server.answers = [vanish, submits(0)]
    found = assess(folder, judge(server))
    assert found.status == "unresolved" and "the workspace cannot be opened" in found.detail


def test_faulty_calls_are_answered_and_cost_only_a_turn(folder, server):
    calls = [("read_file", "{bad"), ("delete_all", {}), ("read_file", {"path": "poem.txt", "offset": -1})]
    server.answers = [says(None, *calls), submits(1)]
    assert assess(folder, judge(server)).score == 1.0
    assert [text.split(":")[0] for text in results(server)] == ["Error"] * 3
    sent = server.asked[1]["messages"][2]["tool_calls"][0]["function"]
    assert json.loads(sent["arguments"]) == {}, "an endpoint's template would fail to read it"


def test_what_a_judge_is_shown_is_bounded(folder, server):
    (folder.workspace / "long").write_text("x" * READ + "y" * 100)
    (folder.workspace / "bytes").write_bytes(b"\0\1\2")
    (folder.workspace / "many").mkdir()
    for number in range(LISTED + 10):
        (folder.workspace / f"many/{number:04}").touch()
    reads = [("read_file", {"path": "long", "offset": offset}) for offset in (0, READ, READ + 200)]
    server.answers = [says(None, *reads, ("read_file", {"path": "bytes"}), ("list_files", {})), submits(1)]
    assert assess(folder, judge(server)).score == 1.0
    begin, rest, nothing, binary, listing = results(server)
    assert begin == f"(bytes 0 to {READ} of {READ + 100})\n" + "x" * READ
    assert rest.endswith("y" * 100) and "nothing from byte" in nothing and "binary" in binary
    assert len(listing.splitlines()) <= LISTED + 1 and listing.endswith("list a folder of these")


def test_what_all_calls_give_is_bounded(folder, server):
    (folder.workspace / "long").write_text("x" * READ)
    turn = says(None, *[("read_file", {"path": "long"})] * (CALLS + 4))
    server.answers = [turn, turn, turn, submits(1)]
    assert assess(folder, judge(server)).score == 1.0
    texts = results(server)
    assert len(texts) == 3 * (CALLS + 4)
    assert sum(len(text) for text in texts if not text.startswith("Error")) <= READ_IN_ALL
    assert "at most 16 calls" in texts[CALLS] and "no more can be read" in texts[-CALLS]


@pytest.mark.parametrize("fails", [reply({}, 503), reply({}, 429, Retry_After="0"), dies, hangs_up])
def test_a_busy_moment_of_the_endpoint_does_not_cost_what_was_read(folder, server, fails):
    server.answers = [says(None, ("read_file", {"path": "poem.txt"})), fails, submits(0.5)]
    found = assess(folder, judge(server))
    assert (found.score, found.attempt) == (0.5, 1)
    assert results(server) == ["roses\n"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply({"error": {"message": "context too long"}}, 400), "status 400"),
        (reply({"error": "no"}), "no chat completion"),
        (reply({"choices": []}), "no chat completion"),
        (reply([]), "no chat completion"),
        (reply(says(None, ("x", {}))["choices"][0]), "no chat completion"),
        (reply({"choices": [{"message": {"tool_calls": [{"function": {}}]}}]}), "no chat completion"),
        (reply({"choices": [{"message": {"tool_calls": 7}}]}), "no chat completion"),
        (reply({"choices": [{"message": "score 1"}]}), "no chat completion"),
        (reply(b"<html>"), "not with JSON"),
        (reply(b" " * (2 << 20)), "more than 1,048,576 bytes"),
        (reply(b"gone", 503, Retry_After="3600"), "status 503"),
    ],
)
def test_an_endpoint_that_answers_nonsense_leaves_the_score_unresolved(folder, server, answer, words):
    server.answers = [answer]
    found = assess(folder, judge(server))
    assert (found.status, found.score) == ("unresolved", None)
    assert words in found.detail and "\n" not in found.detail


def test_a_failed_attempt_begins_anew_on_the_same_workspace(folder, server):
    server.answers = [says(None, ("list_files", {})), reply(b"?"), submits(0.5)]
    found = assess(folder, judge(server), attempts=2)
    assert (found.score, found.attempt) == (0.5, 2)
    assert len(server.asked[2]["messages"]) == 2


def echoes_the_key(handler):
    given = handler.headers["Authorization"]
    reply(says(f"Your header was {given}"))(handler)


def refuses_with_the_key(handler):
    reply({"error": f"bad header {handler.headers['Authorization']}"}, 400)(handler)


def submits_the_key(handler):
    reply(submits(1, f"they said {handler.headers['Authorization']}"))(handler)


def test_the_key_goes_to_the_endpoint_and_nowhere_else(folder, server, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    caplog.set_level(logging.DEBUG)
    settings = judge(server, key_env="JUDGE_KEY", turns=1)
    told = []
    for answer in (echoes_the_key, refuses_with_the_key, submits_the_key, hangs_up):
        server.answers = [answer]
        told.append(assess(folder, settings, budget_s=5.0))
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert [each.status for each in told] == ["unresolved", "unresolved", "valid", "unresolved"]
    assert "[key]" in told[1].detail and "[key]" in told[2].detail
    values = dict.fromkeys(("workspace", "home", "base_url", "key", "task_file", "prompt", "name"), "")
    harness = Harness(("true",), {"OWN": "x"}).render_env(values)
    left = [path.read_text() for path in folder.path.rglob("*") if path.is_file()]
    assert KEY not in repr((told, settings, harness, left, server.asked)) + caplog.text
    assert "JUDGE_KEY" not in harness


def test_a_key_of_one_letter_does_not_spoil_answers(folder, server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "0")
    server.answers = [submits(0.05)]
    assert assess(folder, judge(server, key_env="JUDGE_KEY")).score == 0.05


def test_a_key_that_is_missing_refused_or_no_key_is_told_at_the_start(folder, server, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    settings = judge(server, key_env="JUDGE_KEY")

    def refusal():
        with pytest.raises(EvaluatorNotFound) as refused:
            assess(folder, settings)
        assert "\n" not in str(refused.value) and KEY not in str(refused.value)
        return str(refused.value)

    assert "JUDGE_KEY is not set" in refusal()
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\u2019")
    assert "no header can hold" in refusal()
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.found = 401
    assert "refuses the key in JUDGE_KEY" in refusal()
    settings = judge(server)
    assert "set key_env" in refusal()
    server.found = 404  # an endpoint that lists no models
    server.answers = [submits(1)]
    assert assess(folder, settings).score == 1.0
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "localhost:8000"},
        {"url": "http://user:pass@host"},
        {"model": ""},
        {"key_env": "sk-123"},
        {"turns": 0},
        {"options": {"messages": []}},
        {"options": {"temperature": float("nan")}},
        {"rubrics": "x"},
    ],
)
def test_a_judge_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValidationError):
        JudgeSettings(**{"url": "http://host/v1", "model": "m", **wrong})
