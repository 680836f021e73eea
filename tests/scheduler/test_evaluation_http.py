"""An HTTP service as evaluator, against a real server: whatever it does, there is a score or a reason, and no zero."""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import pytest
from gyre_scheduler.errors import EvaluatorNotFound
from gyre_scheduler.evaluation import Evaluator
from gyre_scheduler.executions import ExecutionFolder

sys.path.insert(0, str(Path(__file__).parent))
from evaluation_server import dies, endless, hangs_up, reply, serving

TASK = {"id": "t", "prompt": "p", "expect": {"secret": 1}}


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    return ExecutionFolder.create(tmp_path / "7-3", TASK)


def assess(folder, url, budget_s=60.0, **options):
    async def once():
        async with Evaluator(url, **options) as evaluator:
            return await evaluator.assess(folder, TASK, time.monotonic() + budget_s)

    return asyncio.run(once())


def test_a_service_gets_the_whole_task_and_gives_a_score(folder, server):
    server.answers = [{"score": 0.5, "detail": "half", "artifact": "image:1"}]
    found = assess(folder, server.url)
    assert (found.status, found.score, found.detail, found.artifact, found.attempt) == (
        *("valid", 0.5, "half"),
        *("image:1", 1),
    )
    workspace = str(folder.workspace)
    assert server.asked == [{"task": TASK, "workspace": workspace, "execution": "7-3", "attempt": 1}]
    assert server.paths == ["/score"]


def test_zero_is_a_score_of_the_workspace_as_it_is_named(folder, server):
    server.answers = [{"score": 0}]
    found = assess(folder, server.url)
    assert (found.status, found.score) == ("valid", 0.0) and found.artifact.startswith("sha256:")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply({"score": 1}, 500), "status 500"),
        (reply(b"no such\nworkspace", 422), "status 422: 'no such\\nworkspace'"),
        (reply({"score": 1}, 302, Location="/elsewhere"), "status 302"),
        (reply(b"<html>"), "not with JSON but with '<html>'"),
        (reply(b""), "not with JSON"),
        (reply(b"\xff\xfe{"), "not with JSON"),
        (reply(b"[" * 100_000), "not with JSON"),
        (reply([1]), "not an object"),
        (reply({"points": 1}), "not an object"),
        (reply(b'{"score": NaN}'), "outside [0, 1]"),
        (reply(b'{"score": 1e999}'), "outside [0, 1]"),
        (reply({"score": 1.01}), "outside [0, 1]"),
        (reply({"score": "1"}), "not a number"),
        (reply({"score": True}), "not a number"),
        (reply({"score": None}), "not a number"),
        (reply(b'{"score": 1, "detail": "' + b"x" * (2 << 20) + b'"}'), "more than 1,048,576 bytes"),
        (endless, "more than 1,048,576 bytes"),
        (dies, "gave no answer"),
        (hangs_up, "gave no answer"),
    ],
)
def test_an_answer_that_is_no_score_is_unresolved_with_one_line(folder, server, answer, words):
    server.answers = [answer]
    found = assess(folder, server.url, attempts=1)
    assert (found.status, found.score, found.attempt) == ("unresolved", None, 1)
    assert words in found.detail and "\n" not in found.detail


def test_a_slow_service_is_asked_again_about_the_same_workspace(folder, server):
    server.answers = [server.held({"score": 0}), {"score": 0.25}]
    late = []
    found = assess(folder, server.url, timeout_s=1.5, late=lambda *told: late.append(told))
    assert (found.score, found.attempt) == (0.25, 2)
    assert [asked["attempt"] for asked in server.asked] == [1, 2]
    assert len({asked["workspace"] for asked in server.asked}) == 1
    assert late == []


@pytest.mark.parametrize("refuses", [reply({}, 503), reply({}, 429, Retry_After="0"), dies, reply(b"?")])
def test_a_service_that_fails_is_asked_again(folder, server, refuses):
    server.answers = [refuses, {"score": 0.25}]
    found = assess(folder, server.url)
    assert (found.score, found.attempt) == (0.25, 2)


def test_a_service_that_wants_more_time_than_there_is_is_not_asked_again(folder, server):
    server.answers = [reply(b"busy", 503, Retry_After="3600")]
    found = assess(folder, server.url, attempts=5)
    assert (found.status, found.attempt, len(server.asked)) == ("unresolved", 1, 1)
    assert "status 503: 'busy'" in found.detail


def test_a_service_that_vanishes_leaves_the_score_unresolved(folder):
    async def vanish():
        with serving() as server:
            evaluator = await Evaluator(server.url).__aenter__()
        try:
            return await evaluator.assess(folder, TASK, time.monotonic() + 60)
        finally:
            await evaluator.__aexit__()

    found = asyncio.run(vanish())
    assert (found.status, found.attempt) == ("unresolved", 2)
    assert "gave no answer" in found.detail and "\n" not in found.detail


def test_an_answer_after_the_deadline_is_told_and_changes_nothing(folder, server):
    server.answers = [server.held({"score": 1, "detail": "fine", "artifact": "a"})]

    async def late():
        told = asyncio.Queue()
        async with Evaluator(
            server.url, timeout_s=60, attempts=3, late=lambda *late: told.put_nowait(late)
        ) as evaluator:
            found = await evaluator.assess(folder, TASK, time.monotonic() + 0.3)
            server.release.set()
            async with asyncio.timeout(60):
                return found, await told.get()

    found, (execution, came) = asyncio.run(late())
    assert (found.status, found.attempt) == ("unresolved", 1)
    assert (execution, came.status, came.score, came.artifact) == ("7-3", "valid", 1.0, "a")
    assert came.detail == "came too late and counts for nothing; fine"


def test_a_service_that_is_waited_for_does_not_hold_up_the_end(folder, server):
    server.answers = [server.held({"score": 1})]
    late = []
    found = assess(folder, server.url, budget_s=0.2, late=lambda *told: late.append(told))
    assert found.status == "unresolved" and late == []


def test_a_service_nearby_is_not_asked_through_the_proxy_of_the_environment(folder, server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert assess(folder, server.url).score == 1.0


def test_a_service_that_nobody_runs_is_refused_at_the_start(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: it refuses
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        with pytest.raises(EvaluatorNotFound) as refused:
            assess(folder, url)
    assert url in str(refused.value) and "cannot be reached" in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["http://", "https:///path", "http://host:port/", "http://host:0/", "http://h h/", "http://u:p@host/"],
)
def test_a_url_that_cannot_be_is_refused_and_never_shows_a_password(url):
    with pytest.raises(EvaluatorNotFound) as refused:
        Evaluator(url)
    assert "\n" not in str(refused.value) and "u:p" not in str(refused.value)


def test_the_environment_of_the_driver_does_not_reach_a_service(folder, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-driver")
    assess(folder, server.url)
    assert os.environ["OPENAI_API_KEY"] not in repr(server.headers) + repr(server.asked)
