"""How requests end before their time, and what is kept of them. The same for every engine."""

import pytest
from conformance_engines import LONG, Running, connection, request, until

REASON = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
FITTING = 800
"""Tokens that each of as many requests as may run at once can have: a real server admits no more than fit its cache."""

QUEUED = {"type": "abort", "message": "Abort in waiting queue"}


def abort(engine, **body: object) -> None:
    assert engine.post("/abort_request", **body).status_code == 200


def check_partial(engine, final: dict, most: int = LONG) -> None:
    meta, count = final["meta_info"], len(final["output_ids"])
    assert meta["finish_reason"] == REASON
    assert 0 < count < most and meta["completion_tokens"] == count
    assert [entry[1] for entry in meta["output_token_logprobs"]] == final["output_ids"]
    assert meta["weight_versions"] == [{"version": engine.version, "start": 0, "end": count}]


def test_an_aborted_stream_keeps_its_partial_output(engine):
    running = Running(engine, LONG, stream=True).began()
    abort(engine, rid=running.rid)
    check_partial(engine, running.final())


def test_an_aborted_call_keeps_its_partial_output(engine):
    running = Running(engine, LONG)
    Running(engine, 1, stream=True).began()  # came later and has run, so the first one runs
    abort(engine, rid=running.rid)
    check_partial(engine, running.final())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_waits_is_aborted_empty(engine, stream):
    running = [Running(engine, FITTING, stream=True) for _ in range(engine.max_running)]
    for call in running:
        call.began()
    waiting = Running(engine, 5, stream=stream)
    refuse = Running(
        engine, 5, rid=waiting.rid
    )  # an id in use is refused, so the first of the two has arrived
    until(lambda: waiting.done or refuse.done)
    first = waiting if refuse.done else refuse
    until(lambda: abort(engine, rid=waiting.rid) or first.done)
    final = first.final()
    assert final["output_ids"] == [] and final["meta_info"]["finish_reason"] == QUEUED
    assert final["meta_info"]["completion_tokens"] == 0
    assert "prompt_tokens" not in final["meta_info"] and "cached_tokens" not in final["meta_info"]
    abort(engine, abort_all=True)
    for call in running:
        check_partial(engine, call.final())


def test_aborting_what_is_not_there_is_fine(engine):
    running = Running(engine, LONG, stream=True).began()
    for body in ({"rid": "never-seen"}, {"rid": running.rid[:-1]}, {"rid": ""}, {}):
        abort(engine, **body)
    seen = len(running.events)
    until(lambda: len(running.events) > seen + 1)
    abort(engine, rid=running.rid)
    check_partial(engine, running.final())


def test_an_abort_takes_every_id_that_begins_with_its_own(engine):
    first = Running(engine, LONG, stream=True).began()
    longer = Running(engine, LONG, stream=True, rid=first.rid + "0").began()
    abort(engine, rid=first.rid)
    check_partial(engine, first.final())
    check_partial(engine, longer.final())


def test_an_abort_leaves_the_others_alone(engine):
    other, running = (Running(engine, 60, stream=True), Running(engine, LONG, stream=True).began())
    abort(engine, rid=running.rid)
    check_partial(engine, running.final())
    assert len(other.final()["output_ids"]) == 60


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_aborts_its_request(engine, stream):
    def flush() -> int:
        """200 only while nothing runs."""
        return engine.post("/flush_cache").status_code

    engine.flush()
    with connection(engine, request(LONG, stream=stream)) as dropped:
        if stream:
            assert dropped.recv(1)
        until(lambda: flush() == 400)
    until(lambda: flush() == 200)
