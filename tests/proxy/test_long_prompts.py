"""Long prompts: refused by length where they cannot fit, and encoded without holding up anyone else."""

import threading
import time

import httpx
import pytest
from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Message
from gyre_proxy.errors import ContextOverflow
from gyre_proxy.prompts import LONG_TEXT
from gyre_proxy.server import BODY_FLOOR
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_stage import DEADLINE_S

SHORT = {"messages": [{"role": "user", "content": "go"}]}
PATHS = ["messages", "messages/count_tokens", "chat/completions", "responses"]


def body(path, text):
    return {"input": text} if path == "responses" else {"messages": [{"role": "user", "content": text}]}


@pytest.fixture
def counted(monkeypatch):
    """Lengths of the texts that were encoded."""
    lengths, encode = [], Codec._encode

    def watch(codec, text, mark):
        lengths.append(len(text))
        return encode(codec, text, mark)

    monkeypatch.setattr(Codec, "_encode", watch)
    return lengths


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_cannot_fit_is_refused_without_being_encoded(scene, counted, path):
    proxy, engine = scene(["no"], context_length=100)
    answer = proxy.post(path, body(path, "word " * 10**5))
    assert answer.status_code == 400 and "prompt is too long: " in answer.json()["error"]["message"]
    assert counted == [] and engine.requests == []


def test_a_turn_that_cannot_follow_is_refused_without_being_encoded(scene, counted):
    proxy, _ = scene(["Hello."], context_length=100)
    first = proxy.post("chat/completions", SHORT).json()["choices"][0]["message"]
    counted.clear()
    long = {"messages": [*SHORT["messages"], first, {"role": "user", "content": "word " * 10**4}]}
    answer = proxy.post("chat/completions", long)
    assert answer.json()["error"]["code"] == "context_length_exceeded" and counted == []


def test_the_beginning_of_an_answer_that_cannot_fit_is_refused_without_being_encoded(scene, counted):
    proxy, engine = scene(["no"], context_length=100)
    begun = {"messages": [*SHORT["messages"], {"role": "assistant", "content": "word " * 10**5 + "end"}]}
    for path in ("messages", "messages/count_tokens"):
        answer = proxy.post(path, begun)
        assert answer.status_code == 400 and "prompt is too long: " in answer.json()["error"]["message"]
    assert max(counted) < 1000 and engine.requests == []


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60), st.integers(1, 30))
def test_what_fits_is_never_refused_by_its_length(codec, text, times):
    messages = (Message("user", text * times),)
    ids = codec.encode_prompt(messages)
    assert codec.encode_prompt(messages, limit=len(ids)) == ids
    suffix = codec.encode_suffix(messages, -1)
    assert codec.encode_suffix(messages, -1, known=7, limit=len(suffix) + 7) == suffix
    with pytest.raises(ContextOverflow):
        codec.encode_suffix(messages, -1, known=7, limit=6)


def test_encoding_leaves_the_interpreter_to_others(codec):
    spent, longest = [], 0.0

    def encode():
        begun = time.perf_counter()
        codec.encode_prompt((Message("user", "abc d" * 10**5),))
        spent.append(time.perf_counter() - begun)

    last = time.perf_counter()
    worker = threading.Thread(target=encode)
    worker.start()
    while not spent:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    longest = max(longest, time.perf_counter() - last)
    worker.join(DEADLINE_S)
    assert longest < spent[0] / 2


@pytest.fixture
def held(monkeypatch):
    """(entered, release): the encoding of long prompts stops between the two."""
    entered, release, encode = threading.Event(), threading.Event(), Codec._encode

    def hold(codec, text, mark):
        if len(text) > LONG_TEXT:
            entered.set()
            assert release.wait(DEADLINE_S)
        return encode(codec, text, mark)

    monkeypatch.setattr(Codec, "_encode", hold)
    yield entered, release
    release.set()


def in_background(proxy):
    answers = []
    long = body("messages", "word " * (LONG_TEXT // 4))
    client = threading.Thread(target=lambda: answers.append(proxy.post("messages", long)))
    client.start()
    return client, answers


def test_others_are_served_while_a_long_prompt_is_encoded(scene, held):
    entered, release = held
    proxy, _ = scene(["Hello."], context_length=10**6)
    client, answers = in_background(proxy)
    assert entered.wait(DEADLINE_S)
    assert httpx.get(f"{proxy.url}/health", timeout=5).status_code == 200
    assert proxy.post("messages", SHORT, "other").status_code == 200
    release.set()
    client.join(DEADLINE_S)
    assert answers[0].status_code == 200 and len(proxy.calls()) == 2


def test_an_execution_closed_while_its_prompt_is_encoded_starts_no_call(scene, held):
    entered, release = held
    proxy, engine = scene(["Hello."], context_length=10**6)
    client, answers = in_background(proxy)
    assert entered.wait(DEADLINE_S)
    assert proxy.admin("POST", "executions/e/close", {}) == {"calls": 0}
    release.set()
    client.join(DEADLINE_S)
    assert answers[0].status_code == 410 and engine.requests == [] and proxy.calls() == []


def test_a_body_larger_than_any_prompt_needs_is_refused(scene):
    proxy, _ = scene(["no"])
    answer = httpx.post(f"{proxy.url}/x/e/v1/messages", content=b" " * (BODY_FLOOR + 1), timeout=DEADLINE_S)
    assert answer.status_code == 413 and str(BODY_FLOOR) in answer.json()["error"]["message"]
