import json
import os
import subprocess
import sys

import orjson
import pytest
from gyre_trajtree import (
    Assessment,
    Call,
    Event,
    Execution,
    RunLogCorrupt,
    RunLogError,
    RunLogIndex,
    RunLogWriter,
    executions,
    read_run_log,
    runlog,
    to_line,
)
from hypothesis import given
from hypothesis import strategies as st

HEADER = b'{"type":"header","format":"gyre-run-log","version":1}\n'
HOG = """
import resource, sys
from gyre_trajtree import RunLogIndex, read_run_log
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
with RunLogIndex(sys.argv[1]) as index:
    total = sum(len(call.output_ids) for recorded in index for call in recorded.calls)
print(total, peak() - before)
"""

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ids = st.sampled_from(["x", "y", 'quo"te', "back\\slash", "ü\n", "\u2028", "a,b}", "\\u0041"])


@st.composite
def records(draw):
    execution = draw(ids)
    kind = draw(st.sampled_from(["call", "late", "execution", "assessment", "event"]))
    if kind == "event":
        return Event(draw(text), 1.0, {"execution": execution})
    if kind == "execution":
        return Execution(execution, draw(st.sampled_from(["opened", "closed"])), group=draw(st.none() | text))
    if kind == "assessment":
        return Assessment(execution, "valid", 0.5)
    return Call(draw(text | ids), execution, [1, 2], [3], logprobs=[-1.0])


def written(path, *records):
    with RunLogWriter(path) as log:
        for record in records:
            log.append(record)
    return path


def lines_of(recorded):
    everything = [*recorded.states, *recorded.calls, *recorded.late, *recorded.assessments]
    return [to_line(record) for record in everything]


@given(st.lists(records(), max_size=20), st.booleans(), st.booleans())
def test_an_index_loads_what_reading_the_whole_log_finds(tmp_path_factory, log, packed, ours):
    """As our writer writes lines, and as others may: other key order, spaces, escapes."""
    path = tmp_path_factory.getbasetemp() / "index.jsonl"
    lines = [to_line(record, packed) for record in log]
    if not ours:
        lines = [_rewritten(line) for line in lines]
    path.write_bytes(HEADER + b"".join(lines))
    read = executions(read_run_log(path))
    with RunLogIndex(path) as index:
        assert index.ids == list(read) and len(index) == len(read)
        assert index.header.version == 1
        assert [lines_of(recorded) for recorded in index] == [lines_of(each) for each in read.values()]
        for name in reversed(index.ids):
            assert lines_of(index.load(name)) == lines_of(read[name])


def _rewritten(line):
    return json.dumps(dict(reversed(json.loads(line).items()))).encode() + b"\n"


def test_only_the_head_of_a_line_is_read_until_its_execution_is_loaded(tmp_path):
    path = written(tmp_path / "run.jsonl", Call("a", "x", [1], [2]), Call("b", "y", [1], [2]))
    path.write_bytes(path.read_bytes().replace(b'"input_ids":[1]', b'"input_ids":[?]', 1))
    with RunLogIndex(path) as index:
        assert index.ids == ["x", "y"]
        assert [call.id for call in index.load("y").calls] == ["b"]
        with pytest.raises(RunLogCorrupt, match="line 2"):
            index.load("x")
    found = []
    with RunLogIndex(path, corrupt=found) as index:
        assert found == []
        for _ in range(2):  # a line that is met again is not reported again
            assert [len(recorded.calls) for recorded in index] == [0, 1]
    assert [error.line for error in found] == [2]


def test_a_line_that_says_two_executions_belongs_to_neither(tmp_path):
    path = tmp_path / "run.jsonl"
    twice = b'{"type":"call","id":"c","execution":"x","input_ids":[1],"output_ids":[2],"execution":"y"}\n'
    path.write_bytes(HEADER + twice)
    with RunLogIndex(path) as index, pytest.raises(RunLogCorrupt, match="twice"):
        index.load("x")


