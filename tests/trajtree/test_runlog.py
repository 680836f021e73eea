import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest
from gyre_trajtree import (
    Call,
    Event,
    Header,
    RecordError,
    RunLogCorrupt,
    RunLogError,
    RunLogTail,
    RunLogWriter,
    read_run_log,
    runlog,
    to_line,
)

APPENDER = """
import sys
from gyre_trajtree import Event, RunLogWriter
with RunLogWriter(sys.argv[1]) as log:
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(int(sys.argv[3])):
        log.append(Event(sys.argv[2], float(i), {"filler": "y" * (i % 97)}))
"""

FILLER = """
import resource, sys
from gyre_trajtree import Event, RunLogFull, RunLogWriter
log = RunLogWriter(sys.argv[1])
log.append(Event("before", 1.0))
size = open(sys.argv[1], "rb").seek(0, 2)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for room in (10, 0):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
    try:
        log.append(Event("lost", 2.0, {"filler": "y" * 200}))
    except RunLogFull as full:
        print(full)
    assert open(sys.argv[1], "rb").seek(0, 2) == size
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.append(Event("after", 3.0))
"""


def names(path):
    return [record.name for record in read_run_log(path) if isinstance(record, Event)]


def three_events(path):
    with RunLogWriter(path) as log:
        for name in ("a", "b", "c"):
            log.append(Event(name, 1.0))
    return path.read_bytes()


def test_a_log_starts_with_a_header_and_reads_back_in_order(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, meta={"seed": 3}) as log:
        log.append(Call("c", "x", [1], [2], logprobs=[-1.0]))
        log.append(Event("step", 1.0))
    header, call, event = read_run_log(path)
    assert isinstance(header, Header) and header.meta == {"seed": 3} and header.version == 1
    assert call.id == "c" and event.name == "step"


def test_an_existing_log_is_continued_under_its_own_header(tmp_path):
    path = tmp_path / "run.jsonl"
    three_events(path)
    with RunLogWriter(path, meta={"other": True}) as log:
        log.append(Event("d", 2.0))
    assert names(path) == ["a", "b", "c", "d"]
    assert sum(isinstance(record, Header) for record in read_run_log(path)) == 1


