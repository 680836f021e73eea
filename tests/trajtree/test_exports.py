import json
import os
import resource
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from pathlib import Path

import gyre_trajtree
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gyre_trajtree import (
    AccountError,
    Assessment,
    ExportError,
    Ledger,
    RunLogIndex,
    Sample,
    Trajectory,
    export,
    sample_run,
)
from gyre_trajtree.exports import FORMATS
from hypothesis import given
from hypothesis import strategies as st
from sampled_runs import call, hand_written_run, opened, random_runs, recorded, write_log

GRADED = ("slime", "trl", "verl")


def exported(records, format, target, **settings):
    """The samples of a run, after they were exported to `target`."""
    ledger = Ledger()
    kept = []

    def watched():
        for sample in sample_run(recorded(records), ledger=ledger, **settings):
            kept.append(sample)
            yield sample

    assert export(watched(), format, target, ledger) == len(kept)
    return kept, ledger


def branching_run():
    """Two groups of two executions of several trajectories each, log-probs that no short decimal has."""
    logprobs = np.random.default_rng(0).uniform(-9, 0, 500).astype(np.float32)
    records, place = [], 0
    for name, group, score in [("a", "g_1", 0.0), ("b", "g_2", 1.0), ("c", "g_1", 0.5), ("d", "g_2", 0.25)]:
        records.append(opened(name, group))
        for index, parent in enumerate([None, 0, 0, 1, None]):
            out = list(range(place, place + 3 + index))
            records.append(
                call(
                    f"{name}{index}",
                    name,
                    [900, 901],
                    out,
                    logprobs[out],
                    version=index,
                    parent=None if parent is None else f"{name}{parent}",
                )
            )
            place += len(out)
        records.append(Assessment(name, "valid", score))
    return records


def rows_of(format, path):
    if format == "parquet":
        return pq.read_table(path).to_pylist()
    if format == "slime":
        return torch.load(path, weights_only=True)["samples"]
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def trained_tokens(format, row):
    """The targets of one exported row, as its trainer would find them."""
    if format in ("jsonl", "parquet"):
        return [token for token, trains in zip(row["ids"], row["targets"], strict=True) if trains]
    if format == "trl":
        return [i for i, trains in zip(row["input_ids"], row["completion_mask"], strict=True) if trains]
    if format == "verl":
        return [i for i, trains in zip(row["response_ids"], row["response_mask"], strict=True) if trains]
    response = row["tokens"][-row["response_length"] :]
    return [token for token, trains in zip(response, row["loss_mask"], strict=True) if trains]


def floats(values):
    return np.array([np.nan if value is None else value for value in values], np.float32)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_row_of_ours_gives_the_sample_back(tmp_path, format):
    target = tmp_path / "out"
    kept, _ = exported(branching_run() + hand_written_run(), format, target)
    rows = rows_of(format, target)
    assert len(kept) == len(rows) > 8
    for sample, row in zip(kept, rows, strict=True):
        names = ["execution", "group", "task", "harness", "leaf", "role", "reward", "advantage"]
        assert [row[name] for name in names] == [getattr(sample, name) for name in names]
        assert row["ids"] == sample.trajectory.ids.tolist()
        assert row["targets"] == sample.trajectory.targets.tolist()
        assert row["versions"] == sample.trajectory.versions.tolist()
        np.testing.assert_array_equal(floats(row["logprobs"]), sample.trajectory.logprobs)
        assert list(row) == [*names, "ids", "targets", "logprobs", "versions"]


@pytest.mark.parametrize("format", GRADED)
def test_a_row_for_a_trainer_has_the_exact_tokens_and_log_probs(tmp_path, format):
    target = tmp_path / "out"
    kept, _ = exported(branching_run(), format, target)
    rows = rows_of(format, target)
    assert len(kept) == len(rows)
    for sample, row in zip(kept, rows, strict=True):
        trajectory = sample.trajectory
        if format == "trl":
            ids, mask, logprobs = row["input_ids"], row["completion_mask"], row["old_log_probs"]
            assert row["assistant_masks"] == mask
        elif format == "verl":
            prompt = row["prompt_ids"]
            ids = prompt + row["response_ids"]
            mask = [0] * len(prompt) + row["response_mask"]
            logprobs = [0.0] * len(prompt) + row["response_logprobs"]
            assert row["response_mask"][0] == 1
        else:
            prompt = len(row["tokens"]) - row["response_length"]
            ids = row["tokens"]
            mask = [0] * prompt + row["loss_mask"]
            logprobs = [0.0] * prompt + row["rollout_log_probs"]
            assert row["loss_mask"][0] == 1
        assert ids == trajectory.ids.tolist()
        assert mask == trajectory.targets.astype(int).tolist()
        sampled = np.isfinite(trajectory.logprobs) & (np.arange(len(ids)) >= trajectory.targets.argmax())
        np.testing.assert_array_equal(np.float32(logprobs)[sampled], trajectory.logprobs[sampled])
        assert not np.float32(logprobs)[~np.isfinite(trajectory.logprobs)].any()


