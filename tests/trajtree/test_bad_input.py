"""What breaks the format: a typed error in one line, never a crash in numpy, never a silent repair."""

import math

import numpy as np
import orjson
import pytest
from gyre_trajtree import (
    Assessment,
    Call,
    Event,
    Execution,
    Header,
    Ledger,
    RecordError,
    RunLogIndex,
    RunLogWriter,
    TrajtreeError,
    Unknown,
    executions,
    from_line,
    read_run_log,
    sample_run,
    to_line,
)
from hypothesis import given
from hypothesis import strategies as st

GOOD = {
    "header": {"type": "header", "format": "gyre-run-log", "version": 1},
    "execution": {"type": "execution", "id": "x", "state": "opened"},
    "call": {"type": "call", "id": "c", "execution": "x", "input_ids": [1, 2], "output_ids": [3, 4]},
    "assessment": {"type": "assessment", "execution": "x", "status": "valid", "score": 1.0},
    "event": {"type": "event", "name": "step", "time": 1.0},
}

BAD_CALLS = [
    ({"input_ids": [1.5]}, "integers"),
    ({"input_ids": [1.0]}, "integers"),
    ({"input_ids": [1, True]}, "integers"),
    ({"input_ids": [True]}, "integers"),
    ({"input_ids": [[1], [2]]}, "flat"),
    ({"input_ids": [[1], [2, 3]]}, "flat"),
    ({"input_ids": [[]]}, "flat"),
    ({"input_ids": [1, None]}, "integers"),
    ({"input_ids": ["1"]}, "integers"),
    ({"input_ids": "12"}, "integers"),
    ({"input_ids": 12}, "integers"),
    ({"input_ids": True}, "integers"),
    ({"input_ids": None}, "integers"),
    ({"output_ids": None}, "integers"),
    ({"input_ids": [-1]}, "outside"),
    ({"input_ids": [2**31]}, "outside"),
    ({"input_ids": [2**63]}, "outside"),
    ({"input_ids": [2**64 - 1, 1]}, "outside"),
    ({"input_ids": {}}, "packed"),
    ({"input_ids": {"b64": "AAAA", "dtype": "i4"}}, "base64"),
    ({"input_ids": {"b64": "AAAAA", "dtype": "i4"}}, "base64"),
    ({"input_ids": {"b64": "AAA AAA==", "dtype": "i4"}}, "base64"),
    ({"input_ids": {"b64": 7, "dtype": "i4"}}, "base64"),
    ({"input_ids": {"b64": "ÄÖÜ", "dtype": "i4"}}, "base64"),
    ({"input_ids": {"b64": "AAAAAA==", "dtype": "i8"}}, "i4"),
    ({"input_ids": {"b64": "AAAAAA==", "dtype": ["i4"]}}, "i4"),
    ({"input_ids": {"b64": "AAAAAA=="}}, "i4"),
    ({"input_ids": {"b64": "AAAAAA==", "dtype": "i4", "encoding": "zstd"}}, "i4"),
    ({"input_ids": {"b64": "/////w==", "dtype": "i4"}}, "outside"),
    ({"logprobs": [-1.0]}, "1 logprobs for 2 output_ids"),
    ({"logprobs": [-1.0, -2.0, -3.0]}, "3 logprobs for 2 output_ids"),
    ({"logprobs": []}, "0 logprobs for 2 output_ids"),
    ({"logprobs": {"b64": "AAAAAA==", "dtype": "f4"}}, "1 logprobs for 2 output_ids"),
    ({"logprobs": ["low", "lower"]}, "numbers"),
    ({"logprobs": [-1.0, True]}, "numbers"),
    ({"logprobs": [[-1.0], [-2.0]]}, "numbers"),
    ({"logprobs": -1.0}, "numbers"),
    ({"logprobs": "-1.0"}, "numbers"),
    ({"logprobs": [0.9, -0.1]}, "0.9"),
    ({"logprobs": [2, -0.1]}, "natural logarithms"),
    ({"logprobs": [-1e300, -0.1]}, "-inf"),
    ({"logprobs": [2**63, -1.0]}, "natural logarithms"),
    ({"logprobs": {"b64": "AACAfwAAgH8=", "dtype": "f4"}}, "inf"),
    ({"logprobs": {"b64": "AACA/wAAgL8=", "dtype": "f4"}}, "-inf"),
    ({"versions": [[1, 0, 3]]}, "passes"),
    ({"versions": [[1, 0, 1], [2, 0, 1]]}, "overlaps"),
    ({"versions": [[1, 1, 0]]}, "overlaps"),
    ({"versions": [[1, -1, 1]]}, "overlaps"),
    ({"versions": [[1, 0]]}, "three integers"),
    ({"versions": [1, 0, 2]}, "three integers"),
    ({"versions": [[1, 0, True]]}, "three integers"),
    ({"versions": [[1.0, 0, 2]]}, "three integers"),
    ({"versions": [["1", 0, 2]]}, "three integers"),
    ({"versions": [None]}, "three integers"),
    ({"versions": [[-1, 0, 2]]}, "weight version"),
    ({"versions": [[2**31, 0, 2]]}, "weight version"),
    ({"versions": None}, "'versions'"),
    ({"versions": {}}, "'versions'"),
    ({"id": 5}, "'id'"),
    ({"id": None}, "'id'"),
    ({"id": ""}, "'id' is empty"),
    ({"execution": None}, "'execution'"),
    ({"execution": ""}, "'execution' is empty"),
    ({"execution": ["x"]}, "'execution'"),
    ({"parent": 7}, "'parent'"),
    ({"parent": False}, "'parent'"),
    ({"finish": "tool_calls"}, "stop, length"),
    ({"finish": None}, "'finish'"),
    ({"sampling": []}, "'sampling'"),
    ({"hints": "agent"}, "'hints'"),
    ({"evidence": None}, "'evidence'"),
    ({"time": {"start": "now"}}, "'start'"),
    ({"time": {"start": True}}, "'start'"),
    ({"time": 1.0}, "'time'"),
    ({"engine": 1}, "'engine'"),
    ({"attempt_of": 1}, "'attempt_of'"),
]

