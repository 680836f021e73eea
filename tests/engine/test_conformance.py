"""SGLang's HTTP API as its clients see it: the same tests for the embedded engine and, where
GYRE_TEST_SGLANG_URL names one, for a running SGLang server (a Qwen3 with a context of at least 2,100 tokens
and a vocabulary of at least 90).
"""

import json
import os

import httpx
import pytest

WAIT_S = 60
SGLANG = os.environ.get("GYRE_TEST_SGLANG_URL")
PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture(params=["embedded", *(["sglang"] if SGLANG else [])])
def client(request):
    url = SGLANG if request.param == "sglang" else request.getfixturevalue("server").url
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        yield client


def generate(client: httpx.Client, new: int = 6, temperature: float = 1.0, **body) -> httpx.Response:
    sampling = {"max_new_tokens": new, "temperature": temperature, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True} | body
    return client.post("/generate", json=body)


def events(response: httpx.Response):
    """The data of each server-sent event; the last one is [DONE]."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield line[6:]


def test_a_completion(client):
    answer = generate(client, rid="conformance-1")
    assert answer.status_code == 200
    ids, meta = answer.json()["output_ids"], answer.json()["meta_info"]
    version = client.get("/get_model_info").json()["weight_version"]
    assert len(ids) == 6
    assert meta["id"] == "conformance-1"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 6)
    assert meta["cached_tokens"] >= 0
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 6}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in ids]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])


def test_without_return_logprob_there_are_none(client):
    assert "output_token_logprobs" not in generate(client, return_logprob=False).json()["meta_info"]


def test_a_greedy_completion_repeats_itself(client):
    first, second = (generate(client, 12, 0.0).json() for _ in range(2))
    assert first["output_ids"] == second["output_ids"]
    logprobs = [[entry[0] for entry in a["meta_info"]["output_token_logprobs"]] for a in (first, second)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def test_continuing_from_prompt_and_partial_output_gives_the_rest(client):
    whole = generate(client, 12, 0.0).json()
    rest = generate(client, 7, 0.0, input_ids=PROMPT + whole["output_ids"][:5]).json()
    assert rest["output_ids"] == whole["output_ids"][5:]
    expected = [entry[0] for entry in whole["meta_info"]["output_token_logprobs"][5:]]
    assert [entry[0] for entry in rest["meta_info"]["output_token_logprobs"]] == pytest.approx(
        expected, abs=1e-4
    )


def test_a_stop_token_ends_the_output_and_is_part_of_it(client):
    free = generate(client, 12, 0.0).json()["output_ids"]
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "stop_token_ids": [free[4]]}
    stopped = generate(client, sampling_params=sampling).json()
    assert stopped["output_ids"] == free[: free.index(free[4]) + 1]
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
    assert stopped["meta_info"]["finish_reason"]["matched"] == free[4]


def test_a_stream_is_cumulative_and_ends_with_done(client):
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        *data, done = events(response)
    chunks = [json.loads(chunk) for chunk in data]
    assert done == "[DONE]"
    final = chunks[-1]
    assert len(final["output_ids"]) == 8
    assert final["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert final["meta_info"]["weight_versions"][-1]["end"] == 8
    for chunk in chunks:
        count = chunk["meta_info"]["completion_tokens"]
        assert chunk["output_ids"] == final["output_ids"][:count]
        entries = final["meta_info"]["output_token_logprobs"][:count]
        assert chunk["meta_info"]["output_token_logprobs"] == entries
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])


def test_an_aborted_stream_keeps_its_partial_output(client):
    sampling = {"max_new_tokens": 2000, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "stream": True}
    final, aborted = None, False
    with client.stream("POST", "/generate", json=body | {"rid": "conformance-abort"}) as response:
        assert response.status_code == 200
        for data in events(response):
            if data == "[DONE]":
                break
            final = json.loads(data)
            if not aborted:
                aborted = True
                assert client.post("/abort_request", json={"rid": "conformance-abort"}).status_code == 200
    assert final["meta_info"]["finish_reason"]["type"] == "abort"
    count = len(final["output_ids"])
    assert 0 < count < 2000
    assert final["meta_info"]["completion_tokens"] == count
    assert len(final["meta_info"]["output_token_logprobs"]) == count
    assert final["meta_info"]["weight_versions"][-1]["end"] == count


def test_aborting_what_is_not_there_is_fine(client):
    assert client.post("/abort_request", json={"rid": "never-seen"}).status_code == 200


def test_a_bad_request_is_a_400(client):
    # an empty prompt, like an id outside the vocabulary, ends a real SGLang
    for change in (
        {"input_ids": None},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"top_p": 2}},
    ):
        answer = client.post("/generate", json={"input_ids": PROMPT} | change)
        assert answer.status_code == 400
        assert answer.json()["error"]


def test_a_prompt_beyond_the_context_is_a_400(client):
    length = client.get("/server_info").json()["context_length"]
    answer = generate(client, input_ids=[11] * length)
    assert answer.status_code == 400
    assert "context length" in answer.json()["error"]["message"]
    answer = generate(client, new=length)
    assert answer.status_code == 400


def test_a_bad_stream_reports_its_error_as_an_event(client):
    length = client.get("/server_info").json()["context_length"]
    body = {"input_ids": [11] * length, "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        data = list(events(response))
    assert response.status_code == 200
    assert "context length" in json.loads(data[0])["error"]["message"]


def test_a_pause_holds_new_requests_until_continued(client):
    assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    try:
        assert client.get("/ready").status_code == 503
        assert client.get("/ping").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            client.post("/generate", json={"input_ids": PROMPT}, timeout=0.3)
    finally:
        assert client.post("/continue_generation", json={}).status_code == 200
    assert client.get("/ready").status_code == 200
    assert generate(client).status_code == 200


def test_weights_are_reloaded_under_a_new_version(client):
    info = client.get("/get_model_info").json()
    before = client.post("/weights_checker", json={"action": "checksum"}).json()
    assert before["success"]
    update = {"model_path": info["model_path"], "weight_version": "77", "flush_cache": True}
    assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    answer = client.post("/update_weights_from_disk", json=update)
    assert client.post("/continue_generation", json={}).status_code == 200
    assert answer.status_code == 200 and answer.json()["success"]
    assert client.get("/get_model_info").json()["weight_version"] == "77"
    spans = generate(client).json()["meta_info"]["weight_versions"]
    assert spans == [{"version": "77", "start": 0, "end": 6}]
    after = client.post("/weights_checker", json={"action": "checksum"}).json()
    assert after["per_engine_checksum"] == before["per_engine_checksum"]
    label = {"new_version": info["weight_version"], "abort_all_requests": False}
    assert client.post("/update_weight_version", json=label).json()["success"]
    assert client.get("/get_model_info").json() == info


def test_an_idle_cache_can_be_flushed(client):
    generate(client)
    assert client.post("/flush_cache").status_code == 200
    assert generate(client).json()["meta_info"]["cached_tokens"] == 0


def test_the_server_tells_its_limits(client):
    info = client.get("/server_info").json()
    assert info["context_length"] > 0 and info["max_running_requests"] > 0 and info["model_path"]
    assert client.get("/health").status_code == 200
