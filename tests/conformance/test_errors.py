"""What engines refuse, in which of the three shapes (see scripted_requests). The same for every engine."""

import json

import pytest
from conformance_engines import PROMPT, request
from scripted_requests import CONTRACT, MALFORMED, VALUE

JSON = {"content-type": "application/json"}


def shape_of(body: dict) -> tuple[str, str]:
    """(shape, message)."""
    if body.get("object") == "error":
        assert body["code"] == 400
        return MALFORMED, body["message"]
    error = body["error"]
    return (CONTRACT, error) if isinstance(error, str) else (VALUE, error["message"])


def check(answer, shape: str) -> None:
    assert answer.status_code == 400, answer.text
    found, message = shape_of(answer.json())
    assert found == shape and message


@pytest.mark.parametrize(
    "raw", [b"{bad", b"[1]", b"", b"null", b'"x"', b"\xff\xfe", b'{"input_ids": [1e400]}']
)
@pytest.mark.parametrize(
    "path",
    ["/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"],
)
def test_a_body_that_is_no_object_is_malformed(engine, path, raw):
    check(engine.client.post(path, content=raw, headers=JSON), MALFORMED)


def test_a_number_beyond_every_float_is_malformed(engine):
    check(engine.client.post("/generate", content=b'{"input_ids": [1e400]}', headers=JSON), MALFORMED)


@pytest.mark.parametrize(
    "change",
    [
        *({"input_ids": ids} for ids in ({}, "abc", ["a"], [1.5], [1.0])),
        *({"sampling_params": sampling} for sampling in ([1], "x")),
        *(
            {"logprob_start_len": "x"},
            {"rid": 5},
            {"extra_key": 5},
            {"cache_salt": 5},
            {"return_logprob": "x"},
        ),
    ],
    ids=str,
)
def test_a_field_of_a_wrong_type_is_malformed(engine, change):
    check(engine.client.post("/generate", json=request(4) | change), MALFORMED)


@pytest.mark.parametrize(
    "change",
    [
        *({"input_ids": [True, False]}, {"stream": "yes"}, {"stream": 1}),
        *({"sampling": {"max_new_tokens": value}} for value in (1.5, "x", True)),
        *({"sampling": {name: "x"}} for name in ("temperature", "top_p", "min_p", "top_k", "ignore_eos")),
        *({"sampling": {"stop_token_ids": value}} for value in (["x"], 5, [1.5])),
        *(
            {"sampling": {"top_k": 1.5}},
            {"sampling": {"ignore_eos": 1}},
            {"sampling": {"sampling_seed": "x"}},
        ),
        *(
            {"sampling": {"nonsense": 1}},
            {"sampling": {"skip_special_tokens": "x"}},
            {"sampling": {"stop": [1]}},
        ),
    ],
    ids=str,
)
def test_a_sampling_field_that_is_unknown_or_of_a_wrong_type_breaks_the_contract(engine, change):
    check(engine.generate(4, **change), CONTRACT)


@pytest.mark.parametrize(
    "change",
    [
        *({"input_ids": None}, {"input_ids": []}, {"logprob_start_len": 100}),
        *({"sampling": {"max_new_tokens": value}} for value in (-1, 10**9)),
        *({"sampling": {"top_p": value}} for value in (0, 2, -1)),
        *({"sampling": {"top_k": value}} for value in (0, -2)),
        *({"sampling": {"min_p": value}} for value in (-1, 2)),
        *({"sampling": {"frequency_penalty": 3}}, {"sampling": {"presence_penalty": -3}}),
        *({"sampling": {"repetition_penalty": 0}}, {"sampling": {"min_new_tokens": -1}}),
        *({"sampling": {"temperature": -1}}, {"sampling": {"min_new_tokens": 100}}),
    ],
    ids=str,
)
def test_a_value_out_of_its_range_is_refused(engine, change):
    check(engine.generate(4, **change), VALUE)


def test_a_body_without_input_is_refused(engine):
    check(engine.client.post("/generate", json={}), VALUE)


@pytest.mark.parametrize(
    ("below", "new", "says"),
    [
        (0, 4, "longer than the model's context length"),
        (1, 4, "exceeds"),
        (6, 4, "exceeds"),
        (5, 6, "exceeds"),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused(engine, below, new, says):
    answer = engine.generate(new, input_ids=[11] * (engine.context - below))
    check(answer, VALUE)
    assert says in answer.json()["error"]["message"]


def test_the_longest_prompt_is_told_and_served(engine):
    longest = engine.server_info()["max_req_input_len"]
    assert longest == engine.context - 6
    assert engine.generate(1, input_ids=[11] * longest).status_code == 400
    assert engine.answer(1, input_ids=[11] * (longest - 1))["meta_info"]["prompt_tokens"] == longest - 1


def test_stop_strings_need_a_tokenizer(engine):
    answer = engine.generate(4, sampling={"stop": ["a"]})
    if engine.server_info()["skip_tokenizer_init"]:
        check(answer, VALUE)
    else:
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": 5}),
        ("/abort_request", {"rid": ["a"]}),
        ("/pause_generation", {"mode": "gently"}),
        ("/update_weight_version", {}),
        ("/update_weight_version", {"new_version": 5}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": "x", "weight_version": 7}),
    ],
    ids=str,
)
def test_commands_with_wrong_fields_are_malformed(engine, path, body):
    check(engine.post(path, **body), MALFORMED)


def test_unknown_paths_and_methods(engine):
    assert engine.client.get("/nowhere").status_code == 404
    for path in ("/generate", "/abort_request", "/pause_generation", "/continue_generation"):
        assert engine.client.get(path).status_code == 405
    for path in ("/get_model_info", "/server_info", "/ping", "/ready", "/health"):
        assert engine.post(path).status_code == 405


def test_an_engine_tells_what_it_is(engine):
    info = engine.info()
    assert info["is_generation"] is True and info["model_path"] and isinstance(info["weight_version"], str)
    assert info == engine.client.get("/model_info").json()
    told = engine.server_info()
    assert told["context_length"] > 0 and told["max_running_requests"] > 0
    assert engine.client.get("/get_server_info").json()["context_length"] == told["context_length"]
    assert [engine.client.get(path).status_code for path in ("/ping", "/ready", "/health")] == [200] * 3


# --- what would end a real server, which is therefore not asked ---


@pytest.mark.parametrize("token", [512, -1, 2**31, 2**63, 10**30])
def test_a_token_outside_the_vocabulary_is_refused(guarded_engine, token):
    body = json.dumps(request(2) | {"input_ids": [*PROMPT, token]})
    answer = guarded_engine.client.post("/generate", content=body, headers=JSON)
    assert answer.status_code == 400
    assert guarded_engine.answer(2)["output_ids"]


def test_a_log_prob_start_below_minus_one_is_refused(guarded_engine):
    check(guarded_engine.generate(2, logprob_start_len=-2), VALUE)