BAD_OTHERS = [
    ("header", {"format": None}, "'format'"),
    ("header", {"version": "1"}, "'version'"),
    ("header", {"version": True}, "'version'"),
    ("header", {"version": 1.0}, "'version'"),
    ("header", {"created": "today"}, "'created'"),
    ("header", {"meta": []}, "'meta'"),
    ("execution", {"id": ""}, "'id' is empty"),
    ("execution", {"id": None}, "'id'"),
    ("execution", {"state": "paused"}, "opened, closed"),
    ("execution", {"state": None}, "'state'"),
    ("execution", {"termination": "done"}, "completed"),
    ("execution", {"group": 3}, "'group'"),
    ("execution", {"dispatch_version": True}, "'dispatch_version'"),
    ("execution", {"dispatch_version": 1.5}, "'dispatch_version'"),
    ("execution", {"deadline": "soon"}, "'deadline'"),
    ("execution", {"deadline": False}, "'deadline'"),
    ("assessment", {"execution": ""}, "'execution' is empty"),
    ("assessment", {"status": "good"}, "unresolved"),
    ("assessment", {"score": None}, "needs a score"),
    ("assessment", {"score": True}, "'score'"),
    ("assessment", {"score": "1"}, "'score'"),
    ("assessment", {"score": [1.0]}, "'score'"),
    ("assessment", {"attempt": None}, "'attempt'"),
    ("assessment", {"attempt": 1.0}, "'attempt'"),
    ("assessment", {"designated": 1}, "'designated'"),
    ("assessment", {"designated": None}, "'designated'"),
    ("assessment", {"status": "placeholder", "score": 0.5}, "placeholder"),
    ("event", {"name": None}, "name"),
    ("event", {"time": "now"}, "time"),
    ("event", {"time": True}, "time"),
]