def test_numbers_count_each_execution_once_in_its_group(tmp_path):
    kept, _ = exported(branching_run(), "verl", tmp_path / "verl")
    keys = [(r["uid"], r["session_id"], r["index"]) for r in rows_of("verl", tmp_path / "verl")]
    assert len(set(keys)) == len(keys) == len(kept)
    sessions = {s.execution: key[:2] for s, key in zip(kept, keys, strict=True)}
    assert sessions == {"a": ("g_1", 0), "b": ("g_2", 0), "c": ("g_1", 1), "d": ("g_2", 1)}
    exported(branching_run(), "slime", tmp_path / "slime")
    rows = rows_of("slime", tmp_path / "slime")
    assert [row["index"] for row in rows] == list(range(len(rows)))
    numbers = {row["metadata"]["execution"]: (row["group_index"], row["rollout_id"]) for row in rows}
    assert numbers == {"a": (0, 0), "b": (1, 1), "c": (0, 2), "d": (1, 3)}
    exported(branching_run(), "trl", tmp_path / "trl")
    assert {row["execution"]: row["group_id"] for row in rows_of("trl", tmp_path / "trl")} == {
        "a": 0,
        "b": 1,
        "c": 0,
        "d": 1,
    }


def test_trainers_learn_which_weights_sampled_the_targets(tmp_path):
    kept, _ = exported(branching_run(), "verl", tmp_path / "verl")
    exported(branching_run(), "trl", tmp_path / "trl")
    exported(branching_run(), "slime", tmp_path / "slime")
    verl, trl, slime = (rows_of(format, tmp_path / format) for format in ("verl", "trl", "slime"))
    for number, sample in enumerate(kept):
        versions = sorted(set(sample.trajectory.versions[sample.trajectory.targets].tolist()))
        extra = verl[number]["extra_fields"]
        assert (extra["min_global_steps"], extra["max_global_steps"]) == (versions[0], versions[-1])
        assert trl[number]["model_version"] == versions[0]
        assert slime[number]["weight_versions"] == [str(version) for version in versions]


@pytest.mark.parametrize("format", FORMATS)
@given(random_runs(), st.sampled_from([1, 2, None]))
def test_the_rows_of_an_export_train_what_the_ledger_calls_trained(format, records, j_max):
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out"
        # a sample without a reward has no advantage, which trainers with groups refuse
        _, ledger = exported(records, format, target, j_max=j_max, require_reward=True)
        trained = Counter(token for row in rows_of(format, target) for token in trained_tokens(format, row))
        assert set(trained.values()) <= {1}
        assert trained.total() == ledger.trained == ledger.sampled - ledger.excluded.total()
        assert os.listdir(folder) == ["out"]


def test_parquet_metadata_name_the_schema_and_hold_the_account(tmp_path):
    exported(hand_written_run(), "parquet", tmp_path / "out.parquet")
    metadata = pq.read_metadata(tmp_path / "out.parquet").metadata
    assert json.loads(metadata[b"gyre"]) == {
        "format": "gyre-samples",
        "version": 1,
        "account": {
            "sampled": 25,
            "trained": 9,
            "excluded": {"auxiliary": 5, "late": 4, "no-logprob": 1, "unresolved": 6},
        },
    }


