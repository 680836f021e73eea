"""Calls that change engines under way: the harness sees one answer, the log one call."""

import json
import os
import socket
import threading

import httpx
import pytest
from gyre_trajtree import read_run_log
from proxy_stage import ADMIN, DEADLINE_S, FakeEngine, wait_until

TEXT = "The quick brown fox jumps over the lazy dog."
BODY = {"model": "m", "messages": [{"role": "user", "content": "go"}]}


@pytest.fixture
def pair(stage, codec, tokenizer_dir, tmp_path):
    """(proxy, source, destination); executions start on the source; the destination is at version 3."""

    def build(version=3, **settings):
        source, destination = stage.engine(codec, [TEXT], 2), stage.engine(codec, [TEXT], version)
        proxy = stage.proxy(tokenizer=tokenizer_dir, record=tmp_path / "run.jsonl", **settings)
        table = [{"url": e.url, "admitting": True, "version": e.version} for e in (source, destination)]
        proxy.admin("PUT", "engines", {"engines": table})
        proxy.admin("POST", "executions", {"id": "e", "engine": source.url})
        return proxy, source, destination

    return build


class Client(threading.Thread):
    """Asks once in the background."""

    def __init__(self, proxy, stream=False):
        super().__init__()
        self._proxy, self._body, self.text, self.status = proxy, {**BODY, "stream": stream}, None, None
        self.start()

    def run(self):
        answer = self._proxy.post("messages" if self._body["stream"] else "chat/completions", self._body)
        self.status, self.text = answer.status_code, answer.text

    def answer(self):
        self.join(DEADLINE_S)
        assert self.status == 200, self.text
        return self.text


def test_spans_of_one_version_join_across_engines(pair):
    proxy, source, destination = pair(version=2)
    source.hold_after = 4
    client = Client(proxy, stream=True)
    source.wait_held()
    proxy.admin("POST", "reroute", {"source": source.url, "moves": {"e": destination.url}})
    client.answer()
    (call,) = proxy.calls()
    assert call.versions == [[2, 0, len(call.output_ids)]]


def check_one_uninterrupted_call(proxy, codec, split):
    """Ids of both engines joined, log-probs as one engine would give them, versions by span."""
    (call,) = proxy.calls()
    assert codec.decode(call.output_ids.tolist()) == TEXT and call.finish == "stop"
    start, count = len(call.input_ids), len(call.output_ids)
    assert call.logprobs.tolist() == pytest.approx([-(start + i) / 1000 for i in range(count)])
    assert call.versions == ([[2, 0, split], [3, split, count]] if split else [[3, 0, count]])
    return call


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampled", [0, 4])
def test_a_reroute_continues_from_the_partial_answer(pair, codec, stream, sampled):
    proxy, source, destination = pair()
    source.hold_after = sampled
    client = Client(proxy, stream)
    source.wait_held()
    moved = proxy.admin("POST", "reroute", {"source": source.url, "moves": {"e": destination.url}})
    assert moved == {"moved": 1, "continued": 1}
    text = client.answer()
    call = check_one_uninterrupted_call(proxy, codec, sampled)
    (continued,) = destination.requests
    assert continued["input_ids"] == call.input_ids.tolist() + call.output_ids.tolist()[:sampled]
    assert continued["extra_key"] == "3"
    first, second = (r["sampling_params"]["max_new_tokens"] for r in (source.requests[0], continued))
    assert first - second == sampled
    assert call.engine == destination.url and (stream or TEXT in text)
    status = proxy.admin("GET", "status")
    assert status["reroutes"] == 1 and status["engines"][source.url]["admitting"] is False
    assert [e["in_flight"] for e in status["engines"].values()] == [0, 0]


def test_a_rerouted_stream_shows_each_character_once(pair):
    proxy, source, destination = pair()
    source.hold_after = 5
    client = Client(proxy, stream=True)
    source.wait_held()
    proxy.admin("POST", "reroute", {"source": source.url, "moves": {"e": destination.url}})
    lines = client.answer().split("\n")
    deltas = [line.split('"text_delta","text":"')[1].split('"')[0] for line in lines if "text_delta" in line]
    assert "".join(deltas) == TEXT


def test_a_call_that_is_done_before_the_abort_is_not_continued(pair, codec):
    proxy, source, destination = pair()
    proxy.post("chat/completions", BODY)
    moved = proxy.admin("POST", "reroute", {"source": source.url, "moves": {"e": destination.url}})
    assert moved == {"moved": 1, "continued": 0} and destination.requests == []