BAD_LINES = [
    (b"", "JSON"),
    (b"\xff\xfe", "JSON"),
    (b'{"type":"event","name":"\xff"}', "JSON"),
    (b'\xef\xbb\xbf{"type":"event","name":"a"}', "JSON"),
    (b'{"type":"event","name":"\\ud800"}', "JSON"),
    (b'{"type":"event","name":"a","value":NaN}', "JSON"),
    (b'{"type":"event","name":"a","value":1e400}', "JSON"),
    (b'{"type":"event","name":"a",}', "JSON"),
    (b"\0" * 64, "JSON"),
    (b"nonsense", "JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    (b'"call"', "object"),
    (b"{}", "type"),
    (b'{"type":1}', "type"),
    (b'{"type":null}', "type"),
    (b'{"type":"call"}', "missing"),
    (b'{"type":"event"}', "missing"),
    (b'{"type":"header","created":1.0}', "missing"),
    (b'{"type":"header","format":"gyre-run-log"}', "missing"),
    (b"[" * 100_000, "JSON"),
    (b'{"type":"event","name":"a","deep":' + b"[" * 1_000 + b"]" * 1_000 + b"}", "deep"),
    (b'{"type":"event","name":"a","deep":' + b'{"a":' * 1_000 + b"1" + b"}" * 1_000 + b"}", "deep"),
    (b'{"type":"event","name":"a","name":"b"}', "'name' is given twice"),
    (b'{"type":"event","name":"a","name" : "b"}', "'name' is given twice"),
    (b'{"type":"event","name":"a","n\\u0061me":"b"}', "'name' is given twice"),
    (b'{"type":"event","name":"a","v":[{"k":1,"k":2}]}', "'k' is given twice"),
    (b'{"type":"event","name":"a","k\\\\":1,"k\\\\":2}', "given twice"),
    (b'{"type":"call","id":"c","execution":"x","execution":"y","input_ids":[1],"output_ids":[]}', "twice"),
]


def refused(line, said):
    with pytest.raises(RecordError) as refusal:
        from_line(line)
    message = str(refusal.value)
    assert said in message and "\n" not in message and len(message) < 200, message


@pytest.mark.parametrize("kind", GOOD)
def test_the_records_that_the_bad_ones_change_are_good(kind):
    assert from_line(orjson.dumps(GOOD[kind])).type == kind


@pytest.mark.parametrize("changes, said", BAD_CALLS)
def test_a_bad_call_is_refused_in_one_line(changes, said):
    refused(orjson.dumps(GOOD["call"] | changes), said)


@pytest.mark.parametrize("kind, changes, said", BAD_OTHERS)
def test_any_other_bad_record_is_refused_in_one_line(kind, changes, said):
    refused(orjson.dumps(GOOD[kind] | changes), said)


@pytest.mark.parametrize("line, said", BAD_LINES)
def test_a_line_that_is_no_record_is_refused_in_one_line(line, said):
    refused(line, said)


@pytest.mark.parametrize("kind", ["header", "execution", "call", "assessment"])
def test_every_required_field_is_required(kind):
    for name in GOOD[kind].keys() - {"type", "score"}:
        refused(
            orjson.dumps({key: GOOD[kind][key] for key in GOOD[kind] if key != name}), f"{name!r} is missing"
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Call("c", "x", np.array([1.0]), [2]),
        lambda: Call("c", "x", np.array([True]), [2]),
        lambda: Call("c", "x", np.array([[1]]), [2]),
        lambda: Call("c", "x", np.array([2**40]), [2]),
        lambda: Call("c", "x", np.array([2**63], np.uint64), [2]),
        lambda: Call("c", "x", np.array([1, "a"], object), [2]),
        lambda: Call("c", "x", [2**80], [2]),
        lambda: Call("c", "x", [1], [2], logprobs=[-(10**400)]),
        lambda: Call("c", "x", [1], [2], logprobs=np.array([True])),
        lambda: Call("c", "x", [1], [2], logprobs=np.array([-np.inf])),
        lambda: Call("c", "x", [1], [2], logprobs=np.array(["-1"])),
        lambda: Call("c", "x", [1], [2], logprobs=np.array(-1.0)),
        lambda: Call("c", "x", [1], [2], versions=((1, 0, 1),)),
        lambda: Call("c", "x", [1], [2], time={"end": math.nan}),
        lambda: Assessment("x", "valid", math.nan),
        lambda: Assessment("x", "valid", np.float32("inf")),
        lambda: Assessment("x", "unresolved", math.inf),
        lambda: Execution("x", "opened", deadline=math.inf),
        lambda: Execution(7, "opened"),
        lambda: Header(created=math.nan),
        lambda: Event("step", math.inf),
        lambda: Event(None),
        lambda: Unknown("call", {}),
    ],
)
def test_a_record_made_in_python_obeys_the_same_rules(make):
    """Otherwise a writer could put into the log what no reader takes out of it."""
    with pytest.raises(RecordError):
        make()


