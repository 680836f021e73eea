"""One /generate: what is in the answer, where it ends, what was cached. The same for every engine."""

import math

import pytest
from conformance_engines import LONG, PROMPT, Running

GREEDY = {"temperature": 0.0}


def logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_a_completion(engine):
    answer = engine.answer(6, rid="conformance-1")
    ids, meta = answer["output_ids"], answer["meta_info"]
    version = engine.version
    assert len(ids) == 6
    assert meta["id"] == "conformance-1"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 6)
    assert meta["cached_tokens"] >= 0 and meta["num_retractions"] == 0
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 6}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in ids]
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs(answer))


@pytest.mark.parametrize("asked", [False, None])
def test_without_return_logprob_there_are_none(engine, asked):
    assert "output_token_logprobs" not in engine.answer(return_logprob=asked)["meta_info"]


def test_logprobs_begin_at_the_output(engine):
    meta = engine.answer(4, logprob_start_len=-1)["meta_info"]
    assert len(meta["output_token_logprobs"]) == 4 and not meta.get("input_token_logprobs")


def test_a_greedy_completion_repeats_itself(engine):
    first, second = (engine.answer(12, sampling=GREEDY) for _ in range(2))
    assert first["output_ids"] == second["output_ids"]
    assert logprobs(first) == pytest.approx(logprobs(second), abs=1e-4)
    assert engine.answer(12, sampling={"top_k": 1})["output_ids"] == first["output_ids"]


def test_continuing_from_prompt_and_partial_output_gives_the_rest(engine):
    whole = engine.answer(12, sampling=GREEDY)
    rest = engine.answer(7, sampling=GREEDY, input_ids=PROMPT + whole["output_ids"][:5])
    assert rest["output_ids"] == whole["output_ids"][5:]
    assert logprobs(rest) == pytest.approx(logprobs(whole)[5:], abs=1e-4)


def test_a_stop_token_ends_the_output_and_is_part_of_it(engine):
    free = engine.answer(12, sampling=GREEDY)["output_ids"]
    for stops in ([free[4]], [free[4], free[2]], [free[11]]):
        end = min(free.index(token) for token in stops)
        sampling = GREEDY | {"stop_token_ids": stops, "ignore_eos": False}
        stopped = engine.answer(12, sampling=sampling)
        assert stopped["output_ids"] == free[: end + 1]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[end]}


def test_ignore_eos_ignores_stop_tokens_too(engine):
    free = engine.answer(12, sampling=GREEDY)["output_ids"]
    ignored = engine.answer(12, sampling=GREEDY | {"stop_token_ids": [free[4]]})
    assert ignored["output_ids"] == free


def test_no_new_tokens(engine):
    answer = engine.answer(0)
    assert answer["output_ids"] == []
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["weight_versions"] == [{"version": engine.version, "start": 0, "end": 0}]


def test_the_default_is_128_new_tokens(engine):
    body = {"input_ids": PROMPT, "sampling_params": {"ignore_eos": True}}
    assert len(engine.client.post("/generate", json=body).json()["output_ids"]) == 128


@pytest.mark.parametrize("new", [7, None])
def test_two_positions_of_the_context_are_never_filled(engine, new):
    prompt = [11] * (engine.context - 7)
    answer = engine.answer(new, input_ids=prompt)
    assert len(answer["output_ids"]) == 5
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_a_request_without_an_id_gets_one(engine):
    ids = [engine.answer(1)["meta_info"]["id"] for _ in range(2)]
    assert all(ids) and ids[0] != ids[1]


def test_an_id_in_use_is_refused_and_free_again_after(engine):
    running = Running(engine, LONG, stream=True).began()
    refused = engine.generate(1, rid=running.rid)
    assert refused.status_code == 400 and "Duplicate" in refused.json()["error"]["message"]
    engine.post("/abort_request", rid=running.rid)
    running.final()
    assert engine.answer(1, rid=running.rid)["meta_info"]["id"] == running.rid


ACCEPTED = [
    *(
        {"sampling": extreme}
        for extreme in ({"top_k": 10**9}, {"top_k": -1}, {"temperature": 5e8}, {"min_p": 1.0})
    ),
    *({"sampling": {"stop_token_ids": stops}} for stops in ([10**9], [-1], [])),
    *({"sampling": {"sampling_seed": seed}} for seed in (5, -1, None)),
    *({"sampling": {name: None}} for name in ("temperature", "top_p", "stop")),
    *({"sampling": {"n": 1}}, {"sampling": {"stop": []}}, {"sampling": {"skip_special_tokens": False}}),
    *({"extra_key": None}, {"extra_key": ""}, {"rid": ""}, {"rid": None}, {"something_newer": 1}),
]


@pytest.mark.parametrize("change", ACCEPTED, ids=str)
def test_extreme_and_empty_values_are_served(engine, change):
    assert len(engine.answer(4, **change)["output_ids"]) == 4


def test_more_requests_than_run_at_once_are_each_answered_once(engine):
    running = [Running(engine, 3 + n % 5, stream=n % 2 == 0) for n in range(2 * engine.max_running)]
    for n, call in enumerate(running):
        final = call.final()
        assert len(final["output_ids"]) == 3 + n % 5 and final["meta_info"]["id"] == call.rid


# --- the prefix cache ---


def cached(engine, ids: list[int], **body: object) -> int:
    return engine.answer(4, input_ids=ids, **body)["meta_info"]["cached_tokens"]


def test_a_repeated_prompt_is_cached_but_for_its_last_token(engine):
    engine.flush()
    ids = list(range(20, 120))
    assert [cached(engine, ids), cached(engine, ids)] == [0, 99]


def test_an_output_is_cached_but_for_its_last_token(engine):
    engine.flush()
    ids = list(range(20, 120))
    longer = ids + engine.answer(4, input_ids=ids)["output_ids"] + [7]
    assert cached(engine, longer) == 103


@pytest.mark.parametrize("shared", [1, 3, 50, 99])
def test_what_two_prompts_share_is_cached(engine, shared):
    engine.flush()
    ids = list(range(20, 120))
    cached(engine, ids)
    assert cached(engine, ids[:shared] + [9] * 10) == shared


def test_keys_and_salts_keep_caches_apart(engine):
    engine.flush()
    ids = list(range(20, 120))
    keys = (
        {},
        {"extra_key": "a"},
        {"extra_key": "b"},
        {"cache_salt": "a"},
        {"extra_key": "a", "cache_salt": "a"},
    )
    assert [cached(engine, ids, **key) for key in keys] == [0, 0, 0, 0, 0]
    assert [cached(engine, ids, **key) for key in keys] == [99] * 5
    assert cached(engine, ids, extra_key="") == cached(engine, ids, extra_key=None) == 99


def test_partial_output_is_cached_for_who_goes_on(engine):
    engine.flush()
    running = Running(engine, LONG, stream=True).began()
    engine.post("/abort_request", rid=running.rid)
    ids = PROMPT + running.final()["output_ids"]
    assert cached(engine, ids, rid="goes-on") == len(ids) - 1


def test_a_flush_empties_the_cache_and_is_refused_while_something_runs(engine):
    ids = list(range(20, 120))
    cached(engine, ids)
    engine.flush()
    assert cached(engine, ids) == 0
    running = Running(engine, LONG, stream=True).began()
    assert engine.post("/flush_cache").status_code == 400
    engine.post("/abort_request", rid=running.rid)
    running.final()
