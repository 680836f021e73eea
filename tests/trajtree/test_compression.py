import builtins
import gzip
import subprocess
import sys
import zlib

import pytest
import zstandard
from gyre_trajtree import (
    Call,
    Event,
    RunLogCorrupt,
    RunLogError,
    RunLogIndex,
    RunLogTail,
    RunLogWriter,
    archive,
    executions,
    read_run_log,
    runlog,
    to_line,
)
from hypothesis import given
from hypothesis import strategies as st

COMPRESS = {
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}

APPENDER = """
import sys
from gyre_trajtree import Event, RunLogWriter
with RunLogWriter(sys.argv[1]) as log:
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(int(sys.argv[3])):
        log.append(Event(sys.argv[2], float(i), {"filler": "y" * (i % 97)}))
"""


@pytest.fixture(params=COMPRESS)
def suffix(request):
    return request.param


@pytest.fixture
def path(tmp_path, suffix):
    return tmp_path / f"run.jsonl{suffix}"


def names(path):
    return [record.name for record in read_run_log(path) if isinstance(record, Event)]


def write(path, *events):
    with RunLogWriter(path) as log:
        for name in events:
            log.append(Event(name, 1.0))
    return path.read_bytes()


def header():
    return b'{"type":"header","format":"gyre-run-log","version":1}\n'


def test_a_compressed_log_reads_back_and_is_what_its_own_tools_read(path, suffix):
    write(path, "a", "b")
    assert names(path) == ["a", "b"]
    data = path.read_bytes()
    if suffix == ".gz":
        plain = gzip.decompress(data)
    else:
        plain = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    assert plain.count(b"\n") == 3 and b"format" not in data


def test_a_frame_torn_at_any_byte_is_dropped_by_readers_and_cut_by_the_next_writer(path):
    before = write(path, "a")
    whole = write(path, "b" * 30)
    for size in range(len(before), len(whole)):
        path.write_bytes(whole[:size])
        seen = names(path)
        assert seen in (["a"], ["a", "b" * 30])
        with RunLogWriter(path) as log:
            log.append(Event("c", 1.0))
        assert names(path) == [*seen, "c"], f"what was read at {size} bytes is what the writer kept"


def test_a_torn_header_leaves_an_empty_log(path):
    whole = write(path)
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        list(read_run_log(path))
        assert names(path) == []
        assert write(path, "a") and names(path) == ["a"]


def test_a_frame_torn_while_the_log_is_open_is_cut_before_the_next_append(path, suffix):
    with RunLogWriter(path) as log, RunLogWriter(path) as other:
        log.append(Event("a", 1.0))
        other.append(Event("b", 1.0))
        with open(path, "ab") as killed:
            killed.write(COMPRESS[suffix](to_line(Event("c" * 40, 1.0)))[:20])
        other.append(Event("d", 1.0))
        log.append(Event("e", 1.0))
    assert names(path) == ["a", "b", "d", "e"]


def test_a_log_that_shrank_under_its_writer_is_not_written_on(path):
    with RunLogWriter(path) as log:
        log.append(Event("a", 1.0))
        before = path.read_bytes()[:-30]
        path.write_bytes(before)
        with pytest.raises(RunLogError, match="shrank"):
            log.append(Event("b", 1.0))
    assert path.read_bytes() == before


def test_several_processes_append_whole_frames_to_one_log(path):
    count = 60
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(path), f"w{i}", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for i in range(3)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        assert [writer.wait(timeout=60) for writer in writers] == [0] * 3
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    events = [record for record in read_run_log(path) if isinstance(record, Event)]
    for i in range(3):
        assert [event.time for event in events if event.name == f"w{i}"] == list(range(count))


