"""The real proxy process in front of the real SGLang server, and of it and the other engines together."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conformance_engines import WAIT_S, Engine, until
from conformance_model import TURN_END
from conformance_proxy import begun, check_exact, echo, say, user

LONG = 2500
"""Tokens of an answer that a test cuts."""

MOVED = 1500
"""Tokens of an answer that is still under way when a test has read how it begins."""


@pytest.fixture
def server(sglang: Engine, models: dict[str, Path]) -> Iterator[Engine]:
    """The real server, whose weights are those of `models`."""
    if sglang.models is None:
        pytest.skip("these tests compare log-probs: they need a server of their own")
    yield sglang
    sglang.restore()


@pytest.mark.parametrize("path", ["messages", "chat/completions", "responses"])
def test_a_conversation_is_recorded_token_for_token(server, proxy, references, path):
    proxy.serve(server)
    conversation = [user("The quick brown fox")]
    for turn in range(3):
        answer = proxy.post("e", path, **say(path, conversation, 20 + turn))
        conversation += [*echo(path, answer), user(f"jumps over {turn}")]
    calls = proxy.calls()
    assert [len(call.output_ids) for call in calls] == [20, 21, 22]
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id]
    assert all(call.versions == [[1, 0, len(call.output_ids)]] and call.finish == "length" for call in calls)
    check_exact(calls, references)


@pytest.mark.parametrize("path", ["messages", "chat/completions", "responses"])
def test_a_stream_is_recorded_token_for_token(server, proxy, references, path):
    proxy.serve(server)
    with proxy.stream("e", path, **say(path, [user("The lazy dog")], 30)) as response:
        assert response.status_code == 200
        text = b"".join(response.iter_raw())
    assert text.count(b"data: ") > 3
    (call,) = proxy.calls()
    assert (len(call.output_ids), call.versions) == (30, [[1, 0, 30]])
    check_exact([call], references)


def test_tools_and_parallel_conversations(server, proxy, references):
    proxy.serve(server)
    tool = {"name": "shell", "description": "runs", "input_schema": {"type": "object", "properties": {}}}
    texts = [f"task {n}" for n in range(6)]
    bodies = [say("messages", [user(text)], 12) | {"tools": [tool]} for text in texts]
    streams = [proxy.stream(f"e{n}", "messages", **body) for n, body in enumerate(bodies)]
    responses = [stream.__enter__() for stream in streams]
    for stream, response in zip(streams, responses, strict=True):
        assert response.status_code == 200 and b"message_stop" in response.read()
        stream.__exit__(None, None, None)
    calls = proxy.calls()
    assert sorted(call.execution for call in calls) == [f"e{n}" for n in range(6)]
    check_exact(calls, references)


def test_the_cache_is_kept_by_weight_version(server, proxy):
    proxy.serve(server)
    server.flush()
    proxy.post("e", "chat/completions", **say("chat/completions", [user("The quick brown fox jumps")], 8))
    (call,) = proxy.calls()
    prompt = call.input_ids.tolist()

    def cached(**key: object) -> int:
        return server.answer(1, input_ids=prompt, **key)["meta_info"]["cached_tokens"]

    assert cached() == 0 and cached(extra_key="2") == 0
    assert cached(extra_key="1") == len(prompt) - 1


def test_an_update_in_the_middle_of_an_answer_is_two_spans(server, proxy, models, references):
    proxy.serve(server)
    with proxy.stream("e", "messages", **say("messages", [user("go on")], MOVED)) as response:
        lines = begun(response)
        server.pause("retract")
        server.update(model_path=str(models["2"]), weight_version="2", flush_cache=True)
        server.go_on()
        assert any("message_stop" in line for line in lines)
    (call,) = proxy.calls()
    assert [version for version, _, _ in call.versions] == [1, 2] and len(call.output_ids) == MOVED
    check_exact([call], references)


def test_a_client_that_leaves_ends_the_call_at_the_server(server, proxy):
    proxy.serve(server)
    with proxy.stream("e", "chat/completions", **say("chat/completions", [user("go on")], LONG)) as response:
        begun(response, events=1)  # on a busy machine a dozen may be most of the answer
        assert proxy.in_flight(server) == 1
    until(lambda: proxy.in_flight(server) == 0)
    until(lambda: server.post("/flush_cache").status_code == 200)  # which is refused while anything runs
    (call,) = proxy.calls()
    assert call.finish == "abort" and 0 < len(call.output_ids) < LONG


@pytest.mark.parametrize(
    ("path", "back"),
    [("messages", False), ("chat/completions", False), ("responses", False), ("messages", True)],
)
def test_an_answer_moves_between_the_real_server_and_the_embedded_engine(
    server, embedded, proxy, references, path, back
):
    source, destination = (embedded, server) if back else (server, embedded)
    proxy.serve(source, destination)
    proxy.start_at("e", source)
    with proxy.stream("e", path, **say(path, [user("go on")], MOVED)) as response:
        lines = begun(response)
        moved = proxy.admin(
            "POST", "reroute", source=source.url, moves={"e": destination.url}, deadline_s=WAIT_S
        )
        assert moved == {"moved": 1, "continued": 1}
        rest = "".join(lines)
    assert any(mark in rest for mark in ("message_stop", "[DONE]", "response.incomplete"))
    (call,) = proxy.calls()
    assert (len(call.output_ids), call.finish, call.engine) == (MOVED, "length", destination.url)
    assert TURN_END not in call.output_ids and call.versions == [[1, 0, MOVED]]
    check_exact([call], references)


def test_a_call_that_is_not_streamed_moves_too(server, scripted, proxy):
    proxy.serve(server, scripted)
    proxy.start_at("e", server)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(proxy.post, "e", "messages", **say("messages", [user("go on")], LONG))
        until(lambda: proxy.in_flight(server) == 1)
        proxy.admin("POST", "reroute", source=server.url, moves={"e": scripted.url}, deadline_s=WAIT_S)
        assert answer.result(WAIT_S)["usage"]["output_tokens"] == LONG
    (call,) = proxy.calls()
    assert len(call.output_ids) == len(call.logprobs) == LONG and call.engine == scripted.url