def test_parquet_types_are_those_of_the_documented_schema(tmp_path):
    exported(hand_written_run(), "parquet", tmp_path / "out.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    text = {name: "string" for name in ("execution", "group", "task", "harness", "leaf", "role")}
    assert {field.name: str(field.type) for field in schema} == text | {
        "reward": "double",
        "advantage": "double",
        "ids": "list<element: int32>",
        "targets": "list<element: bool>",
        "logprobs": "list<element: float>",
        "versions": "list<element: int32>",
    }


def sample(execution="x", length=100, **fields):
    row = Trajectory(
        execution,
        f"{execution}-leaf",
        "main",
        np.arange(length, dtype=np.int32),
        np.arange(length) >= length // 2,
        np.full(length, -0.5, np.float32),
        np.zeros(length, np.int32),
    )
    return Sample(
        row, **({"group": "g", "task": None, "harness": None, "reward": 1.0, "advantage": 0.5} | fields)
    )


@pytest.mark.parametrize(("format", "most"), [("jsonl", 2), ("trl", 2), ("verl", 2), ("parquet", 7)])
def test_memory_holds_few_samples_however_many_are_exported(tmp_path, monkeypatch, format, most):
    monkeypatch.setattr("gyre_trajtree.exports.parquet.ROW_GROUP_TOKENS", 500)
    held, made = [], []

    def stream():
        for number in range(60):
            fresh = sample(f"x{number}")
            made.append(weakref.ref(fresh.trajectory.ids))
            held.append(sum(each() is not None for each in made))
            yield fresh
            del fresh

    assert export(stream(), format, tmp_path / "out") == 60
    assert max(held) <= most


def test_parquet_closes_a_row_group_when_it_holds_enough_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre_trajtree.exports.parquet.ROW_GROUP_TOKENS", 250)
    lengths = [100, 100, 100, 1000, 10, 10]
    export((sample(f"x{i}", length) for i, length in enumerate(lengths)), "parquet", tmp_path / "out")
    file = pq.ParquetFile(tmp_path / "out")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 1, 2]
    assert [len(ids) for ids in file.read().column("ids").to_pylist()] == lengths


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_without_samples_gives_a_file_without_rows(tmp_path, format):
    records = [opened("x", "g"), call("a", "x", [1], [2]), Assessment("x", "unresolved")]
    kept, ledger = exported(records, format, tmp_path / "out")
    assert not kept and ledger.excluded == {"unresolved": 1}
    assert rows_of(format, tmp_path / "out") == []


@pytest.mark.parametrize("format", FORMATS)
def test_an_existing_file_is_kept_unless_it_may_be_overwritten(tmp_path, format):
    target = tmp_path / "out"
    target.write_text("mine")
    with pytest.raises(ExportError, match="already exists"):
        export([sample()], format, target)
    assert target.read_text() == "mine" and os.listdir(tmp_path) == ["out"]
    assert export([sample()], format, target, overwrite=True) == 1
    assert len(rows_of(format, target)) == 1 and os.listdir(tmp_path) == ["out"]


