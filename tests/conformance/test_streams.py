"""Streams of /generate: cumulative, closed by [DONE], errors inside them. The same for every engine."""

import json

import httpx
import pytest
from conformance_engines import WAIT_S, Running, events, request


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_stream_is_cumulative_and_ends_with_done(engine, logprobs):
    running = Running(engine, 8, stream=True, return_logprob=logprobs)
    final = running.final()
    assert len(final["output_ids"]) == 8
    assert final["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert final["meta_info"]["weight_versions"] == [{"version": engine.version, "start": 0, "end": 8}]
    for event in running.events:
        meta = event["meta_info"]
        count = meta["completion_tokens"]
        assert meta["id"] == running.rid and meta["prompt_tokens"] == 5
        assert event["output_ids"] == final["output_ids"][:count]
        entries = final["meta_info"]["output_token_logprobs"][:count] if logprobs else None
        assert meta.get("output_token_logprobs") == entries
    assert all(event["meta_info"]["finish_reason"] is None for event in running.events[:-1])
    assert all("weight_versions" not in event["meta_info"] for event in running.events[:-1])


def test_the_content_type_is_that_of_events(engine):
    with engine.client.stream("POST", "/generate", json=request(2, stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert list(events(response))[-1] == b"[DONE]"


def test_a_stream_of_nothing_is_one_event(engine):
    running = Running(engine, 0, stream=True)
    assert running.final()["output_ids"] == [] and len(running.events) == 1


def test_streams_run_side_by_side(engine):
    for running in [Running(engine, 20, stream=True) for _ in range(8)]:
        assert len(running.final()["output_ids"]) == 20


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": None},
        {"input_ids": []},
        {"sampling": {"temperature": -1}},
        {"sampling": {"max_new_tokens": 10**9}},
    ],
    ids=str,
)
def test_a_value_that_is_refused_is_an_event(engine, body):
    # on a connection of its own: SGLang 0.5.23 cuts the one of a stream without input 2 s after it, whatever runs there then
    with (
        httpx.Client(base_url=engine.url, timeout=WAIT_S, verify=False) as alone,
        alone.stream("POST", "/generate", json=request(2, stream=True, **body)) as response,
    ):
        data = list(events(response))
    assert response.status_code == 200 and len(data) == 2 and data[1] == b"[DONE]"
    error = json.loads(data[0])["error"]
    assert error["message"]
    assert (error["type"], error["code"], error["retryable"]) == ("invalid_request_error", 400, False)


@pytest.mark.parametrize("body", [{"input_ids": "abc"}, {"sampling": {"nonsense": 1}}], ids=str)
def test_a_type_that_is_refused_comes_before_the_stream(engine, body):
    answer = engine.generate(2, stream=True, **body)
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