@pytest.mark.parametrize(
    "record, said",
    [
        (Event("odd", 0.0, {"value": object()}), "JSON"),
        (Event("odd", 0.0, {"value": 2**70}), "JSON"),
        (Event("odd", 0.0, {"value": "\ud800"}), "JSON"),
        (Event("odd", 0.0, {1: "key"}), "JSON"),
        (Event("odd", 0.0, {"type": "call"}), "reserved"),
        (Unknown("later", {"type": "call"}), "reserved"),
        (Execution("x", "opened", extra={"state": "closed"}), "reserved"),
        (Execution("\udfff", "opened"), "JSON"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_the_writer(record, said):
    with pytest.raises(RecordError, match=said):
        to_line(record)


def test_numpy_scalars_are_numbers_and_rounding_above_zero_is_no_fault():
    assert from_line(to_line(Assessment("x", "valid", np.float32(0.5)))).score == 0.5
    assert from_line(to_line(Call("c", "x", [np.int32(1)], [2], logprobs=[np.float32(1e-3)]))).logprobs[0] > 0


def test_empty_outputs_and_empty_prompts_are_calls():
    assert len(from_line(orjson.dumps(GOOD["call"] | {"output_ids": []})).output_ids) == 0
    assert len(from_line(orjson.dumps(GOOD["call"] | {"input_ids": []})).output_ids) == 2
    assert len(from_line(orjson.dumps(GOOD["call"] | {"output_ids": [], "input_ids": []})).input_ids) == 0
    assert len(from_line(orjson.dumps(GOOD["call"] | {"parent": "b", "input_ids": []})).output_ids) == 2


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
field_names = st.sampled_from(
    sorted({name for good in GOOD.values() for name in good} | {"logprobs", "versions"})
)


@st.composite
def objects(draw):
    """A good record with some fields changed to anything, or anything at all."""
    good = draw(st.sampled_from(list(GOOD.values())) | st.just({}))
    return good | draw(st.dictionaries(field_names | st.text(max_size=8), json_values, max_size=4))


@given(objects())
def test_any_object_is_a_record_that_round_trips_or_a_typed_error(raw):
    try:
        line = orjson.dumps(raw)
        record = from_line(line)
    except (RecordError, TypeError):
        return
    for packed in (False, True):
        again = to_line(record, packed)
        assert to_line(from_line(again), packed) == again
    kept = orjson.loads(to_line(record))
    for name, value in orjson.loads(line).items():
        if name == "logprobs" and isinstance(record, Call):
            assert np.array_equal(
                from_line(line).logprobs, from_line(to_line(record)).logprobs, equal_nan=True
            )
        else:
            assert kept[name] == value


@given(st.binary(max_size=60) | objects().map(lambda raw: repr(raw).encode()))
def test_any_bytes_are_a_record_or_a_typed_error(line):
    try:
        from_line(line)
    except RecordError as error:
        assert "\n" not in str(error)


@given(st.lists(objects(), max_size=6), st.integers(0, 40), st.booleans())
def test_a_log_of_anything_is_read_alike_by_every_reader(tmp_path_factory, raws, cut, headed):
    lines = [orjson.dumps(raw) for raw in raws if _writable(raw)]
    data = b"".join(line + b"\n" for line in ([orjson.dumps(GOOD["header"])] if headed else []) + lines)
    path = tmp_path_factory.getbasetemp() / "anything.jsonl"
    path.write_bytes(data[: max(len(data) - cut, 0)])
    assert _outcome(_read, path) == _outcome(_indexed, path)
    assert _outcome(_read, path, []) == _outcome(_indexed, path, [])


def _read(path, corrupt=None):
    return executions(read_run_log(path, corrupt))


def _indexed(path, corrupt=None):
    with RunLogIndex(path, corrupt) as index:
        return {recorded.id: recorded for recorded in index}


def _outcome(read, path, corrupt=None):
    """What a reader finds and which lines it reports; None where it refuses the log."""
    try:
        found = read(path, corrupt).values()
    except TrajtreeError:
        return None
    counts = {
        each.id: (len(each.states), len(each.calls), len(each.late), len(each.assessments), each.reward)
        for each in found
        if each.states or each.calls or each.assessments
    }
    return counts, {error.line for error in corrupt or []}


def _writable(raw):
    try:
        orjson.dumps(raw)
    except TypeError:
        return False
    return True


def call(name, parent=None, execution="x", prompt=(1, 2), output=(3,), **fields):
    logprobs = [-0.5] * len(output)
    return Call(name, execution, list(prompt), list(output), parent=parent, logprobs=logprobs, **fields)


CLOSED = Execution("x", "closed")
VALID = Assessment("x", "valid", 1.0)

BAD_RUNS = [
    ([call("a"), call("a", output=(4, 5))], {"rejected": 2}),
    ([call("a"), call("b", "missing", output=(4, 5))], {"rejected": 2}),
    ([call("a", "b"), call("b", "a", output=(4, 5))], {"rejected": 3}),
    ([call("a", "a"), call("b", "a")], {"rejected": 2}),
    ([call("b", "a", output=(4, 5)), call("a")], {"rejected": 2}),
    ([call("a"), CLOSED, call("b", "a", output=(4, 5))], {"late": 2}),
    ([call("a"), CLOSED, call("a", output=(4, 5)), call("c", "c")], {"late": 3}),
    ([CLOSED, call("a")], {"late": 1}),
    ([call("a"), call("b", "a", output=())], {}),
    ([call("a", prompt=(), output=(4, 5))], {"no-context": 1}),
    ([call("a", prompt=(), output=()), call("b", "a", prompt=(), output=(4, 5))], {"no-context": 1}),
    ([call("a", finish="error", output=(4, 5)), call("b")], {"error": 2}),
    ([Call("a", "x", [1], [2, 3], logprobs=[None, -1.0]), call("b")], {"no-logprob": 1}),
    ([Assessment("x", "unresolved"), call("a", output=(4, 5))], {"unresolved": 2}),
]


@pytest.mark.parametrize("records, excluded", BAD_RUNS)
def test_calls_that_join_no_tree_or_train_nothing_are_excluded_with_a_reason(tmp_path, records, excluded):
    """The rest of the execution trains as if they were not there; every token is in the ledger."""
    assessed = any(isinstance(record, Assessment) for record in records)
    ledger = sampled(tmp_path / "run.jsonl", records if assessed else [*records, VALID])
    assert dict(ledger.excluded) == excluded
    calls = [record for record in records if isinstance(record, Call)]
    assert ledger.sampled == sum(len(each.output_ids) for each in calls)
    assert ledger.trained == ledger.sampled - sum(excluded.values())


odd_evidence = st.dictionaries(
    st.sampled_from(
        [
            "system",
            "tools",
            "first_user",
            "last_user",
            "opening",
            "messages",
            "spawns",
            "text",
            "tool_calls",
            "echoes",
        ]
        + ["kind", "session", "agent", "parent", "subagent"]
    ),
    json_values,
    max_size=6,
)


@st.composite
def odd_calls(draw):
    name = st.sampled_from(["a", "b", "c", "d", "e"])
    output = draw(st.lists(st.integers(0, 3), max_size=3))
    return Call(
        draw(name),
        draw(st.sampled_from(["x", "x", "x", "y"])),
        draw(st.lists(st.integers(0, 3), max_size=4)),
        output,
        parent=draw(st.none() | name),
        logprobs=draw(
            st.none()
            | st.lists(st.sampled_from([None, -1.0, 0.0]), min_size=len(output), max_size=len(output))
        ),
        finish=draw(st.sampled_from(["stop", "length", "abort", "error"])),
        attempt_of=draw(st.none() | name),
        evidence=draw(odd_evidence),
        hints=draw(odd_evidence),
    )


odd_records = st.one_of(
    odd_calls(),
    odd_calls(),
    st.builds(Execution, st.sampled_from("xy"), st.sampled_from(["opened", "closed"])),
    st.builds(Assessment, st.sampled_from("xy"), st.just("valid"), st.sampled_from([0.0, 1.0])),
    st.builds(Assessment, st.sampled_from("xy"), st.sampled_from(["unresolved", "placeholder"])),
)


@given(st.lists(odd_records, max_size=10), st.sampled_from([None, 1, 5]), st.booleans())
def test_whatever_a_log_holds_every_sampled_token_is_trained_or_excluded(
    tmp_path_factory, records, j_max, auxiliary
):
    path = tmp_path_factory.getbasetemp() / "odd.jsonl"
    path.unlink(missing_ok=True)
    ledger = sampled(path, records, j_max=j_max, train_auxiliary=auxiliary)
    assert ledger.sampled == sum(len(each.output_ids) for each in records if isinstance(each, Call))


def sampled(path, records, **settings):
    """The ledger of a whole run; its samples' targets are the tokens that it calls trained."""
    ledger = Ledger()
    with RunLogWriter(path) as log:
        for record in records:
            log.append(record)
    with RunLogIndex(path) as index:
        samples = list(sample_run(index, ledger=ledger, **settings))
    ledger.check()
    assert ledger.trained == sum(int(np.count_nonzero(sample.trajectory.targets)) for sample in samples)
    return ledger