def test_a_file_that_appears_during_the_export_is_kept(tmp_path):
    def stream():
        yield sample()
        (tmp_path / "out").write_text("mine")

    with pytest.raises(ExportError, match="already exists"):
        export(stream(), "jsonl", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine" and os.listdir(tmp_path) == ["out"]


def broken(**changes):
    found = sample()
    for name, value in changes.items():
        setattr(found.trajectory, name, value)
    return found


UNSOUND = {
    "lengths differ": broken(versions=np.zeros(99, np.int32)),
    "no target": broken(targets=np.zeros(100, bool)),
    "first token trains": broken(targets=np.ones(100, bool)),
    "missing log-prob": broken(logprobs=np.full(100, np.nan, np.float32)),
    "infinite log-prob": broken(logprobs=np.full(100, -np.inf, np.float32)),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_row_leaves_nothing_behind(tmp_path, format, name):
    with pytest.raises(AccountError, match="x-leaf"):
        export([sample("y"), UNSOUND[name]], format, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def wrong_sum(ledger):
    ledger.excluded["late"] += 1


def unknown_reason(ledger):
    ledger.excluded["lost"] += 1
    ledger.sampled += 1


def another_count(ledger):
    ledger.trained += 1
    ledger.sampled += 1


def another_role(ledger):
    ledger.roles["sub-agent"] += 1


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("falsify", [wrong_sum, unknown_reason, another_count, another_role])
def test_an_export_that_breaks_the_conservation_law_leaves_nothing_behind(tmp_path, format, falsify):
    ledger = Ledger()

    def stream():
        yield from sample_run(recorded(hand_written_run()), ledger=ledger)
        falsify(ledger)

    with pytest.raises(AccountError):
        export(stream(), format, tmp_path / "out", ledger)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_sample_that_goes_missing_or_comes_twice_is_noticed(tmp_path, format):
    for change in (lambda found: found[1:], lambda found: [*found, found[0]]):
        ledger = Ledger()
        found = list(sample_run(recorded(hand_written_run()), ledger=ledger))
        with pytest.raises(AccountError, match="9 in|twice"):
            export(change(found), format, tmp_path / "out", ledger)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format", GRADED)
@pytest.mark.parametrize(
    ("missing", "fields"),
    [
        ("group", {"group": None, "advantage": None}),
        ("reward", {"reward": None, "advantage": None}),
    ],
)
def test_trainers_with_groups_need_a_group_and_a_reward(tmp_path, format, missing, fields):
    with pytest.raises(ExportError, match=f"execution x has no {missing}.*{format}.*parquet or jsonl"):
        export([sample(**fields)], format, tmp_path / "out")
    assert os.listdir(tmp_path) == []
    assert export([sample(**fields)], "jsonl", tmp_path / "out") == 1
    assert export([sample(**fields)], "parquet", tmp_path / "out2") == 1


def test_an_unknown_format_is_refused_by_name(tmp_path):
    with pytest.raises(ExportError, match="'csv'; choose one of jsonl, parquet, slime, trl, verl"):
        export([], "csv", tmp_path / "out")


def test_targets_that_cannot_be_written_are_refused_in_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ExportError, match="there is no folder"):
        export([sample()], "jsonl", tmp_path / "missing" / "out")
    for name in ("folder", "pipe"):
        for overwrite in (False, True):
            with pytest.raises(ExportError, match="no file that could be replaced"):
                export([sample()], "jsonl", tmp_path / name, overwrite=overwrite)
    with pytest.raises(ExportError, match="cannot be written: File name too long"):
        export([sample()], "jsonl", tmp_path / ("n" * 300))
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"] and os.listdir(tmp_path / "folder") == []


def test_an_error_of_the_samples_passes_through_and_leaves_nothing_behind(tmp_path):
    path = write_log(tmp_path / "run.jsonl", hand_written_run())
    lines = path.read_bytes().splitlines(keepends=True)
    lines[-2] = lines[-2].replace(b'"output_ids":[41,42]', b'"output_ids":[41,true]')
    path.write_bytes(b"".join(lines))
    out = tmp_path / "out"
    with (
        RunLogIndex(path) as index,
        pytest.raises(gyre_trajtree.RunLogCorrupt, match=f"line {len(lines) - 1}"),
    ):
        export(sample_run(index), "jsonl", out)
    assert not out.exists() and os.listdir(tmp_path) == ["run.jsonl"]


@pytest.mark.parametrize(
    ("format", "module"), [("parquet", "pyarrow"), ("slime", "torch")], ids=["parquet", "slime"]
)
def test_a_missing_extra_is_named_in_one_line(tmp_path, format, module):
    code = f"""
import sys
sys.modules[{module!r}] = None
from gyre_trajtree import export, ExportError
try:
    export([], {format!r}, {str(tmp_path / "out")!r})
except ExportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"the {format} format needs {module}; install gyre-trajtree[{format}]\n"
    assert os.listdir(tmp_path) == []


def test_only_the_formats_that_need_them_import_pyarrow_or_torch(tmp_path):
    code = f"""
import sys
from gyre_trajtree import export
for format in ("jsonl", "trl", "verl"):
    export([], format, {str(tmp_path)!r} + "/" + format)
print(sorted({{"pyarrow", "torch", "pandas"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture
def small_disk():
    """No file of this process may grow beyond 30 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("format", ["jsonl", "parquet", "slime"])  # TRL's and verl's are written as jsonl is
def test_a_disk_that_takes_no_more_is_told_in_one_line_and_leaves_nothing_behind(
    tmp_path, format, small_disk
):
    tokens = [37 * i * i % 100_003 for i in range(50_000)]
    run = [opened("x", "g"), call("a", "x", [1], tokens), Assessment("x", "valid", 1.0)]
    with pytest.raises(ExportError) as refused:
        export(sample_run(recorded(run)), format, tmp_path / "out")
    assert str(refused.value) == f"{tmp_path / 'out'}: cannot be written: File too large"
    assert os.listdir(tmp_path) == []


def documented_fields(title):
    """Names in the first column of the table below a heading of docs/exports.md."""
    text = (Path(__file__).parents[2] / "docs" / "exports.md").read_text()
    (section,) = [part for part in text.split("\n## ") if part.startswith(title)]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [name.strip(" `") for row in rows for name in row.split("|")[1].split(",")]


@pytest.mark.parametrize("format", FORMATS)
def test_the_documentation_names_the_fields_that_are_written(tmp_path, format):
    exported(branching_run(), format, tmp_path / "out")
    fields = documented_fields("jsonl and parquet" if format in ("jsonl", "parquet") else format)
    for row in rows_of(format, tmp_path / "out"):
        assert sorted(row) == sorted(fields)
