"""Pauses: what stands still, what goes on after, and what an abort does meanwhile. The same for every engine."""

import httpx
import pytest
from conformance_engines import LONG, Running, begun, connection, ended_later, request, until

SOON_S = 0.5
MODES = ("retract", "in_place")


def abort(engine, rid: str) -> None:
    assert engine.post("/abort_request", rid=rid).status_code == 200


@pytest.mark.parametrize("mode", [*MODES, "abort"])
def test_a_pause_holds_new_requests_until_continued(engine, mode):
    engine.pause(mode)
    held = Running(engine, 5)
    assert engine.client.get("/ready").status_code == 503
    assert engine.client.get("/ping").status_code == 200
    assert engine.info()["weight_version"]
    with pytest.raises(httpx.ReadTimeout):
        engine.client.get("/health", timeout=SOON_S)  # it waits for a sign of life, which a pause holds too
    assert not held.done
    engine.go_on()
    assert len(held.final()["output_ids"]) == 5
    assert [engine.client.get(path).status_code for path in ("/ready", "/health")] == [200, 200]


@pytest.mark.parametrize("mode", MODES)
def test_what_runs_stands_still_and_goes_on(engine, mode):
    running = begun(engine)
    engine.pause(mode)

    def arrived() -> int:
        """How many events there are after a while, in which a held request gets no answer."""
        with pytest.raises(httpx.ReadTimeout):
            engine.client.post("/generate", json=request(1), timeout=SOON_S)
        return len(running.events)

    until(lambda: arrived() == arrived())  # what was on its way when the pause was answered may come late
    assert not running.done
    stood = running.events[-1]["meta_info"]["completion_tokens"]
    engine.go_on()
    final = ended_later(engine, running)
    meta, ids = final["meta_info"], final["output_ids"]
    assert stood < len(ids) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert meta["finish_reason"]["type"] == "abort" and meta["num_retractions"] == (mode == "retract")


@pytest.mark.parametrize("mode", MODES)
def test_what_stood_still_ends_as_if_it_had_not(engine, mode):
    running = begun(engine, 1200)
    engine.pause(mode)
    engine.go_on()
    final = running.final()
    assert len(final["output_ids"]) == 1200
    assert final["meta_info"]["finish_reason"] == {"type": "length", "length": 1200}


@pytest.mark.parametrize("body", [{"mode": "abort"}, {}])
def test_a_pause_by_abort_ends_all_with_what_they_have(engine, body):
    running = begun(engine)
    assert engine.post("/pause_generation", **body).status_code == 200
    final = running.final()
    assert final["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(final["output_ids"]) < LONG
    assert engine.client.get("/ready").status_code == 503


@pytest.mark.parametrize("mode", [*MODES, "abort"])
def test_pausing_and_continuing_twice_is_like_once(engine, mode):
    engine.pause(mode)
    engine.pause(mode)
    engine.go_on()
    engine.go_on()
    assert len(engine.answer(3)["output_ids"]) == 3


def test_a_retracted_stream_is_aborted_at_once_with_what_it_delivered(engine):
    running = begun(engine)
    engine.pause("retract")
    abort(engine, running.rid)
    final = running.final()
    meta, count = final["meta_info"], len(final["output_ids"])
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert 0 < count < LONG and meta["completion_tokens"] == count == len(meta["output_token_logprobs"])


def test_a_retracted_call_that_is_aborted_has_lost_what_came_after_its_last_50_tokens(engine):
    running = Running(engine, LONG)
    begun(engine)
    engine.pause("retract")
    abort(engine, running.rid)
    final = running.final()
    assert final["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    meta, ids = final["meta_info"], final["output_ids"]
    assert len(ids) % 50 == 0 and len(ids) < LONG and meta["completion_tokens"] == len(ids)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert meta["weight_versions"] == [{"version": engine.version, "start": 0, "end": len(ids)}]


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_during_an_in_place_pause_takes_effect_after_it(engine, stream):
    running = begun(engine) if stream else Running(engine, LONG)
    begun(engine)
    engine.pause("in_place")
    abort(engine, running.rid)
    with pytest.raises(AssertionError, match="not answered"):
        running.final(SOON_S)
    engine.go_on()
    final = running.final()
    assert final["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(final["output_ids"]) < LONG


@pytest.mark.parametrize("mode", [*MODES, "abort"])
def test_an_abort_of_a_request_that_a_pause_holds_is_lost(engine, mode):
    engine.pause(mode)
    body = request(4, rid=f"held-{mode}")
    with connection(engine, body) as held:
        abort(engine, body["rid"])
        assert engine.post("/abort_request", abort_all=True).status_code == 200
        engine.go_on()
        answer = b""
        while b'"length":4' not in answer.replace(b" ", b""):
            piece = held.recv(65536)
            assert piece, answer
            answer += piece


def test_a_cache_can_be_flushed_unless_something_holds_its_place(engine):
    running = begun(engine)
    engine.pause("in_place")
    assert engine.post("/flush_cache").status_code == 400
    engine.pause("retract")
    assert engine.post("/flush_cache").status_code == 200
    abort(engine, running.rid)
    running.final()
