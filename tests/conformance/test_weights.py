"""Weight updates, their versions, and what requests see of both. The same for every engine."""

import pytest
from conformance_engines import LONG, PROMPT, UNFLUSHED, begun, ended_later

GREEDY = {"temperature": 0.0}


@pytest.fixture
def other(engine) -> str:
    """Other weights of the same shape."""
    if engine.models is None:
        pytest.skip("no other weights are known of the server that GYRE_TEST_SGLANG_URL names")
    return str(engine.models["2"])


def spans(final: dict) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in final["meta_info"]["weight_versions"]]


def update(engine, path: str, version: str, **body: object):
    return engine.post("/update_weights_from_disk", model_path=path, weight_version=version, **body)


def test_the_same_weights_under_a_new_version(engine):
    path = engine.info()["model_path"]
    greedy = engine.answer(12, sampling=GREEDY)["output_ids"]
    told = engine.update(model_path=path, weight_version="77")
    assert told["success"] is True and "77" in told["message"] and told["num_paused_requests"] == 0
    assert engine.version == "77"
    answer = engine.answer(12, sampling=GREEDY)
    assert answer["output_ids"] == greedy and spans(answer) == [("77", 0, 12)]
    assert answer["meta_info"]["cached_tokens"] == 0


def test_other_weights_sample_otherwise(engine, other):
    greedy = engine.answer(12, sampling=GREEDY)["output_ids"]
    first = engine.post("/weights_checker", action="checksum").json()
    engine.update(model_path=other, weight_version="2")
    assert engine.info()["model_path"] == other
    assert engine.answer(12, sampling=GREEDY)["output_ids"] != greedy
    second = engine.post("/weights_checker", action="checksum").json()
    assert first["success"] and second["success"]
    assert first["per_engine_checksum"] != second["per_engine_checksum"]


def test_without_a_version_the_old_one_stays(engine):
    before = engine.info()
    engine.update(model_path=before["model_path"])
    assert engine.info() == before


def test_a_failed_update_changes_nothing(engine):
    before = engine.info()
    answer = update(engine, "/nowhere", "9")
    assert answer.status_code == 400 and answer.json()["success"] is False and answer.json()["message"]
    assert engine.info() == before
    assert spans(engine.answer(3)) == [(before["weight_version"], 0, 3)]


@pytest.mark.parametrize(("mode", "flush"), [("retract", True), ("retract", False), ("in_place", False)])
def test_an_update_during_a_pause_is_seen_in_the_spans_of_what_runs(engine, other, mode, flush):
    old = engine.version
    running = begun(engine)
    engine.pause(mode)
    assert update(engine, other, "2", flush_cache=flush).status_code == 200
    assert engine.version == "2"
    engine.go_on()
    final = ended_later(engine, running)
    (first, _, middle), (second, start, end) = spans(final)
    assert (first, second) == (old, "2") and 0 < middle == start and end == len(final["output_ids"])
    assert final["meta_info"]["weight_version"] == "2"


def test_a_flush_that_an_in_place_pause_forbids_fails_though_the_weights_changed(engine, other):
    old = engine.version
    running = begun(engine)
    engine.pause("in_place")
    answer = update(engine, other, "2", flush_cache=True)
    assert answer.status_code == 400 and answer.json()["success"] is False
    assert answer.json()["message"].startswith(UNFLUSHED)
    engine.go_on()
    assert [version for version, _, _ in spans(ended_later(engine, running))] == [old, "2"]
    engine.update(model_path=other, weight_version="3")  # a whole one, after which all agree again
    assert engine.version == "3"


def test_an_update_without_a_pause_waits_for_what_runs_and_holds_what_comes(engine, other):
    old = engine.version
    running = begun(engine, 600)
    engine.update(model_path=other, weight_version="2")
    final = running.final()
    assert spans(final) == [(old, 0, 600)]
    assert spans(engine.answer(3)) == [("2", 0, 3)]


def test_an_update_can_abort_what_runs(engine, other):
    old = engine.version
    running = begun(engine)
    assert update(engine, other, "2", abort_all_requests=True).status_code == 200
    final = running.final()
    assert final["meta_info"]["finish_reason"]["type"] == "abort" and len(final["output_ids"]) > 0
    assert {version for version, _, _ in spans(final)} == {old}


def test_a_new_label_aborts_what_runs(engine):
    running = begun(engine)
    answer = engine.post("/update_weight_version", new_version="5")
    assert answer.json() == {"success": True, "message": "Weight version updated to 5", "new_version": "5"}
    final = running.final()
    assert final["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(final["output_ids"]) < LONG


def test_a_new_label_can_leave_what_runs(engine):
    old = engine.version
    running = begun(engine)
    assert engine.post("/update_weight_version", new_version="5", abort_all_requests=False).status_code == 200
    assert engine.version == "5"
    final = ended_later(engine, running)
    assert [version for version, _, _ in spans(final)] == [old, "5"]
    assert spans(final)[-1][2] == len(final["output_ids"])
    assert engine.answer(2, input_ids=PROMPT)["meta_info"]["weight_version"] == "5"