def test_a_line_torn_at_any_byte_is_dropped_by_readers_and_cut_by_the_next_writer(tmp_path):
    whole = three_events(tmp_path / "whole.jsonl")
    last = whole.rindex(b"\n", 0, -1) + 1
    path = tmp_path / "run.jsonl"
    for size in range(last, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert names(path) == ["a", "b"]
        with RunLogWriter(path) as log:
            log.append(Event("d", 2.0))
        assert names(path) == ["a", "b", "d"]


def test_a_last_line_that_lacks_only_its_newline_is_kept_by_readers_and_writers(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(three_events(path)[:-1])
    assert names(path) == ["a", "b", "c"]
    with RunLogWriter(path) as log:
        log.append(Event("d", 2.0))
    assert names(path) == ["a", "b", "c", "d"]


def test_a_torn_header_leaves_an_empty_log(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"type":"head')
    assert list(read_run_log(path)) == []
    with RunLogWriter(path) as log:
        log.append(Event("a", 1.0))
    assert names(path) == ["a"]


def test_a_tail_torn_while_the_log_is_open_is_cut_before_the_next_append(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path) as log:
        log.append(Event("a", 1.0))
        with open(path, "ab") as killed:
            killed.write(b'{"type":"event","name":"' + b"y" * 200_000)
        log.append(Event("b", 1.0))
    assert names(path) == ["a", "b"]


@pytest.mark.parametrize("bad", [b"nonsense\n", b"\n", b'{"type":"call","id":"c"}\n', b"\0\0\0\n"])
def test_a_corrupt_line_is_reported_with_its_number_and_nothing_valid_is_lost(tmp_path, bad):
    path = tmp_path / "run.jsonl"
    header, a, b, c = three_events(path).splitlines(keepends=True)
    path.write_bytes(header + a + bad + b + c)
    records = read_run_log(path)
    assert [next(records).type, next(records).name] == ["header", "a"]
    with pytest.raises(RunLogCorrupt, match="line 3") as corrupt:
        next(records)
    assert corrupt.value.line == 3
    found = []
    kept = [record.name for record in read_run_log(path, corrupt=found) if isinstance(record, Event)]
    assert kept == ["a", "b", "c"] and [error.line for error in found] == [3]


@pytest.mark.parametrize(
    "content",
    [
        b"my notes\nare here\n",
        b"my notes\nare here",
        b"my notes",
        b'{"type":"event","name":"a"}',
        b'{"type":"header","format":"other","version":1}',
        b'{"type":"header","format":"gyre-run-log"}\n{"type"',
        b'{"type":"header"\n',
        b"\0" * 5000,
    ],
)
def test_what_is_no_run_log_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(RunLogError, match="header"):
        RunLogWriter(path)
    with pytest.raises(RunLogError, match="header"):
        list(read_run_log(path))
    assert path.read_bytes() == content


def test_a_later_format_version_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(to_line(Header(created=1.0, version=2)))
    with pytest.raises(RunLogError, match="version 2"):
        list(read_run_log(path))
    with pytest.raises(RunLogError, match="version 2"):
        RunLogWriter(path)


def test_a_header_torn_at_any_byte_leaves_an_empty_log(tmp_path):
    path = tmp_path / "run.jsonl"
    header = to_line(Header(created=1.0, meta={"seed": 1}))
    for size in range(len(header)):
        path.write_bytes(header[:size])
        with RunLogWriter(path) as log:
            log.append(Event("a", 1.0))
        assert names(path) == ["a"]


def test_a_line_longer_than_the_limit_is_never_written_and_passed_over_by_readers(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path) as log:
        for name in ("a", "b" * 500, "c"):
            log.append(Event(name, 1.0))
        monkeypatch.setattr(runlog, "MAX_LINE", 200)
        with pytest.raises(RecordError, match="more than 200"):
            log.append(Event("d" * 500, 1.0))
    with pytest.raises(RunLogCorrupt, match="line 3"):
        list(read_run_log(path))
    found = []
    kept = [record.name for record in read_run_log(path, corrupt=found) if isinstance(record, Event)]
    assert kept == ["a", "c"] and [error.line for error in found] == [3]


def test_flush_to_disk_syncs_each_record_before_the_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    with RunLogWriter(tmp_path / "run.jsonl", flush="disk") as log:
        log.append(Event("a", 1.0))
        log.append(Event("b", 1.0))
    lines = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    assert synced == [len(b"".join(lines[: i + 1])) for i in range(3)]
    synced.clear()
    with RunLogWriter(tmp_path / "other.jsonl") as log:
        log.append(Event("a", 1.0))
    assert synced == []
    with pytest.raises(RunLogError, match="process, disk"):
        RunLogWriter(tmp_path / "run.jsonl", flush="always")


def test_a_disk_that_does_not_sync_is_an_error_of_its_own(tmp_path, monkeypatch):
    log = RunLogWriter(tmp_path / "run.jsonl", flush="disk")

    def fail(_fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with log, pytest.raises(RunLogError, match="did not reach the disk"):
        log.append(Event("a", 1.0))
    assert names(tmp_path / "run.jsonl") == []


def test_unusable_paths_are_refused_in_one_line(tmp_path):
    with pytest.raises(RunLogError, match="No such file"):
        list(read_run_log(tmp_path / "missing.jsonl"))
    with pytest.raises(RunLogError, match="cannot open"):
        RunLogWriter(tmp_path / "missing" / "run.jsonl")
    with pytest.raises(RunLogError, match="directory"):
        RunLogWriter(tmp_path)


def test_a_closed_writer_refuses_and_closes_again(tmp_path):
    log = RunLogWriter(tmp_path / "run.jsonl")
    log.close()
    log.close()
    with pytest.raises(RunLogError, match="closed"):
        log.append(Event("a", 1.0))


def test_a_full_disk_leaves_the_log_as_it_was_and_writing_goes_on_later(tmp_path):
    path = tmp_path / "run.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FILLER, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("disk is full") == 2
    assert names(path) == ["before", "after"]


def test_several_processes_append_whole_lines_to_one_log(tmp_path):
    path, count = tmp_path / "run.jsonl", 150
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(path), f"w{i}", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for i in range(4)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    header, *events = read_run_log(path)
    assert isinstance(header, Header)
    for i in range(4):
        assert [event.time for event in events if event.name == f"w{i}"] == list(range(count))
    assert len(events) == 4 * count


def test_an_append_waits_for_whoever_holds_the_lock(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path) as log, open(path, "rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        thread = threading.Thread(target=log.append, args=(Event("a", 1.0),))
        thread.start()
        thread.join(timeout=0.2)
        assert thread.is_alive() and names(path) == []
        fcntl.flock(holder, fcntl.LOCK_UN)
        thread.join(timeout=30)
    assert names(path) == ["a"]


def test_a_holder_of_the_lock_that_is_stopped_is_no_reason_to_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog, "LOCK_S", 0.05)
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path) as log, open(path, "rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        for _ in range(2):
            with pytest.raises(RunLogError, match="another process held the run log for 0.05 s"):
                log.append(Event("lost", 1.0))
        fcntl.flock(holder, fcntl.LOCK_UN)
        log.append(Event("a", 1.0))
    assert names(path) == ["a"]


def test_a_tail_returns_each_record_once_and_waits_for_half_written_lines(tmp_path):
    path = tmp_path / "run.jsonl"
    tail = RunLogTail(path)
    assert tail.poll() == []
    log = RunLogWriter(path)
    log.append(Event("a", 1.0))
    assert [record.type for record in tail.poll()] == ["header", "event"]
    assert tail.poll() == []
    line = to_line(Event("b", 1.0))
    with open(path, "ab", buffering=0) as file:
        for byte in line[:-1]:
            file.write(bytes([byte]))
            assert tail.poll() == []
        file.write(line[-1:])
    assert [record.name for record in tail.poll()] == ["b"]
    log.close()


def test_a_tail_reports_the_line_number_over_polls_and_a_shrunken_log(tmp_path):
    path = tmp_path / "run.jsonl"
    size = len(three_events(path))
    tail = RunLogTail(path)
    assert len(tail.poll()) == 4
    with open(path, "ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(RunLogCorrupt, match="line 5"):
        tail.poll()
    os.truncate(path, size - 5)
    with pytest.raises(RunLogError, match="shrank"):
        tail.poll()


def test_a_tail_follows_threads_that_append_at_the_same_time(tmp_path):
    path, count = tmp_path / "run.jsonl", 100
    with RunLogWriter(path) as log:
        threads = [
            threading.Thread(target=lambda n=n: [log.append(Event(n, float(i))) for i in range(count)])
            for n in ("p", "q")
        ]
        tail, seen = RunLogTail(path), []
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while len(seen) < 2 * count:
            assert time.monotonic() < deadline, f"only {len(seen)} of {2 * count} records arrived"
            seen += [record for record in tail.poll() if isinstance(record, Event)]
        for thread in threads:
            thread.join(timeout=30)
    for name in ("p", "q"):
        assert [event.time for event in seen if event.name == name] == list(range(count))
