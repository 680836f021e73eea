"""`gyre tree sample` and `gyre tree export`: what training draws, written whole or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cli_trees import gyre, long_log, two_executions
from gyre_trajtree import Assessment, Call, Execution, RunLogIndex, RunLogWriter, sample_run


@pytest.fixture
def log(tmp_path):
    return two_executions(tmp_path / "run.jsonl")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return long_log(tmp_path_factory.mktemp("long") / "long.jsonl", 300)


def figures(*arguments):
    result = gyre("tree", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def refused(result, message, code=2):
    lines = result.stderr.strip().splitlines()
    assert result.returncode == code, result.stderr
    assert len(lines) == 1 and lines[0].startswith("gyre: ") and message in lines[0], result.stderr


def test_a_sample_is_what_training_draws(long, tmp_path):
    found = figures("sample", long, "--j-max", 3, "--seed", 7, "-o", tmp_path / "s.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    with RunLogIndex(long) as index:
        drawn = list(sample_run(index, j_max=3, seed=7))
    assert len(rows) == len(drawn) == found["trajectories"] == 3
    for row, sample in zip(rows, drawn, strict=True):
        assert (row["leaf"], row["role"], row["reward"]) == (sample.leaf, sample.role, 0.625)
        assert np.array_equal(row["ids"], sample.trajectory.ids)
        assert np.array_equal(row["targets"], sample.trajectory.targets)
    assert found["trained_tokens"] == sum(sum(row["targets"]) for row in rows)


@pytest.mark.parametrize("j_max", [0, 1, 2, 5])
def test_tokens_are_conserved_and_inspect_tells_the_same(long, j_max):
    found = figures("sample", long, "--j-max", j_max, "--seed", 1)
    assert found["sampled_tokens"] == found["trained_tokens"] + sum(found["excluded_tokens"].values())
    totals = figures("inspect", long, "--j-max", j_max, "--seed", 1)["totals"]
    for key in ("sampled_tokens", "trained_tokens", "excluded_tokens", "trajectories"):
        assert totals[key] == found[key], key
    assert (found["trajectories"] <= j_max) is (j_max > 0)


def test_counts_are_shown_to_people_without_a_file(log):
    result = gyre("tree", "sample", log)
    assert result.returncode == 0
    assert "1 of 2 executions: 1 main" in result.stdout
    assert "5 = 3 trained + 1 no-logprob + 1 unresolved" in result.stdout


@pytest.mark.parametrize("format", ["parquet", "jsonl", "trl", "verl", "slime"])
def test_each_format_is_written_with_the_same_account(long, tmp_path, format):
    found = figures("export", long, "--format", format, "-o", tmp_path / "out")
    assert (tmp_path / "out").stat().st_size > 0
    assert (found["format"], found["output"], found["trajectories"]) == (format, str(tmp_path / "out"), 5)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_is_overwritten_only_by_force(log, tmp_path):
    target = tmp_path / "s.jsonl"
    target.write_text("mine")
    refused(gyre("tree", "sample", log, "-o", target), "--force")
    refused(gyre("tree", "export", log, "--format", "trl", "-o", target), "--force")
    refused(gyre("tree", "inspect", log, "--html", target), "--force")
    assert target.read_text() == "mine"
    assert gyre("tree", "sample", log, "-o", target, "--force").returncode == 0
    assert json.loads(target.read_text())["execution"] == "one-a"


def test_what_cannot_be_written_is_refused_in_one_line(log, tmp_path):
    refused(gyre("tree", "export", log, "--format", "nope", "-o", tmp_path / "f"), "unknown format 'nope'")
    refused(gyre("tree", "export", log, "--format", "trl", "-o", tmp_path), "is a folder")
    refused(gyre("tree", "sample", log, "-o", tmp_path / "no" / "f"), "make it first")
    refused(gyre("tree", "sample", log, "--normalise", "nope"), "nope")
    refused(gyre("tree", "sample", tmp_path / "none.jsonl"), "none.jsonl")
    assert gyre("tree", "sample", log, "--j-max", -1).returncode == 2
    assert gyre("tree", "export", log, "-o", tmp_path / "f").returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_corrupt_log_is_not_trained_on(log, tmp_path):
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:2], b"{broken}\n", *lines[2:]]))
    refused(gyre("tree", "sample", log, "-o", tmp_path / "s.jsonl"), "line 3")
    assert not (tmp_path / "s.jsonl").exists()


def test_advantages_are_those_of_the_group(tmp_path):
    path = tmp_path / "group.jsonl"
    with RunLogWriter(path) as log:
        for name, reward in (("x", 1.0), ("y", 0.0), ("z", 0.5)):
            log.append(Execution(name, "opened", group="g"))
            log.append(Call(name, name, [1], [2], logprobs=[-1.0]))
            log.append(Assessment(name, "valid", reward))
    figures("sample", path, "-o", tmp_path / "s.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row["advantage"] for row in rows] == pytest.approx([0.5, -0.5, 0.0])


def test_an_empty_log_gives_no_samples(tmp_path):
    RunLogWriter(tmp_path / "r.jsonl").close()
    assert figures("sample", tmp_path / "r.jsonl", "-o", tmp_path / "s.jsonl")["trajectories"] == 0
    assert (tmp_path / "s.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    "command", [("sample", "-o"), ("export", "--format", "jsonl", "-o"), ("inspect", "--html")]
)
def test_a_log_is_never_written_over_by_what_is_drawn_from_it(log, command):
    before = log.read_bytes()
    name, *options = command
    refused(gyre("tree", name, log, *options, log, "--force"), "run log itself")
    assert log.read_bytes() == before
