"""Which executions are open, and that memory stays that of the executions in use."""

import tracemalloc

import numpy as np
import pytest
from gyre_proxy.conversation import Conversation, Message
from gyre_proxy.errors import ExecutionClosed
from gyre_proxy.executions import IDLE_S, KEY_LIFETIME_S, SWEEP_S, Executions
from gyre_proxy.router import Engine, Router
from gyre_proxy.sessions import Node, ids_json
from hypothesis import given
from hypothesis import strategies as st

LATER = 10 * SWEEP_S


@pytest.fixture
def forgotten():
    return []


@pytest.fixture
def executions(forgotten):
    return Executions(forgotten.append)


def record(session, tokens):
    """Commit one call of that many tokens."""
    match = session.match(Conversation((Message("user", f"turn {session.calls}"),)))
    ids = np.zeros(tokens, np.int32)
    node = Node(f"c{session.calls}", None, ids, ids_json(ids), tokens, (), "")
    answer = Message("assistant", "ok")
    session.remember(node.id, match.digest, session.context(match, answer), node, (), False)


def test_an_ended_execution_is_refused_and_its_route_forgotten(executions, forgotten):
    session = executions.open("e", 1000.0, 0.0)
    record(session, 3)
    assert executions.stop("e") is session
    for _ in range(2):
        with pytest.raises(ExecutionClosed):
            executions.use("e", 1.0)
        assert executions.end("e", 1.0) == 1
    assert forgotten == ["e"] and len(executions) == 0 and not executions.is_open("e", 1.0)


def test_an_execution_past_its_deadline_is_refused_and_freed(executions, forgotten):
    executions.open("e", 100.0, 0.0)
    assert executions.is_open("e", 99.0)
    for now in (100.0, 100.0 + LATER):
        with pytest.raises(ExecutionClosed):
            executions.use("e", now)
    assert forgotten == ["e"] and len(executions) == 0
    assert executions.stop("e") is None and executions.end("e", 200.0) == 0


def test_an_execution_with_a_call_under_way_is_kept_past_its_deadline(executions, forgotten):
    session = executions.open("e", 100.0, 0.0)
    session.in_flight = 1
    executions.is_open("other", LATER)
    assert forgotten == []
    session.in_flight = 0
    executions.is_open("other", 2 * LATER)
    assert forgotten == ["e"]


def test_an_idle_execution_of_open_mode_starts_anew(executions, forgotten):
    first = executions.use("e", 0.0)
    assert executions.use("e", IDLE_S - 1) is first
    assert executions.use("e", 2 * IDLE_S - 2) is first
    assert executions.use("e", 4 * IDLE_S) is not first
    assert forgotten == ["e"]


def test_a_closed_execution_is_refused_as_long_as_a_key_of_it_lives(executions):
    executions.open("e", 3 * KEY_LIFETIME_S, 0.0)
    executions.stop("e")
    executions.end("e", 1.0)
    with pytest.raises(ExecutionClosed):
        executions.use("e", 3 * KEY_LIFETIME_S - 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "use", "stop", "end"]),
            st.integers(0, 5),
            st.floats(0, KEY_LIFETIME_S / 2),
        ),
        max_size=40,
    )
)
def test_an_ended_execution_never_comes_back(plan):
    executions, ended, now = Executions(lambda name: None), set(), 0.0
    for what, number, step in plan:
        name, now = f"e{number}", now + step / 20
        try:
            if what == "open":
                executions.open(name, now + KEY_LIFETIME_S, now)
            elif what == "use":
                executions.use(name, now)
            else:
                executions.stop(name)
                ended.add(name)
                if what == "end":
                    executions.end(name, now)
        except ExecutionClosed:
            assert name in ended
        else:
            assert what in ("stop", "end") or name not in ended


def test_memory_is_that_of_the_executions_in_use():
    """Ten days of executions that are closed, expire, or are left: the tenth day needs what the second did."""
    router = Router([Engine("http://a"), Engine("http://b")])
    executions, peaks = Executions(router.forget), []
    tracemalloc.start()
    for day in range(10):
        for hour in range(24):
            now = (24.0 * day + hour) * 3600.0
            for how in ("closed", "expires", "left"):
                name = f"{how}-{day}-{hour}"
                session = (
                    executions.use(name, now) if how == "left" else executions.open(name, now + 1800, now)
                )
                router.pick(name, now)
                record(session, 10_000)
                if how == "closed":
                    executions.stop(name)
                    executions.end(name, now)
        peaks.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert peaks[9] < 1.1 * peaks[1]
    assert len(executions) <= 8
    assert sum(router._loads[url] for url in router.engines) == len(executions)