def test_a_source_that_ignores_aborts_is_cut_off_before_the_deadline(pair, codec):
    proxy, source, destination = pair()
    source.hold_after, source.ignore_aborts = 4, True
    client = Client(proxy, stream=True)
    source.wait_held()
    body = {"source": source.url, "moves": {"e": destination.url}, "deadline_s": 2.0}
    assert proxy.admin("POST", "reroute", body)["continued"] == 1
    client.answer()
    check_one_uninterrupted_call(proxy, codec, 4)
    assert len(source.aborted) > 1


def test_an_unknown_engine_in_a_reroute_is_refused_by_name(pair):
    proxy, source, _ = pair()
    body = {"source": source.url, "moves": {"e": "http://nowhere"}}
    answer = httpx.post(f"{proxy.url}/admin/reroute", json=body, headers=ADMIN)
    assert answer.status_code == 400 and "http://nowhere" in answer.json()["error"]["message"]
    assert proxy.admin("GET", "status")["engines"][source.url]["admitting"] is True


def test_an_engine_that_aborts_on_its_own_does_not_end_the_call(pair, codec, stage):
    """As a server does at a weight update: the answer goes on where it stopped, at the new version."""
    proxy, source, _ = pair()
    source.hold_after = 4
    client = Client(proxy)
    source.wait_held()
    stage.do(source.update(3))
    client.answer()
    assert len(source.requests) == 2
    check_one_uninterrupted_call(proxy, codec, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_the_table_names_the_version_of_an_engine_that_does_not(pair, stream):
    proxy, source, _ = pair()
    source.version = "default"
    Client(proxy, stream).answer()
    (call,) = proxy.calls()
    assert call.versions == [[2, 0, len(call.output_ids)]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_in_mid_answer_is_replaced(pair, codec, stream):
    proxy, source, destination = pair()
    source.die_after = 4
    Client(proxy, stream).answer()
    # Only a stream leaves something behind that can be continued.
    check_one_uninterrupted_call(proxy, codec, 4 if stream else 0)
    assert len(destination.requests) == 1


@pytest.mark.parametrize("failure", [503, 429, 500])
def test_an_engine_that_refuses_for_now_is_replaced(pair, codec, failure):
    proxy, source, destination = pair()
    source.refuse = failure
    Client(proxy).answer()
    check_one_uninterrupted_call(proxy, codec, 0)


def test_the_only_engine_dies_and_comes_back(scene, stage):
    proxy, engine = scene([TEXT])
    stage.do(engine.stop())
    client = Client(proxy)
    wait_until(lambda: proxy.admin("GET", "status")["executions"] == 1)
    assert client.is_alive()
    stage.do(engine.start())
    assert TEXT in client.answer()
    assert len(proxy.calls()) == 1


def test_an_engine_that_aborts_everything_is_not_hammered(scene):
    proxy, engine = scene([TEXT], call_deadline_s=0.5)
    engine.aborts_everything = True
    answer = proxy.post("chat/completions", BODY)
    assert answer.status_code == 503
    assert f"waiting for {engine.url} to stop aborting calls" in answer.json()["error"]["message"]
    assert len(engine.requests) <= 5


def test_a_call_waits_for_an_engine_to_be_listed(stage, codec, tokenizer_dir, tmp_path):
    proxy = stage.proxy(tokenizer=tokenizer_dir, record=tmp_path / "run.jsonl")
    client = Client(proxy)
    wait_until(lambda: proxy.admin("GET", "status")["executions"] == 1)
    engine = stage.engine(codec, [TEXT])
    proxy.admin("PUT", "engines", {"engines": [{"url": engine.url + "/", "admitting": True, "version": 0}]})
    assert TEXT in client.answer()


def test_the_deadline_of_a_call_names_what_it_waited_for(scene, stage):
    proxy, engine = scene([TEXT], call_deadline_s=0.3)
    stage.do(engine.stop())
    answer = proxy.post("chat/completions", BODY)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert f"waiting for an engine to come back ({engine.url}: cannot connect" in message
    assert [call.finish for call in proxy.calls()] == ["error"]


def test_an_answer_cut_by_its_deadline_resets_the_stream_and_keeps_its_tokens(scene):
    proxy, engine = scene([TEXT], call_deadline_s=1.0)
    engine.hold_after = 6
    with pytest.raises(httpx.RemoteProtocolError):
        proxy.post("messages", {**BODY, "stream": True})
    (call,) = proxy.calls()
    assert (call.finish, len(call.output_ids)) == ("abort", 6)


def test_closing_an_execution_aborts_its_calls_and_refuses_later_ones(scene):
    proxy, engine = scene([TEXT])
    engine.hold_after = 3
    client = Client(proxy)
    engine.wait_held()
    assert proxy.admin("POST", "executions/e/close", {}) == {"calls": 1}
    client.join(DEADLINE_S)
    assert client.status == 410
    (call,) = proxy.calls()
    assert (call.finish, len(call.output_ids)) == ("abort", 3)
    assert proxy.post("chat/completions", BODY).status_code == 410
    assert proxy.admin("POST", "executions/e/close", {}) == {"calls": 1}
    assert proxy.admin("GET", "status")["executions"] == 0


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_a_body_that_arrives_after_the_close_starts_no_call(scene, path):
    proxy, engine = scene([TEXT])
    proxy.admin("POST", "executions", {"id": "e"})
    body = json.dumps(BODY).encode()
    head = f"POST /x/e/v1/{path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
    port = int(proxy.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        client.sendall(head.encode())
        assert b"100 Continue" in client.recv(1000)  # the proxy waits for the body
        assert proxy.admin("POST", "executions/e/close", {}) == {"calls": 0}
        client.sendall(body)
        assert b" 410 " in client.recv(1000).split(b"\r\n")[0]
    assert engine.requests == [] and proxy.calls() == []


def test_a_call_past_its_executions_deadline_is_refused(scene):
    proxy, engine = scene([TEXT])
    proxy.admin("POST", "executions", {"id": "e", "deadline": 1.0})
    answer = proxy.post("chat/completions", BODY)
    assert answer.status_code == 410 and "deadline" in answer.json()["error"]["message"]
    assert engine.requests == [] and proxy.calls() == []


def test_a_reroute_moves_only_executions_that_are_open(pair):
    proxy, source, destination = pair()
    proxy.admin("POST", "executions/e/close", {})
    moves = {"e": destination.url, "unknown": destination.url}
    assert proxy.admin("POST", "reroute", {"source": source.url, "moves": moves})["moved"] == 0


def test_strict_mode_serves_only_issued_keys(scene):
    proxy, _ = scene([TEXT], strict=True)
    issued = proxy.admin("POST", "executions", {"id": "e1"})
    assert issued["base_url"] == f"{proxy.url}/x/e1"

    def ask(execution, key):
        url = f"{proxy.url}/x/{execution}/v1/messages"
        return httpx.post(url, json=BODY, headers={"x-api-key": key} if key else {}).status_code

    assert ask("e1", issued["key"]) == 200
    assert (ask("e2", issued["key"]), ask("e1", "sk-x"), ask("e1", None)) == (403, 401, 401)
    expired = proxy.admin("POST", "executions", {"id": "e3", "deadline": 1.0})
    assert ask("e3", expired["key"]) == 401


@pytest.mark.parametrize("token", [None, "Bearer wrong", "admin-secret"])
def test_the_admin_api_wants_its_token(scene, token):
    proxy, _ = scene([TEXT])
    headers = {"authorization": token} if token else {}
    assert httpx.get(f"{proxy.url}/admin/status", headers=headers).status_code == 401


def test_the_admin_api_is_off_without_a_token(scene):
    proxy, _ = scene([TEXT], admin_token=None)
    assert httpx.get(f"{proxy.url}/admin/status", headers=ADMIN).status_code == 403
    assert proxy.post("chat/completions", BODY).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "executions", {"id": "a/b"}),
        ("POST", "executions", {"id": "a", "deadline": "soon"}),
        ("PUT", "engines", {"engines": [{"admitting": True}]}),
        ("PUT", "engines", {"engines": [{"url": "http://a", "version": "7"}]}),
        ("PUT", "engines", {}),
        ("POST", "reroute", {"source": "http://nowhere"}),
    ],
)
def test_malformed_admin_calls_are_refused(scene, method, path, body):
    proxy, _ = scene([TEXT])
    answer = httpx.request(method, f"{proxy.url}/admin/{path}", json=body, headers=ADMIN)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_nothing_leaks_when_many_clients_come_and_go(scene, stage):
    proxy, engine = scene(["ok"])
    before = len(os.listdir("/proc/self/fd"))
    port = int(proxy.url.rsplit(":", 1)[1])
    for number in range(30):
        if number % 2:
            proxy.post("chat/completions", BODY, execution=f"e{number}")
        else:
            with socket.create_connection(("127.0.0.1", port)) as torn:
                torn.sendall(b"POST /x/t/v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 6)
    assert proxy.admin("GET", "status")["calls"] == len(proxy.calls()) == 15
    assert isinstance(engine, FakeEngine) and len(engine.requests) == 15
    assert sum(1 for _ in read_run_log(proxy.record)) == 16
