"""Stop strings end an answer at the token that completes them, whatever the engine knows of text."""

import json

import httpx
import pytest
from gyre_proxy.stopping import StopWatch, cut
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_stage import DEADLINE_S

USER = {"role": "user", "content": "go"}
TEXT = "The quick brown fox jumps over the lazy dog."


def chat(*messages, **more):
    return {"model": "m", "messages": list(messages), "stop": ["fly", "own fox ju"], **more}


def test_the_first_stop_string_wins_and_at_one_place_the_longest():
    assert cut("abcd", ("cd", "b")) == ("a", "b")
    assert cut("abcd", ("b", "bc")) == ("a", "bc")
    assert cut("abcd", ("x",)) == ("abcd", None) and cut("abcd", ()) == ("abcd", None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["a", "b", "ab", " the", "é", "☃"]), max_size=30),
    st.lists(st.text("ab é☃", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_a_watch_ends_with_the_token_that_completes_the_first_stop_string(codec, words, stops, sizes):
    ids = codec._tokenizer.encode("".join(words), add_special_tokens=False).ids
    watch, shown, position = StopWatch(codec, stops), "", 0
    for size in sizes * 6:
        shown += watch.feed(ids[position : position + size])
        position += size
    ends = [n for n in range(1, len(ids) + 1) if cut(codec.decode(ids[:n]), stops)[1] is not None]
    assert watch.end == (ends[0] if ends else None)
    text, _ = cut(codec.decode(ids[: watch.end]), stops)
    assert text.startswith(shown)
    assert len(text) - len(shown) < max(map(len, stops)) if watch.end is None else text == shown


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_its_stop_string_and_the_next_turn_extends_it(scene, codec, stream):
    proxy, engine = scene([TEXT, "more"])
    answer = proxy.post("chat/completions", chat(USER, stream=stream))
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        text = answer.json()["choices"][0]["message"]["content"]
    assert text == "The quick br"
    echo = {"role": "assistant", "content": text}
    proxy.post("chat/completions", chat(USER, echo, {"role": "user", "content": "more"}))
    first, second = proxy.calls()
    ids = first.output_ids.tolist()
    assert "own fox ju" in codec.decode(ids) and "own fox ju" not in codec.decode(ids[:-1])
    assert first.finish == "stop" and first.versions == [[0, 0, len(ids)]] and len(first.logprobs) == len(ids)
    assert first.sampling["stop"] == ["fly", "own fox ju"]
    assert "stop" not in engine.requests[0]["sampling_params"]
    assert second.parent == first.id and second.input_ids[0] == codec.turn_end
    assert engine.requests[1]["input_ids"] == first.input_ids.tolist() + ids + second.input_ids.tolist()


def test_the_engine_is_let_go_at_the_stop_string(scene):
    proxy, engine = scene([TEXT])
    engine.hold_after = 40  # it would sample on
    answer = proxy.post("chat/completions", chat(USER, stop="quick"))
    assert answer.json()["choices"][0]["message"]["content"] == "The "
    assert [e["in_flight"] for e in proxy.admin("GET", "status")["engines"].values()] == [0]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_name_the_stop_sequence(scene, stream):
    proxy, _ = scene([TEXT])
    body = {"model": "m", "messages": [USER], "stop_sequences": ["jumps"], "stream": stream, "max_tokens": 99}
    answer = httpx.post(f"{proxy.url}/x/e/v1/messages", json=body, timeout=DEADLINE_S)
    if not stream:
        end = answer.json()
    else:
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        end = next(event["delta"] for event in events if event["type"] == "message_delta")
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", "jumps")


def test_an_answer_without_its_stop_string_is_whole(scene):
    proxy, _ = scene([TEXT])
    answer = proxy.post("chat/completions", chat(USER, stop=["fly", "dog. "])).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (TEXT, "stop")