@pytest.mark.parametrize(
    "bad", [b"nonsense\n", b"\n", b'{"type":"call","id":"c"}\n', b"\0\0\0\n", b'{"type":"event"}\n']
)
def test_a_corrupt_line_is_reported_with_its_number_and_nothing_valid_is_lost(tmp_path, bad):
    path = written(tmp_path / "run.jsonl", Call("a", "x", [1], [2]), Call("b", "x", [1], [2]))
    header, a, b = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + a + bad + b)
    with pytest.raises(RunLogCorrupt, match="line 3"):
        RunLogIndex(path)
    found = []
    with RunLogIndex(path, corrupt=found) as index:
        assert [call.id for call in index.load("x").calls] == ["a", "b"]
    assert [error.line for error in found] == [3]


def test_a_torn_last_line_is_dropped_and_one_without_newline_kept(tmp_path):
    path = written(tmp_path / "run.jsonl", Call("a", "x", [1], [2]), Call("b", "x", [1], [2]))
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(data)):
        path.write_bytes(data[:size])
        with RunLogIndex(path) as index:
            assert len(index.load("x").calls) == (2 if size == len(data) - 1 else 1)


def test_a_log_that_grows_does_not_disturb_its_index(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path) as log:
        log.append(Call("a", "x", [1], [2]))
        with RunLogIndex(path) as index:
            log.append(Call("b", "x", [1], [2]))
            log.append(Call("c", "y", [1], [2]))
            assert index.ids == ["x"] and len(index.load("x").calls) == 1
        with RunLogIndex(path) as index:
            assert index.ids == ["x", "y"] and len(index.load("x").calls) == 2


def test_a_log_without_executions_is_an_empty_index(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"")
    with RunLogIndex(path) as index:
        assert len(index) == 0 and list(index) == [] and index.header is None
    with RunLogIndex(written(path, Event("step", 1.0))) as index:
        assert len(index) == 0 and index.header is not None


def test_misuse_is_refused_in_one_line(tmp_path):
    with pytest.raises(RunLogError, match="No such file"):
        RunLogIndex(tmp_path / "missing.jsonl")
    with pytest.raises(RunLogError):
        RunLogIndex(tmp_path)
    path = written(tmp_path / "run.jsonl", Call("a", "x", [1], [2]))
    index = RunLogIndex(path)
    with pytest.raises(RunLogError, match="no execution 'z'"):
        index.load("z")
    index.close()
    index.close()
    with pytest.raises(RunLogError, match="closed"):
        index.load("x")
    path.write_bytes(to_line(Call("a", "x", [1], [2])))
    with pytest.raises(RunLogError, match="header"):
        RunLogIndex(path)


def test_a_pipe_is_indexed_too(tmp_path):
    path = written(tmp_path / "run.jsonl", Call("a", "x", [1], [2]), Call("b", "y", [1], [2]))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", path, pipe]), RunLogIndex(pipe) as index:
        assert [[call.id for call in index.load(name).calls] for name in ("y", "x")] == [["b"], ["a"]]


def test_a_line_longer_than_the_limit_is_reported_and_offsets_stay_right(tmp_path, monkeypatch):
    path = written(tmp_path / "run.jsonl", Call("a", "x", [1], [2]), Event("e", 1.0, {"f": "y" * 9000}))
    written(path, Call("b", "x", [1], [2]))
    monkeypatch.setattr(runlog, "MAX_LINE", 500)
    found = []
    with RunLogIndex(path, corrupt=found) as index:
        assert [call.id for call in index.load("x").calls] == ["a", "b"]
    assert [error.line for error in found] == [3]
    with open(path, "ab") as file:
        file.write(b'{"type":"event","name":"' + b"y" * 90_000)
    found.clear()
    with RunLogIndex(path, corrupt=found) as index:
        assert len(index.load("x").calls) == 2
    assert [error.line for error in found] == [3], "a torn last line is dropped, however long"


def test_memory_holds_one_execution_however_long_the_log(tmp_path):
    path = tmp_path / "run.jsonl"
    executions_, tokens = 100, 100_000
    with open(path, "wb") as file:
        file.write(HEADER)
        for i in range(executions_):
            raw = {
                "type": "call",
                "id": "c",
                "execution": f"x{i}",
                "input_ids": [1],
                "output_ids": [7] * tokens,
            }
            file.write(orjson.dumps(raw) + b"\n")
    done = subprocess.run(
        [sys.executable, "-c", HOG, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    total, grown = map(int, done.stdout.split())
    assert total == executions_ * tokens
    assert grown < executions_ * tokens * 4, "less than the log's token arrays together"
