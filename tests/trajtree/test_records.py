import numpy as np
import orjson
import pytest
from gyre_trajtree import (
    Assessment,
    Call,
    Event,
    Execution,
    Header,
    RecordError,
    Unknown,
    from_line,
    to_line,
)
from hypothesis import given
from hypothesis import strategies as st

token = st.integers(0, 2**31 - 1)
logprob = st.one_of(st.none(), st.floats(-100, 0, width=32))
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
name = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@st.composite
def calls(draw):
    output = draw(st.lists(token, max_size=8))
    cut = draw(st.integers(0, len(output)))
    return Call(
        id=draw(name),
        execution=draw(name),
        parent=draw(st.none() | name),
        input_ids=draw(st.lists(token, max_size=8)),
        output_ids=output,
        logprobs=draw(st.none() | st.lists(logprob, min_size=len(output), max_size=len(output))),
        versions=draw(st.sampled_from([[], [[3, 0, cut], [4, cut, len(output)]]])),
        evidence=draw(st.dictionaries(text, text, max_size=2)),
        extra=draw(st.sampled_from([{}, {"later": [1, None]}])),
    )


@given(calls(), st.booleans())
def test_a_call_survives_its_line_bit_for_bit(call, packed):
    line = to_line(call, packed)
    again = from_line(line)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert to_line(again, packed) == line
    for name in ("input_ids", "output_ids"):
        assert getattr(again, name).dtype == np.int32
        assert np.array_equal(getattr(again, name), getattr(call, name))
    assert again.logprobs.dtype == np.float32
    assert np.array_equal(again.logprobs, call.logprobs, equal_nan=True)


@pytest.mark.parametrize(
    "record",
    [
        Header(created=1.5, meta={"seed": 0}, extra={"host": "h"}),
        Execution("x", "opened", group="g", task="t", dispatch_version=3, deadline=9.0, time=1.0),
        Execution("x", "closed", termination="timeout", error="took too long", extra={"rusage": {}}),
        Assessment("x", "valid", 0.0, artifact="a", attempt=2, designated=False, time=4.0),
        Assessment("x", "unresolved", detail="evaluator crashed"),
        Event("step", 2.0, {"loss": 0.5, "cell": 0}),
        Unknown("snapshot", {"path": "p"}),
    ],
)
def test_every_record_survives_its_line(record):
    assert from_line(to_line(record)) == record


def test_fields_of_a_call_are_those_of_the_contract():
    line = orjson.loads(to_line(Call("c", "x", [1, 2], [3], logprobs=[-0.25], versions=[[7, 0, 1]])))
    assert line == {
        "type": "call",
        "id": "c",
        "execution": "x",
        "parent": None,
        "input_ids": [1, 2],
        "output_ids": [3],
        "logprobs": [-0.25],
        "versions": [[7, 0, 1]],
        "sampling": {},
        "finish": "stop",
        "engine": None,
        "time": {},
        "digest": None,
        "hints": {},
        "evidence": {},
        "attempt_of": None,
    }


def test_a_packed_array_is_base64_little_endian():
    packed = orjson.loads(to_line(Call("c", "x", [258], [1], logprobs=[None]), packed=True))
    assert packed["input_ids"] == {"b64": "AgEAAA==", "dtype": "i4"}
    assert packed["logprobs"]["dtype"] == "f4"
    assert np.isnan(from_line(to_line(Call("c", "x", [258], [1], logprobs=[None]), packed=True)).logprobs[0])


def test_versions_spread_over_output_tokens():
    call = Call("c", "x", [1], [2, 3, 4, 5], versions=[[8, 1, 2], [9, 2, 4]])
    assert call.token_versions().tolist() == [-1, 8, 9, 9]


def test_only_a_resolved_assessment_supplies_a_reward():
    assert Assessment("x", "valid", 0.0).reward() == 0.0
    assert Assessment("x", "placeholder").reward() == 0.0
    assert Assessment("x", "unresolved", 0.7).reward() is None


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(RecordError, match="JSON"):
        to_line(Event("odd", 0.0, {"value": object()}))
    with pytest.raises(RecordError, match="reserved"):
        to_line(Event("odd", 0.0, {"type": "call"}))
