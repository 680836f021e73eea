"""Engines, routes, keys."""

import pytest
from gyre_proxy.capability import execution_of, issue, valid_execution, verify
from gyre_proxy.errors import Forbidden, ProxyError, Unauthorised
from gyre_proxy.router import REST_S, Engine, Router
from hypothesis import given
from hypothesis import strategies as st

A, B = "http://a", "http://b"
SECRET = b"secret"


def test_an_execution_stays_on_its_engine_and_new_ones_go_to_the_least_loaded():
    router = Router([Engine(A), Engine(B)])
    first = router.pick("one", 0)
    router.begin(first)
    second = router.pick("two", 0)
    assert {first.url, second.url} == {A, B}
    assert router.pick("one", 0) is first and router.pick("two", 0) is second


def test_idle_executions_are_spread_too():
    router = Router([Engine(A), Engine(B)])
    assert sorted(router.pick(f"e{i}", 0).url for i in range(6)) == [A] * 3 + [B] * 3


def test_no_call_goes_to_an_engine_that_does_not_admit():
    router = Router([Engine(A), Engine(B)])
    router.move({"e": A})
    router.stop_admitting(A)
    assert router.pick("e", 0).url == B
    router.stop_admitting(B)
    assert router.pick("e", 0) is None and router.due(0) is None


def test_a_failed_engine_rests_longer_each_time_and_recovers():
    router, now = Router([Engine(A)]), 0.0
    for rest in (*REST_S, REST_S[-1]):
        engine = router.pick("e", now)
        router.begin(engine)
        router.end(engine, False, now)
        assert router.pick("e", now) is None and router.due(now) == pytest.approx(rest)
        now += rest
    engine = router.pick("e", now)
    router.begin(engine)
    router.end(engine, True, now)
    assert (engine.failures, engine.in_flight) == (0, 0)


def test_calls_that_fail_together_are_one_failure():
    router = Router([Engine(A)])
    engine = router.pick("e", 0)
    for _ in range(20):
        router.begin(engine)
    for _ in range(20):
        router.end(engine, False, 0.0)
    assert (engine.failures, engine.rests_until) == (1, REST_S[0])


def test_a_new_table_keeps_load_and_lets_leaving_engines_finish():
    router = Router([Engine(A), Engine(B)])
    for url in (A, B):
        router.begin(router.engines[url])
    kept, leaving = router.engines[A], router.engines[B]
    router.replace([Engine(A, True, 7)])
    assert (kept.in_flight, kept.version, leaving.admitting) == (1, 7, False)
    router.end(leaving, True, 0)
    assert set(router.engines) == {A}


def test_a_key_opens_its_execution_until_it_expires():
    key = issue(SECRET, "e1", 100)
    assert verify(SECRET, key, 100) == "e1"
    with pytest.raises(Unauthorised, match="expired"):
        verify(SECRET, key, 101)


@given(st.text(max_size=40), st.integers(0, 60), st.characters(exclude_categories=("Cs",)))
def test_a_forged_key_opens_nothing(noise, position, character):
    key = issue(SECRET, "e1", 100)
    forged = [noise, "gyre-" + noise, issue(b"other", "e1", 100)]
    position %= len(key)
    if key[position] != character:
        forged.append(key[:position] + character + key[position + 1 :])
    for attempt in forged:
        with pytest.raises(Unauthorised):
            verify(SECRET, attempt, 0)


def test_a_key_does_not_open_another_execution_even_in_open_mode():
    key = issue(SECRET, "e1", 100)
    assert execution_of(SECRET, key, "e1", False, 0) == "e1"
    with pytest.raises(Forbidden):
        execution_of(SECRET, key, "e2", False, 0)


def test_strict_mode_wants_an_issued_key():
    assert execution_of(SECRET, issue(SECRET, "e1", 100), None, True, 0) == "e1"
    for key in (None, "sk-anything"):
        with pytest.raises(Unauthorised):
            execution_of(SECRET, key, "e1", True, 0)


def test_without_a_path_the_key_names_the_execution():
    assert execution_of(SECRET, "worker-7", None, False, 0) == "worker-7"
    assert execution_of(SECRET, None, None, False, 0) == "default"
    odd = execution_of(SECRET, "sk with / odd", None, False, 0)
    assert odd != execution_of(SECRET, "sk with / odder", None, False, 0)


@given(st.text(max_size=20) | st.none(), st.text(max_size=20) | st.none())
def test_every_execution_name_is_safe(key, path):
    try:
        name = execution_of(SECRET, key, path, False, 0)
    except ProxyError:
        return
    assert valid_execution(name)