def test_what_a_killed_writer_acknowledged_is_read(path):
    """The child is killed in the middle of its appends; what it said it had written is there."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from gyre_trajtree import Event, RunLogWriter\n"
            "log, i = RunLogWriter(sys.argv[1]), 0\n"
            "while True:\n"
            "    log.append(Event('e', float(i), {'filler': 'y' * 5000}))\n"
            "    print(i, flush=True)\n"
            "    i += 1\n",
            str(path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        for _ in range(20):
            child.stdout.readline()
    finally:
        child.kill()
    said = child.communicate()[0].split()
    times = [record.time for record in read_run_log(path) if isinstance(record, Event)]
    assert times == list(range(len(times))) and len(times) >= 20 + len(said)


def test_a_tail_returns_each_record_once_and_waits_for_half_written_frames(path):
    tail = RunLogTail(path)
    assert tail.poll() == []
    write(path)
    assert [record.type for record in tail.poll()] == ["header"]
    before, whole = path.stat().st_size, write(path, "a")
    for size in range(before, len(whole)):
        path.write_bytes(whole[:size])
        assert tail.poll() == []
    path.write_bytes(whole)
    assert [record.name for record in tail.poll()] == ["a"]
    assert tail.poll() == []


def test_frames_of_other_writers_may_cut_lines_anywhere(tmp_path, suffix):
    """Block compressors cut every 64 KB: readers and tails put the lines together, a writer refuses to go on."""
    path = tmp_path / f"blocks{suffix}"
    text = header() + to_line(Event("a" * 50, 1.0)) + to_line(Event("b", 1.0))
    frames = [COMPRESS[suffix](text[i : i + 10]) for i in range(0, len(text), 10)]
    tail, seen = RunLogTail(path), []
    for i in range(len(frames)):
        path.write_bytes(b"".join(frames[: i + 1]))
        seen += [record.type for record in tail.poll()]
    assert seen == ["header", "event", "event"]
    assert names(path) == ["a" * 50, "b"]
    path.write_bytes(b"".join(frames[:-1]))
    with pytest.raises(RunLogError, match="archive it anew"):
        RunLogWriter(path)
    assert path.read_bytes() == b"".join(frames[:-1])


def test_a_stream_cut_short_gives_all_its_whole_lines_and_no_writer_cuts_it(tmp_path, suffix):
    path = tmp_path / f"stream{suffix}"
    lines = [to_line(Event(f"n{i}", float(i), {"f": zlib.crc32(str(i).encode())})) for i in range(60_000)]
    data = COMPRESS[suffix](header() + b"".join(lines))
    path.write_bytes(data[: len(data) * 3 // 4])
    seen = names(path)
    assert seen == [f"n{i}" for i in range(len(seen))] and 1000 < len(seen) < 60_000
    with pytest.raises(RunLogError, match="archive it anew"):
        RunLogWriter(path)
    archive(path, tmp_path / "anew.jsonl")
    assert names(tmp_path / "anew.jsonl") == seen


def test_broken_data_are_reported_at_their_line_and_nothing_before_them_is_lost(path):
    data = bytearray(write(path, "a", "b"))
    first_two = len(data)
    data += write(path, "c")[first_two:]
    data[first_two + 2] ^= 0xFF
    path.write_bytes(data)
    records = read_run_log(path)
    assert [next(records).type for _ in range(3)] == ["header", "event", "event"]
    with pytest.raises(RunLogCorrupt, match="line 4"):
        next(records)
    for read in (
        lambda found: list(read_run_log(path, corrupt=found)),
        lambda found: RunLogIndex(path, found),
    ):
        found = []
        read(found)
        assert [error.line for error in found] == [4]
    with pytest.raises(RunLogCorrupt):
        RunLogTail(path).poll()
    with pytest.raises(RunLogError, match="cannot be continued"):
        RunLogWriter(path)
    assert path.read_bytes() == bytes(data)


def test_what_is_not_compressed_is_refused_and_left_alone(path):
    path.write_bytes(b"my notes, without a newline")
    with pytest.raises(RunLogError):
        RunLogWriter(path)
    with pytest.raises(RunLogError):
        list(read_run_log(path))
    with pytest.raises(RunLogError):
        RunLogIndex(path)
    assert path.read_bytes() == b"my notes, without a newline"


def test_a_compressed_log_of_something_else_is_refused_and_left_alone(path, suffix):
    path.write_bytes(COMPRESS[suffix](b"my notes\n") + COMPRESS[suffix](b"are here\n")[:-3])
    before = path.read_bytes()
    with pytest.raises(RunLogError, match="header"):
        RunLogWriter(path)
    assert path.read_bytes() == before


def test_an_index_of_a_compressed_log_loads_the_same_executions(path):
    with RunLogWriter(path, packed=True) as log:
        for i in range(40):
            log.append(Call(f"c{i}", f"x{i % 3}", [i + 1], [i], logprobs=[-1.0]))
    with RunLogIndex(path) as index:
        assert index.ids == ["x0", "x1", "x2"]
        loaded = {recorded.id: [call.id for call in recorded.calls] for recorded in index}
    read = executions(read_run_log(path))
    assert loaded == {name: [call.id for call in each.calls] for name, each in read.items()}


def test_an_index_without_room_to_unpack_says_what_to_do(path, monkeypatch):
    write(path, "a")

    class Full:
        def tell(self):
            return 0

        def write(self, _data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(RunLogError, match="TMPDIR"):
        RunLogIndex(path)


@pytest.mark.parametrize("target", ["b.jsonl", "b.jsonl.gz", "b.jsonl.zst"])
def test_an_archive_holds_the_same_lines_and_can_be_continued(tmp_path, path, target):
    write(path, "a", "b")
    target = tmp_path / target
    archive(path, target)
    assert names(target) == ["a", "b"]
    write(target, "c")
    assert names(target) == ["a", "b", "c"]
    assert sorted(tmp_path.iterdir()) == sorted([path, target])


def test_an_archive_is_never_written_over_and_fails_whole(tmp_path, path):
    write(path, "a")
    before = path.read_bytes()
    with pytest.raises(RunLogError, match="exists"):
        archive(path, path)
    assert path.read_bytes() == before
    with pytest.raises(RunLogError, match="No such file"):
        archive(tmp_path / "missing.jsonl", tmp_path / "b.jsonl")
    with pytest.raises(RunLogError, match="cannot write"):
        archive(path, tmp_path / "missing" / "b.jsonl")
    assert list(tmp_path.iterdir()) == [path]


def test_archiving_broken_data_keeps_what_comes_before(tmp_path, path):
    size = len(write(path, "a"))
    data = bytearray(write(path, "b"))
    data[size + 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(RunLogCorrupt):
        archive(path, tmp_path / "b.jsonl")
    found = []
    archive(path, tmp_path / "b.jsonl", found)
    assert names(tmp_path / "b.jsonl") == ["a"] and [error.line for error in found] == [3]


def test_without_zstandard_the_error_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "zstandard":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for use in (RunLogWriter, RunLogTail, RunLogIndex, lambda path: list(read_run_log(path))):
        with pytest.raises(RunLogError, match=r"gyre-trajtree\[zstd\]"):
            use(tmp_path / "run.jsonl.zst")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "run.jsonl.gz", "a")


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=5),
    st.sampled_from([".gz", ".zst"]),
    st.integers(0, 400),
)
def test_cut_anywhere_a_log_is_a_beginning_of_itself(tmp_path_factory, events, suffix, cut):
    path = tmp_path_factory.getbasetemp() / f"cut.jsonl{suffix}"
    path.unlink(missing_ok=True)
    data = write(path, *events)
    path.write_bytes(data[: max(0, len(data) - cut)])
    seen = names(path)
    assert seen == events[: len(seen)]
    write(path, "last")
    assert names(path) == [*seen, "last"]


def test_a_line_longer_than_the_limit_is_reported_and_passed_over(path, monkeypatch):
    write(path, "a", "b" * 500, "c")
    monkeypatch.setattr(runlog, "MAX_LINE", 200)
    found = []
    kept = [record.name for record in read_run_log(path, corrupt=found) if isinstance(record, Event)]
    assert kept == ["a", "c"] and [error.line for error in found] == [3]
