"""What operators see and set: metrics, health, the proxy's own log, limits, frozen engines, what survives."""

import asyncio
import http.client
import io
import json
import logging
import re
import socket
import threading
import time

import httpx
import orjson
import pytest
from gyre_proxy import service
from gyre_proxy.errors import SettingsError
from gyre_proxy.gateway import Gateway
from gyre_proxy.heads import HEAD_LIMIT
from gyre_proxy.logs import JsonFormatter
from gyre_proxy.server import Application
from gyre_proxy.settings import Settings
from gyre_trajtree import Call, Execution, RunLogError, RunLogWriter, read_run_log
from prometheus_client.parser import text_string_to_metric_families
from proxy_stage import DEADLINE_S, FakeEngine, wait_until

TEXT = "The quick brown fox jumps over the lazy dog."
USER = {"role": "user", "content": "go"}
TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}


def chat(*messages, **more):
    return {"model": "m", "messages": list(messages or (USER,)), **more}


def said(answer: httpx.Response) -> dict:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def measured(proxy) -> dict:
    """{(sample name, sorted label values): value} of /metrics."""
    answer = httpx.get(f"{proxy.url}/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name.removeprefix("gyre_proxy_"), *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


class Background(threading.Thread):
    """Asks once in a thread of its own."""

    def __init__(self, proxy, body=None, execution="e"):
        super().__init__()
        self._ask = lambda: proxy.post("chat/completions", body or chat(), execution)
        self.answered: httpx.Response | None = None
        self.start()

    def run(self):
        self.answered = self._ask()

    def answer(self) -> httpx.Response:
        self.join(DEADLINE_S)
        return self.answered


class Freezable(FakeEngine):
    """An engine that can stop answering anything while its connections stay open, and counts pings."""

    frozen, pings = False, 0

    async def _app(self, scope, receive, send):
        while self.frozen:
            await asyncio.sleep(0.01)
        self.pings += scope["path"] == "/ping"
        await super()._app(scope, receive, send)


@pytest.fixture
def freezable(stage, codec):
    def build(script, version=0):
        engine = Freezable(codec, script, version)
        stage.do(engine.start())
        stage._stops.append(engine.stop)
        return engine

    return build


# --- what is seen


def test_metrics_count_calls_tokens_and_how_they_attach(scene):
    proxy, _ = scene([TEXT])
    first = said(proxy.post("chat/completions", chat()))
    proxy.post("chat/completions", chat(USER, first, USER))
    proxy.post("chat/completions", chat(USER, first, {"role": "user", "content": "again"}))
    proxy.post("chat/completions", {"model": 5, "messages": []})
    proxy.post("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "stream": True}, "other")
    calls, seen = proxy.calls(), measured(proxy)
    assert seen["calls_total", "chat/completions", "stop"] == 3
    assert seen["calls_total", "length", "messages"] == 1
    assert seen["refused_total", "400"] == 1
    assert seen["tokens_total", "encoded"] == sum(len(call.input_ids) for call in calls)
    assert seen["tokens_total", "sampled"] == sum(len(call.output_ids) for call in calls)
    path = len(calls[0].input_ids) + len(calls[0].output_ids)
    assert seen["tokens_total", "reused"] == 2 * path
    assert [seen["contexts_total", cause] for cause in ("first", "extended", "branched")] == [2, 1, 1]
    for stage in ("prepare", "queue", "generate", "record"):
        assert seen["stage_seconds_count", stage] == 4
    assert seen["stage_seconds_count", "first_token"] == 1
    assert (seen["executions_open",], seen["calls_under_way",]) == (2, 0)


@pytest.mark.parametrize(
    "change, cause",
    [
        (lambda body: body | {"tools": [TOOL]}, "tools"),
        (
            lambda body: body | {"messages": [{"role": "system", "content": "y"}, *body["messages"][1:]]},
            "system",
        ),
        (
            lambda body: body | {"messages": [*body["messages"][:1], {"role": "user", "content": "z"}]},
            "history",
        ),
    ],
)
def test_a_new_root_says_why_it_is_one(scene, change, cause):
    proxy, _ = scene([TEXT])
    messages = [{"role": "system", "content": "x"}, USER]
    message = said(proxy.post("chat/completions", chat(*messages)))
    proxy.post("chat/completions", change(chat(*messages, message, USER)))
    assert [call.parent for call in proxy.calls()] == [None, None]
    assert measured(proxy)["contexts_total", cause] == 1


def test_retries_that_join_are_counted_and_waiting_calls_seen(scene):
    proxy, engine = scene([TEXT])
    engine.hold_after = 2
    both = [Background(proxy)]
    engine.wait_held()
    both.append(Background(proxy))
    wait_until(lambda: measured(proxy).get(("joined_total",)) == 1)
    assert measured(proxy)["engine_in_flight", engine.url] == 1
    engine.hold_after = None
    engine._released.set()
    assert len({said(each.answer())["content"] for each in both}) == 1 and len(proxy.calls()) == 1


def test_health_counts_engines_and_calls(scene):
    proxy, engine = scene([TEXT])
    health = httpx.get(f"{proxy.url}/health").json()
    assert health == {"status": "ok", "engines_admitting": 1, "executions": 0, "calls_under_way": 0}
    proxy.admin("PUT", "engines", {"engines": [{"url": engine.url, "admitting": False}]})
    assert httpx.get(f"{proxy.url}/health").json()["engines_admitting"] == 0


def test_health_does_not_count_an_engine_that_lost_its_last_call(stage, codec, tokenizer_dir, tmp_path):
    engine = stage.engine(codec, [TEXT])
    settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", "engine_wait_s": 0.3}
    proxy = stage.proxy(engines=("http://127.0.0.1:9", engine.url), **settings)
    for number in range(4):  # each execution goes to the engine with fewer of them
        said(proxy.post("chat/completions", chat(), execution=f"e{number}"))
    assert httpx.get(f"{proxy.url}/health").json()["engines_admitting"] == 1
    assert measured(proxy)["engine_admitting", "http://127.0.0.1:9"] == 0.0


@pytest.fixture
def journal():
    """Lines of the proxy's own log."""
    text, logger = io.StringIO(), logging.getLogger("gyre_proxy")
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [orjson.loads(line) for line in text.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_log_names_execution_and_call(scene, journal):
    proxy, _ = scene([TEXT])
    proxy.post("chat/completions", chat())
    (call,) = proxy.calls()
    wait_until(journal)
    (line,) = journal()
    assert (line["event"], line["level"], line["execution"], line["call"]) == (
        "call ended",
        "info",
        "e",
        call.id,
    )
    assert line["output_tokens"] == len(call.output_ids) and line["protocol"] == "chat/completions"


def test_the_log_says_why_an_engine_was_lost(scene, journal):
    proxy, engine = scene([TEXT], engine_wait_s=0.2)
    engine.refuse = 500
    assert proxy.post("chat/completions", chat()).status_code == 503
    events = [line["event"] for line in journal()]
    assert events[0] == "engine lost" and events[-1] == "call failed" and "500" in journal()[0]["why"]


# --- limits


def test_an_engine_holds_no_more_calls_than_its_capacity(scene):
    proxy, engine = scene([TEXT], engine_capacity=2)
    engine.hold_after = 1
    clients = [Background(proxy, execution=f"e{i}") for i in range(5)]
    wait_until(lambda: measured(proxy)["calls_waiting",] == 3)
    assert len(engine.requests) == 2
    engine.hold_after = None
    engine._released.set()
    for client in clients:
        assert said(client.answer())["content"] == TEXT
    assert len(proxy.calls()) == 5


def test_more_calls_than_allowed_get_a_retryable_error(scene):
    proxy, engine = scene([TEXT], max_calls=1)
    engine.hold_after = 1
    client = Background(proxy)
    engine.wait_held()
    for path, body in (
        ("chat/completions", chat()),
        ("messages", {"model": "m", "max_tokens": 5, "messages": [USER]}),
        ("responses", {"model": "m", "input": "hi"}),
    ):
        refused = proxy.post(path, body, "other")
        assert refused.status_code == 503 and refused.headers["retry-after"] and "--max-calls" in refused.text
    engine.hold_after = None
    engine._released.set()
    assert said(client.answer())["content"] == TEXT
    assert proxy.post("chat/completions", chat(), "other").status_code == 200


def test_more_executions_than_allowed_are_refused_until_one_is_closed(scene):
    proxy, _ = scene([TEXT], max_executions=1)
    assert proxy.post("chat/completions", chat(), "one").status_code == 200
    refused = proxy.post("chat/completions", chat(), "two")
    assert refused.status_code == 503 and "--max-executions" in refused.text
    assert proxy.post("chat/completions", chat(USER, USER), "one").status_code == 200
    proxy.admin("POST", "executions/one/close", {})
    assert proxy.post("chat/completions", chat(), "two").status_code == 200


def test_a_body_that_does_not_arrive_gets_408(scene):
    proxy, _ = scene([TEXT], body_timeout_s=0.2)
    with connected(proxy) as slow:
        slow.sendall(b"POST /x/e/v1/messages HTTP/1.1\r\nhost: p\r\ncontent-length: 100\r\n\r\n{")
        with slow.makefile() as answer:
            head = [line.strip() for line in iter(answer.readline, "\n")]
            size = next(int(line.split()[1]) for line in head if line.startswith("content-length"))
            text = answer.read(size)
    assert head[0].startswith("HTTP/1.1 408") and "did not arrive within 0.2 s" in text
    assert not proxy.calls()


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: p\r\n\r\n"])
@pytest.mark.parametrize(
    "head", [b"POST /x/e/v1/mess", b"POST /x/e/v1/messages HTTP/1.1\r\nhost: p\r\nx-a: "]
)
def test_a_head_that_does_not_arrive_ends_its_connection(scene, head, before):
    proxy, _ = scene([TEXT], body_timeout_s=0.2)
    with connected(proxy) as slow:
        slow.sendall(before + head)
        answers = b"".join(iter(lambda: slow.recv(4096), b""))
    assert answers.count(b"HTTP/1.1 200") == bool(before) and answers.count(b"HTTP/1.1 408") == 1


def test_a_head_without_end_ends_its_connection(scene):
    proxy, _ = scene([TEXT])
    with connected(proxy) as greedy:
        greedy.sendall(b"POST /x/e/v1/messages HTTP/1.1\r\nhost: p\r\nx-a: " + b"a" * (HEAD_LIMIT + 2**19))
        assert greedy.recv(4096).startswith(b"HTTP/1.1 431")
    assert proxy.post("chat/completions", chat({"role": "user", "content": "go"})).status_code == 200


def test_a_connection_that_rests_between_requests_stays(scene):
    """Its next request may come long after the time that a head may take."""
    proxy, _ = scene([TEXT], body_timeout_s=0.05)
    resting = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=DEADLINE_S)
    resting.connect()
    first = resting.sock
    for _ in range(3):
        with connected(proxy) as slow:
            slow.sendall(b"GET /he")
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        resting.request("GET", "/health")
        assert resting.getresponse().read() and resting.sock is first
    resting.close()


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nhost: p\r\n\r\n", b"\r\n" * 3])
def test_a_connection_that_sends_nothing_more_is_closed(scene, monkeypatch, sent):
    monkeypatch.setattr(service, "KEEP_ALIVE_S", 0.2)
    proxy, _ = scene([TEXT])
    with connected(proxy) as silent:
        if sent:
            silent.sendall(sent)
        answer = silent.recv(4096)
        if answer:  # then blank lines, which are no request
            silent.sendall(b"\r\n")
            answer += b"".join(iter(lambda: silent.recv(4096), b""))
    assert answer.count(b"HTTP/1.1") == sent.count(b"GET")


def test_a_trailer_is_no_header(scene):
    """The key of a head holds, whatever follows the body."""
    proxy, _ = scene([TEXT], max_executions=1)
    said(httpx.post(f"{proxy.url}/v1/chat/completions", json=chat(), headers={"x-api-key": "one"}))
    body = json.dumps(chat()).encode()
    with connected(proxy) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: p\r\nx-api-key: one\r\nconnection: close\r\n"
            b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-api-key: two\r\n\r\n" % (len(body), body)
        )
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200") and {call.execution for call in proxy.calls()} == {"one"}


def test_trailers_without_end_end_their_connection(scene):
    proxy, _ = scene([TEXT])
    with connected(proxy) as greedy:
        greedy.sendall(b"POST /nope HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                greedy.sendall(b"x-a: b\r\n" * 2**14)


def test_requests_that_wait_behind_a_long_one_do_not_cut_it(scene, stage):
    """Their heads are here, but not read yet."""
    proxy, engine = scene([TEXT], body_timeout_s=0.1)
    engine.hold_after = 3
    body, health = json.dumps(chat()).encode(), b"GET /health HTTP/1.1\r\nhost: p\r\n\r\n"
    with connected(proxy) as client:
        head = b"POST /x/e/v1/chat/completions HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        engine.wait_held()
        client.sendall(health + health[:10])
        with connected(proxy) as other, pytest.raises(TimeoutError):
            other.settimeout(0.5)
            other.recv(1)
        client.sendall(health[10:])
        stage.loop.call_soon_threadsafe(engine._released.set)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 3:
            assert (piece := client.recv(4096)), answers
            answers += piece


def connected(proxy) -> socket.socket:
    host, port = proxy.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def test_calls_under_way_may_end_when_the_proxy_stops(stage, codec, tokenizer_dir, tmp_path):
    engine = stage.engine(codec, [TEXT])
    settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", "engines": (engine.url,)}
    proxy = stage.proxy(grace_s=DEADLINE_S, **settings)
    engine.hold_after = 3
    client = Background(proxy)
    engine.wait_held()
    stopping = threading.Thread(target=lambda: stage.do(stage._stops.pop()()))
    stopping.start()
    wait_until(lambda: _refuses(proxy))
    stage.loop.call_soon_threadsafe(engine._released.set)
    assert said(client.answer())["content"] == TEXT
    stopping.join(DEADLINE_S)
    (call,) = proxy.calls()
    assert call.finish == "stop"


def _refuses(proxy) -> bool:
    try:
        answer = proxy.post("chat/completions", chat(), "late")
    except httpx.TransportError:
        return True
    return answer.status_code == 503


# --- engines


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_a_frozen_engine_go_on_elsewhere(
    stage, freezable, codec, tokenizer_dir, tmp_path, stream, monkeypatch
):
    monkeypatch.setattr("gyre_proxy.engine_client.PING_S", 0.3)
    frozen, other = freezable([TEXT], 1), stage.engine(codec, [TEXT], 1)
    proxy = stage.proxy(tokenizer=tokenizer_dir, record=tmp_path / "run.jsonl", silence_s=0.1)
    proxy.admin("PUT", "engines", {"engines": [{"url": e.url, "version": 1} for e in (frozen, other)]})
    proxy.admin("POST", "executions", {"id": "e", "engine": frozen.url})
    frozen.hold_after = 4
    client = Background(proxy, chat(stream=stream))
    frozen.wait_held()
    frozen.frozen = True
    answer = client.answer()
    frozen.frozen = False
    assert answer.status_code == 200
    (call,) = proxy.calls()
    assert codec.decode(call.output_ids.tolist()) == TEXT and call.engine == other.url
    assert measured(proxy)["continued_total", "frozen"] == 1


def test_an_engine_that_is_silent_but_answers_a_ping_keeps_its_calls(
    stage, freezable, tokenizer_dir, tmp_path
):
    engine = freezable([TEXT])
    settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", "engines": (engine.url,)}
    proxy = stage.proxy(silence_s=0.05, **settings)
    engine.hold_after = 2
    client = Background(proxy)
    engine.wait_held()
    pinged = engine.pings
    wait_until(lambda: engine.pings >= pinged + 2)
    engine._released.set()
    assert said(client.answer())["content"] == TEXT
    assert len(engine.requests) == 1


def test_a_call_that_breaks_every_engine_is_given_up(scene, monkeypatch):
    monkeypatch.setattr("gyre_proxy.router.REST_S", (0.0,))
    proxy, engine = scene([TEXT])
    engine.die_after = 0
    refused = proxy.post("chat/completions", chat())
    assert refused.status_code == 503 and "lost 5 engines in a row" in refused.text
    assert len(engine.requests) == 5
    engine.die_after = None
    assert said(proxy.post("chat/completions", chat()))["content"] == TEXT
    first, second = proxy.calls()
    assert first.finish == "error" and second.attempt_of == first.id


def test_without_an_engine_a_call_ends_after_its_patience(scene):
    proxy, engine = scene([TEXT], engine_wait_s=0.3)
    proxy.admin("PUT", "engines", {"engines": [{"url": engine.url, "admitting": False}]})
    refused = proxy.post("chat/completions", chat())
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert "no engine in 0.3 s: waited for an engine that admits calls" in refused.text


def test_the_name_that_an_engine_gives_its_weights_keeps_its_cache_apart(
    stage, codec, tokenizer_dir, tmp_path
):
    engine = stage.engine(codec, [TEXT], "default")
    settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", "engines": (engine.url,)}
    proxy = stage.proxy(**settings)
    message = said(proxy.post("chat/completions", chat()))
    engine.version = "next"
    second = said(proxy.post("chat/completions", chat(USER, message, USER)))
    proxy.post("chat/completions", chat(USER, message, USER, second, USER))
    assert [request["extra_key"] for request in engine.requests] == ["default", "default", "next"]
    assert all(call.versions == [] for call in proxy.calls())


@pytest.mark.parametrize("first", [True, False], ids=["known before", "learnt on the way"])
def test_a_prompt_longer_than_the_engine_takes_is_too_long(stage, codec, tokenizer_dir, tmp_path, first):
    """The tokenizer's directory knows nothing of an engine that was started with a smaller context."""
    engine = stage.engine(codec, [TEXT])
    if first:
        engine.context = 60
    settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", "engines": (engine.url,)}
    proxy = stage.proxy(**settings)
    wait_until(lambda: proxy.admin("GET", "status")["engines"][engine.url]["asked"])
    long = {"role": "user", "content": "word " * 60}
    if not first:
        engine.context = 60
        assert proxy.post("chat/completions", chat(long)).status_code == 400
        proxy.admin("PUT", "engines", {"engines": []})
        proxy.admin("PUT", "engines", {"engines": [{"url": engine.url}]})
        wait_until(lambda: proxy.admin("GET", "status")["engines"][engine.url]["asked"])
    answer = proxy.post("chat/completions", chat(long))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "53 tokens" in answer.json()["error"]["message"]
    assert proxy.post("chat/completions", chat()).status_code == 200


def test_a_told_version_stays_whatever_the_engine_says(scene):
    proxy, engine = scene([TEXT])
    proxy.admin("PUT", "engines", {"engines": [{"url": engine.url, "version": 7}]})
    for _ in range(2):
        proxy.post("chat/completions", chat())
    assert [request["extra_key"] for request in engine.requests] == ["7", "7"]


# --- what survives


def test_a_closed_execution_stays_closed_after_a_restart(stage, codec, tokenizer_dir, tmp_path):
    engine = stage.engine(codec, [TEXT])
    settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", "engines": (engine.url,)}
    proxy = stage.proxy(**settings)
    proxy.admin("POST", "executions", {"id": "e", "group": "g", "task": "t", "deadline": time.time() + 100})
    proxy.post("chat/completions", chat())
    proxy.admin("POST", "executions/e/close", {"termination": "completed"})
    stage.do(stage._stops.pop()())
    proxy = stage.proxy(**settings)
    assert proxy.post("chat/completions", chat()).status_code == 410
    opened, closed = (record for record in read_run_log(proxy.record) if isinstance(record, Execution))
    assert (opened.state, opened.group, opened.task) == ("opened", "g", "t") and opened.deadline > time.time()
    assert (closed.state, closed.termination) == ("closed", "completed")


def test_a_driver_that_writes_these_lines_itself_says_so(scene):
    proxy, _ = scene([TEXT])
    proxy.admin("POST", "executions", {"id": "e", "record": False})
    proxy.admin("POST", "executions/e/close", {"record": False})
    assert not [record for record in read_run_log(proxy.record) if isinstance(record, Execution)]


@pytest.mark.parametrize(
    "path, body", [("executions", {"id": "e", "group": 5}), ("executions/e/close", {"termination": "gone"})]
)
def test_a_state_that_no_run_log_could_hold_is_refused(scene, path, body):
    proxy, _ = scene([TEXT])
    answer = httpx.post(
        f"{proxy.url}/admin/{path}", json=body, headers={"authorization": "Bearer admin-secret"}
    )
    assert answer.status_code == 400 and next(k for k in body if k != "id") in answer.text


def test_many_answers_share_a_flush_and_none_leaves_before_it(scene, monkeypatch):
    """While the disk flushes, calls gather; all of them leave with the next flush."""
    begun, go, flushes = threading.Event(), threading.Event(), []

    def sync(log):
        flushes.append(len(list(read_run_log(log.path))) - 1)
        begun.set()
        assert go.wait(DEADLINE_S)

    monkeypatch.setattr(RunLogWriter, "sync", sync)
    proxy, _ = scene([TEXT], flush="disk")
    first = Background(proxy, execution="first")
    assert begun.wait(DEADLINE_S)
    rest = [Background(proxy, execution=f"e{i}") for i in range(8)]
    wait_until(lambda: len(proxy.calls()) == 9)
    assert first.answered is None and all(client.answered is None for client in rest)
    go.set()
    for client in (first, *rest):
        assert said(client.answer())["content"] == TEXT
    assert flushes == [1, 9]


def test_an_answer_that_the_disk_refuses_is_withheld(scene, monkeypatch):
    def sync(log):
        raise RunLogError("the disk is gone")

    monkeypatch.setattr(RunLogWriter, "sync", sync)
    proxy, _ = scene([TEXT], flush="disk")
    refused = proxy.post("chat/completions", chat())
    assert (
        refused.status_code == 503 and "the disk is gone" in refused.text and refused.headers["retry-after"]
    )


# --- streams


def test_a_stream_begins_with_the_first_token_even_when_nothing_of_it_may_be_shown(scene):
    """A tool call is shown whole, at its end; the client's clock is stopped before that."""
    call = '<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls"}}\n</tool_call>'
    proxy, engine = scene([call], keepalive_s=1000.0)
    engine.hold_after = 3
    url = f"{proxy.url}/x/e/v1/messages"
    tools = [{"name": "shell", "input_schema": {"type": "object"}}]
    body = {"model": "m", "max_tokens": 99, "messages": [USER], "stream": True, "tools": tools}
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        engine._released.set()
        assert any("tool_use" in line for line in lines)


def test_settings_take_paths_as_text(tokenizer_dir, tmp_path):
    given = Settings(tokenizer=str(tokenizer_dir), record=str(tmp_path / "r"), engines=("http://h:1",))
    assert (given.tokenizer, given.record) == (tokenizer_dir, tmp_path / "r")


def test_settings_that_cannot_work_are_refused(tokenizer_dir, tmp_path):
    fine = {"tokenizer": tokenizer_dir, "record": tmp_path / "r", "engines": ("http://a",)}
    for wrong in (
        {"flush": "never"},
        {"grace_s": -1},
        {"max_calls": 0},
        {"silence_s": 0},
        {"engine_capacity": 0},
    ):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            Settings(**fine, **wrong)


def test_the_formatter_writes_json_whatever_the_fields_hold():
    record = logging.LogRecord("gyre_proxy", logging.INFO, "f", 1, "what %s", ("now",), None)
    record.fields = {"engine": object(), "calls": ["a"]}
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["calls"]) == ("what now", ["a"])


def test_a_client_that_stops_reading_is_let_go(codec, tokenizer_dir, tmp_path):
    """Its call is ended like that of one that left; what it sampled is in the log."""
    body = orjson.dumps(chat(stream=True))
    scope = {"type": "http", "method": "POST", "path": "/x/e/v1/chat/completions", "headers": []}
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return incoming.pop() if incoming else await asyncio.Event().wait()

    async def send(message):
        await asyncio.Event().wait()

    async def main():
        engine = FakeEngine(codec, [TEXT])
        engine.hold_after = 3
        await engine.start()
        settings = Settings(
            tokenizer=tokenizer_dir, record=tmp_path / "run.jsonl", engines=(engine.url,), body_timeout_s=0.2
        )
        gateway = Gateway(settings, codec, RunLogWriter(settings.record))
        async with asyncio.timeout(DEADLINE_S):
            await Application(gateway, b"secret", "http://p")(scope, receive, send)
            while gateway.under_way:
                await asyncio.sleep(0.01)
            await gateway.close()
            await engine.stop()

    asyncio.run(main())
    (call,) = (record for record in read_run_log(tmp_path / "run.jsonl") if isinstance(record, Call))
    assert (call.finish, len(call.output_ids)) == ("abort", 3)


def test_answers_name_their_call_where_sdks_look_for_it(scene):
    proxy, _ = scene([TEXT])
    for stream in (False, True):
        answer = proxy.post("chat/completions", chat({"role": "user", "content": str(stream)}, stream=stream))
        call = proxy.calls()[-1]
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == call.id


def test_tool_calls_that_cannot_be_read_are_counted(scene):
    proxy, _ = scene(["<tool_call>\n{broken\n</tool_call> and <tool_call>"])
    message = said(proxy.post("chat/completions", chat(tools=[TOOL])))
    assert message["content"].startswith("<tool_call>\n{broken")
    assert measured(proxy)["parse_failures_total",] == 2


# --- engines that are not as they should be


class Odd(FakeEngine):
    """An engine whose answers are changed, and which may take its time for each token."""

    pace_s = 0.0

    @staticmethod
    def change(payload):
        return payload

    def _payload(self, *arguments):
        return self.change(super()._payload(*arguments))

    async def _turn(self, call):
        await asyncio.sleep(self.pace_s)
        await super()._turn(call)


@pytest.fixture
def odd(stage, codec, tokenizer_dir, tmp_path):
    """(proxy, odd engine) or (proxy, odd engine, sound engine)."""

    def build(script, sound=False, **settings):
        engines = [Odd(codec, script)]
        stage.do(engines[0].start())
        stage._stops.append(engines[0].stop)
        if sound:
            engines.append(stage.engine(codec, script))
        settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", **settings}
        proxy = stage.proxy(engines=(engines[0].url,), **settings)
        if sound:
            proxy.admin("POST", "executions", {"id": "e"})
            proxy.admin("PUT", "engines", {"engines": [{"url": e.url} for e in engines]})
        return proxy, *engines

    return build


@pytest.mark.parametrize(
    "path, sign",
    [
        ("messages", "event: ping"),
        ("chat/completions", '"delta":{},"logprobs":null,"finish_reason":null'),
        ("responses", "event: response.in_progress"),
    ],
)
def test_a_tool_call_that_grows_unseen_gives_signs_of_life(odd, path, sign):
    call = '<tool_call>\n{"name": "shell", "arguments": {"cmd": "' + "x " * 60 + '"}}\n</tool_call>'
    proxy, engine = odd([call], keepalive_s=0.1)
    engine.pace_s = 0.02
    bodies = {
        "messages": {
            "max_tokens": 999,
            "messages": [USER],
            "tools": [{"name": "shell", "input_schema": {"type": "object"}}],
        },
        "chat/completions": {"messages": [USER], "tools": [TOOL]},
        "responses": {"input": "go", "tools": [{"type": "function", "name": "shell"}]},
    }
    text = proxy.post(path, {"model": "m", "stream": True, **bodies[path]}).text
    assert text.count(sign) >= 3 and "x x x" in text


GARBAGE = {
    "finish is text": {"meta_info": {"finish_reason": "stop"}},
    "finish is unknown": {"meta_info": {"finish_reason": {"type": "eos"}}},
    "finish has no type": {"meta_info": {"finish_reason": {"kind": "stop"}}},
    "log-probs of text": {"meta_info": {"output_token_logprobs": [["x", 1, None]], "completion_tokens": 1}},
    "ids are text": {"output_ids": ["1", "2"], "meta_info": {"completion_tokens": 2}},
    "ids are a number": {"output_ids": 5},
    "ids below 0": {"output_ids": [-1], "meta_info": {"completion_tokens": 1}},
    "ids outside the vocabulary": {"output_ids": [10**6], "meta_info": {"completion_tokens": 1}},
    "ids are huge": {"output_ids": [2**40], "meta_info": {"completion_tokens": 1}},
    "spans without ends": {"meta_info": {"weight_versions": [{"version": "1"}]}},
    "spans that overlap": {
        "meta_info": {
            "weight_versions": [
                {"version": "1", "start": 0, "end": 3},
                {"version": "2", "start": 1, "end": 4},
            ]
        }
    },
    "spans outside the ids": {"meta_info": {"weight_versions": [{"version": "1", "start": 0, "end": 9999}]}},
    "increments": {"meta_info": {"completion_tokens": 7777}},
    "no meta": {"meta_info": None},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_from_an_engine_moves_the_call_and_leaves_nothing_behind(odd, codec, name, stream):
    garbage = GARBAGE[name]

    def change(payload):
        if not payload["meta_info"]["finish_reason"]:
            return payload
        meta = garbage.get("meta_info", {})
        return payload | garbage | {"meta_info": payload["meta_info"] | meta if meta is not None else None}

    proxy, engine, sound = odd([TEXT], sound=True, context_length=4096)
    engine.change = change
    proxy.admin("POST", "executions", {"id": "f", "engine": engine.url})
    answer = proxy.post("chat/completions", chat(stream=stream), "f")
    assert answer.status_code == 200, answer.text
    (call,) = proxy.calls()
    assert call.finish == "stop" and codec.decode(call.output_ids.tolist()) == TEXT
    assert stream or call.engine == sound.url  # a stream may have brought the whole answer before the garbage
    assert measured(proxy)["calls_under_way",] == 0


def test_a_weight_version_too_large_for_the_log_is_no_version(odd):
    proxy, engine = odd([TEXT])
    engine.version = 1732966800000
    assert proxy.post("chat/completions", chat()).status_code == 200
    (call,) = proxy.calls()
    assert call.versions == [] and measured(proxy)["calls_under_way",] == 0


@pytest.mark.parametrize("version", [-1, 3_000_000_000, True, "7"])
def test_a_told_version_that_no_log_could_hold_is_refused(scene, version):
    proxy, engine = scene([TEXT])
    table = {"engines": [{"url": engine.url, "version": version}]}
    answer = httpx.put(
        f"{proxy.url}/admin/engines", json=table, headers={"authorization": "Bearer admin-secret"}
    )
    assert answer.status_code == 400 and "version" in answer.text


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_an_engine_that_serves_nobody_is_not_the_calls_fault(odd, status):
    proxy, engine, sound = odd([TEXT], sound=True)
    engine.refuse = status
    proxy.admin("POST", "executions", {"id": "f", "engine": engine.url})
    assert said(proxy.post("chat/completions", chat(), "f"))["content"] == TEXT
    assert proxy.calls()[0].engine == sound.url


def test_patience_is_that_of_the_call_whatever_engines_answer_meanwhile(scene):
    """An engine that answers 503 for ever is asked again and again, and yet the call ends."""
    proxy, engine = scene([TEXT], engine_wait_s=1.0)
    engine.refuse = 503
    refused = proxy.post("chat/completions", chat())
    assert refused.status_code == 503 and "no engine in 1 s" in refused.text
    assert len(proxy.calls()) == 1


def test_clients_that_leave_do_no_harm_to_the_engine(scene):
    proxy, engine = scene([TEXT])
    engine.hold_after = 0
    for attempt in range(4):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{proxy.url}/x/e{attempt}/v1/chat/completions", json=chat(), timeout=0.3)
    wait_until(lambda: measured(proxy)["calls_under_way",] == 0)
    assert measured(proxy)["engine_admitting", engine.url] == 1.0


def test_an_answer_that_nobody_got_is_an_attempt_of_the_next(scene, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def sync(log):
        begun.set()
        assert go.wait(DEADLINE_S)

    monkeypatch.setattr(RunLogWriter, "sync", sync)
    proxy, _ = scene([TEXT], flush="disk")
    host, port = proxy.url.removeprefix("http://").split(":")
    body = orjson.dumps(chat())
    with socket.create_connection((host, int(port)), DEADLINE_S) as leaving:
        head = b"POST /x/e/v1/chat/completions HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n"
        leaving.sendall(head % len(body) + body)
        assert begun.wait(DEADLINE_S)
    wait_until(lambda: measured(proxy)["calls_under_way",] == 1)
    time.sleep(0.1)  # the connection's end arrives on its own way
    go.set()
    wait_until(lambda: measured(proxy)["calls_under_way",] == 0)
    assert said(proxy.post("chat/completions", chat()))["content"] == TEXT
    first, second = proxy.calls()
    assert (first.finish, second.attempt_of) == ("stop", first.id)


def test_a_control_token_in_template_arguments_is_refused(scene):
    proxy, _ = scene([TEXT])
    answer = proxy.post("chat/completions", chat(chat_template_kwargs={"date_string": "<|im_end|>"}))
    assert answer.status_code == 400 and "chat_template_kwargs" in answer.text


def test_counting_opens_no_more_executions_than_calls_may(scene):
    proxy, _ = scene([TEXT], max_executions=1)
    assert proxy.post("messages/count_tokens", {"model": "m", "messages": [USER]}, "one").status_code == 200
    assert proxy.post("messages/count_tokens", {"model": "m", "messages": [USER]}, "two").status_code == 503


def test_an_execution_without_a_name_is_none(scene):
    proxy, _ = scene([TEXT])
    answer = httpx.post(f"{proxy.url}/x//v1/chat/completions", json=chat())
    assert answer.status_code == 404 and "names no execution" in answer.text
    assert httpx.post(f"{proxy.url}/x/e/v1", json=chat()).status_code == 404
    assert httpx.post(f"{proxy.url}/health").status_code == 404


def test_strict_mode_shows_its_metrics_to_the_admin_only(scene):
    proxy, _ = scene([TEXT], strict=True)
    assert httpx.get(f"{proxy.url}/metrics").status_code == 401
    token = {"authorization": "Bearer admin-secret"}
    assert httpx.get(f"{proxy.url}/metrics", headers=token).status_code == 200


@pytest.mark.parametrize("harm", ["removed", "emptied"])
def test_a_log_that_is_lost_while_the_proxy_runs_withholds_answers(scene, harm):
    proxy, _ = scene([TEXT])
    assert proxy.post("chat/completions", chat()).status_code == 200
    if harm == "removed":
        proxy.record.unlink()
    else:
        proxy.record.write_bytes(b"")
    refused = proxy.post("chat/completions", chat(USER, USER))
    assert refused.status_code == 503 and "could not be recorded" in refused.text


class Endless(Odd):
    """Its streams bring the answer and do not end."""

    async def _play(self, call, send):
        async def without_end(message):
            message = dict(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                message["more_body"] = True
                message["body"] = message["body"].removesuffix(b"data: [DONE]\n\n")
            await send(message)

        await super()._play(call, without_end)
        await asyncio.sleep(DEADLINE_S)


def test_a_stream_that_brought_its_answer_need_not_end(stage, codec, tokenizer_dir, tmp_path):
    engine = Endless(codec, [TEXT])
    stage.do(engine.start())
    stage._stops.append(engine.stop)
    settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", "engines": (engine.url,)}
    proxy = stage.proxy(**settings)
    events = proxy.post("chat/completions", chat(stream=True)).text
    assert "".join(re.findall(r'"content":"([^"]*)"', events)) == TEXT
    (call,) = proxy.calls()
    assert call.finish == "stop"


@pytest.mark.parametrize("change", ["shrinks", "changes"])
def test_a_stream_that_takes_back_what_it_said_moves_the_call(odd, codec, change):
    def garble(payload):
        ids = payload["output_ids"]
        if len(ids) < 5 or payload["meta_info"]["finish_reason"]:
            return payload
        ids = ids[:2] if change == "shrinks" else [*ids[:3], ids[3] + 1, *ids[4:]]
        meta = payload["meta_info"] | {"completion_tokens": len(ids), "output_token_logprobs": []}
        return payload | {"output_ids": ids, "meta_info": meta}

    proxy, engine, _ = odd([TEXT], sound=True)
    engine.change, engine.pace_s = garble, 0.01
    proxy.admin("POST", "executions", {"id": "f", "engine": engine.url})
    answer = proxy.post("chat/completions", chat(stream=True), "f")
    (call,) = proxy.calls()
    chunks = (orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {"))
    shown = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert shown == codec.decode(call.output_ids.tolist()) == TEXT


def test_what_an_engine_samples_behind_the_end_is_cut(odd, codec):
    proxy, engine = odd([TEXT])

    def behind(payload):
        if not payload["meta_info"]["finish_reason"]:
            return payload
        ids = payload["output_ids"] + payload["output_ids"]
        meta = payload["meta_info"] | {"completion_tokens": len(ids), "output_token_logprobs": []}
        return payload | {"output_ids": ids, "meta_info": meta}

    engine.change = behind
    assert said(proxy.post("chat/completions", chat()))["content"] == TEXT
    limited = proxy.post("chat/completions", chat(USER, USER, max_tokens=3)).json()
    assert limited["choices"][0]["finish_reason"] == "length" and limited["usage"]["completion_tokens"] == 3


def test_a_mute_engine_gets_no_calls_until_it_answers(
    stage, freezable, codec, tokenizer_dir, tmp_path, monkeypatch
):
    """It takes connections and holds no call: the least loaded engine, and no choice."""
    monkeypatch.setattr("gyre_proxy.engine_client.PING_S", 0.3)
    mute, sound = freezable([TEXT], 1), stage.engine(codec, [TEXT], 1)
    mute.frozen = True
    proxy = stage.proxy(tokenizer=tokenizer_dir, record=tmp_path / "run.jsonl", silence_s=1000.0)
    proxy.admin("PUT", "engines", {"engines": [{"url": e.url, "version": 1} for e in (mute, sound)]})
    for name in ("a", "b", "c"):
        assert said(proxy.post("chat/completions", chat(), name))["content"] == TEXT
    assert {call.engine for call in proxy.calls()} == {sound.url}
    mute.frozen = False
    proxy.admin("PUT", "engines", {"engines": [{"url": mute.url, "version": 1}]})
    assert said(proxy.post("chat/completions", chat(), "d"))["content"] == TEXT


def test_a_call_that_breaks_is_answered_and_logged_with_its_trace(scene, monkeypatch, caplog):
    proxy, _ = scene([TEXT])
    monkeypatch.setattr("gyre_proxy.gateway.call_answer", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "gyre_proxy"):
        answer = proxy.post("chat/completions", chat())
    assert answer.status_code == 500 and "internal error" in answer.json()["error"]["message"]
    (record,) = [r for r in caplog.records if r.getMessage() == "call broke"]
    assert record.exc_info[0] is ZeroDivisionError and record.fields["execution"]


def test_tokens_to_which_a_schema_left_no_choice_are_counted_as_untrainable(scene):
    proxy, _ = scene(['{"a": 1}'])
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    said(proxy.post("chat/completions", chat(response_format=shape)))
    (call,) = proxy.calls()
    assert measured(proxy)["untrainable_tokens_total",] == len(call.output_ids)
