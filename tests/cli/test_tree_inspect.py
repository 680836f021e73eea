"""`gyre tree inspect` on a terminal and for machines, on whole, damaged, empty, foreign and very long logs."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil

import pytest
from cli_trees import gyre, long_log, two_executions
from gyre_cli.treeview import MOST_DEPTH, MOST_STRANDS, show_execution
from gyre_trajtree import Call, Execution, RecordedExecution, RunLogIndex, RunLogWriter, inspect
from rich.cells import cell_len
from rich.console import Console


@pytest.fixture
def log(tmp_path):
    return two_executions(tmp_path / "run.jsonl")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return long_log(tmp_path_factory.mktemp("long") / "long.jsonl", 1300)


def shown(recorded, full=False, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show_execution(inspect(recorded), full, console)
    return console.export_text().splitlines()


def summaries(path, *options):
    result = gyre("tree", "inspect", path, "--json", *options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def refused(result, message, code=2):
    lines = result.stderr.strip().splitlines()
    assert result.returncode == code, result.stderr
    assert len(lines) == 1 and lines[0].startswith("gyre: ") and message in lines[0], result.stderr


def test_machines_get_the_documented_keys(log):
    found = summaries(log)
    row = found["executions"][0]
    fixed = ("id", "calls", "leaves", "unique_tokens", "expanded_tokens", "roles", "reward")
    assert {key: row[key] for key in fixed} == {
        "id": "one-a", "calls": 3, "leaves": 2, "unique_tokens": 9, "expanded_tokens": 14, "roles": {"main": 2},
        "reward": 0.5,
    }  # fmt: skip
    assert found["totals"]["sampled_tokens"] == 5
    assert found["totals"]["excluded_tokens"] == {"no-logprob": 1, "unresolved": 1}
    assert found["corrupt_lines"] == []


def test_many_executions_are_a_table_and_one_is_a_tree(log):
    table = gyre("tree", "inspect", log).stdout
    assert re.search(r"one-a +0\.500 +3 +9 +14", table) and "all 2" in table and "31% saved" in table
    tree = gyre("tree", "inspect", log, "--execution", "one-a").stdout
    assert "one-a" in tree and "one-b" not in tree
    assert re.search(r"2 +7 .*main.*start", tree) and re.search(r"1 +2 .*edit", tree)


def test_the_only_execution_is_drawn_without_being_named(tmp_path):
    with RunLogWriter(tmp_path / "r.jsonl") as log:
        log.append(Call("a", "x", [1], [2], logprobs=[-1.0]))
    assert "start" in gyre("tree", "inspect", tmp_path / "r.jsonl").stdout


def test_the_beginning_of_an_id_names_an_execution_if_it_names_one(log):
    assert [row["id"] for row in summaries(log, "--execution", "one-b")["executions"]] == ["one-b"]
    refused(gyre("tree", "inspect", log, "--execution", "one"), "2 executions begin with 'one': one-a, one-b")
    refused(gyre("tree", "inspect", log, "--execution", "two"), "holds no execution 'two'")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_logs_are_read(tmp_path, suffix):
    assert summaries(two_executions(tmp_path / f"run.jsonl{suffix}"))["totals"]["calls"] == 4


def test_a_log_that_was_compressed_whole_is_read(log, tmp_path):
    with open(log, "rb") as plain, gzip.open(tmp_path / "whole.jsonl.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    assert summaries(tmp_path / "whole.jsonl.gz") == summaries(log)


def test_a_corrupt_line_is_named_and_the_rest_is_shown(log):
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:3], b'{"type": "call", "id": 5}\n', *lines[3:]]))
    result = gyre("tree", "inspect", log, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 0 and found["corrupt_lines"] == [4] and found["totals"]["calls"] == 4
    assert result.stderr.count("\n") == 1 and "line 4" in result.stderr


def test_a_torn_line_is_left_out(log):
    log.write_bytes(log.read_bytes() + b'{"type":"call","id":"torn","execution":"one-a","input_ids":[1')
    found = summaries(log)
    assert found["totals"]["calls"] == 4 and found["corrupt_lines"] == []


@pytest.mark.parametrize("header", [True, False])
def test_an_empty_log_holds_nothing(tmp_path, header):
    path = tmp_path / "empty.jsonl"
    if header:
        RunLogWriter(path).close()
    else:
        path.touch()
    assert summaries(path)["executions"] == []
    assert "all 0" in gyre("tree", "inspect", path).stdout
    refused(gyre("tree", "inspect", path, "--execution", "x"), "it holds 0")


def test_a_log_of_nothing_but_calls_is_enough(tmp_path):
    path = tmp_path / "calls.jsonl"
    with RunLogWriter(path) as log:
        log.append(Call("a", "x", [1, 2], [3], logprobs=[-1.0]))
        log.append(Call("b", "x", [1, 2, 3, 4], [5], logprobs=[-1.0]))
    found = summaries(path)["executions"][0]
    assert (found["calls"], found["leaves"], found["unique_tokens"]) == (2, 1, 5)
    assert found["trained_tokens"] == 2 and found["reward"] is None
    assert gyre("tree", "inspect", path).returncode == 0


def test_calls_outside_the_tree_are_flagged(tmp_path):
    path = tmp_path / "late.jsonl"
    with RunLogWriter(path) as log:
        log.append(Call("a", "x", [1, 2], [3], logprobs=[-1.0]))
        log.append(Call("b", "x", [1], [3], parent="nowhere", logprobs=[-1.0]))
        log.append(Execution("x", "closed", termination="timeout"))
        log.append(Call("c", "x", [1, 2], [3], logprobs=[-1.0]))
    result = gyre("tree", "inspect", path)
    assert "1 call came after the execution had closed: c" in result.stdout
    assert "1 call in no tree" in result.stdout and "nowhere" in result.stdout
    assert summaries(path)["totals"]["excluded_tokens"] == {"late": 1, "rejected": 1}


def test_an_execution_without_calls_is_shown(tmp_path):
    with RunLogWriter(tmp_path / "r.jsonl") as log:
        log.append(Execution("x", "closed", termination="failed", task="t"))
    result = gyre("tree", "inspect", tmp_path / "r.jsonl")
    assert result.returncode == 0 and re.search(r"x +task t +failed", result.stdout)


def test_a_long_tree_is_readable_within_100_columns(long):
    recorded = RunLogIndex(long).load("x-long")
    lines = shown(recorded)
    assert len(recorded.calls) >= 1300
    assert len(lines) < 2 * MOST_STRANDS + 10
    assert all(cell_len(line) <= 100 for line in lines)
    text = "\n".join(lines)
    for word in ("main-summary", "sub-agent", "delegation of call-", "compaction of call-", "◆1", "more:"):
        assert word in text, word


def rows_of(lines):
    """(calls, tokens) of each line of a tree."""
    found = (re.match(r" *([\d,]+) +([\d,]+) .*(?:main|sub-agent|auxiliary|✗|…)", line) for line in lines)
    return [tuple(int(number.replace(",", "")) for number in row.groups()) for row in found if row]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("width", [80, 100, 200])
def test_what_a_tree_shows_and_what_it_counts_is_all_there_is(long, full, width):
    recorded = RunLogIndex(long).load("x-long")
    summary = inspect(recorded).summary()
    lines = shown(recorded, full, width)
    rows = rows_of(lines)
    assert sum(calls for calls, _ in rows) == summary["calls"]
    assert sum(tokens for _, tokens in rows) == summary["unique_tokens"]
    assert full is (len(rows) == summary["leaves"]) is not any("more:" in line for line in lines)


def test_depth_is_limited_honestly():
    def brief(level):
        return f"Do the part of the work that is left at level {level}."

    calls = [
        Call(
            f"c{level}",
            "x",
            [level],
            [2],
            logprobs=[-1.0],
            evidence={
                "system": f"agent {level}",
                "tools": "t",
                "first_user": brief(level),
                "last_user": brief(level),
                "spawns": [brief(level + 1)],
            },
        )
        for level in range(3 * MOST_DEPTH)
    ]
    recorded = RecordedExecution("x", calls=calls)
    lines = shown(recorded, width=160)
    rows = rows_of(lines)
    assert len(rows) == MOST_DEPTH + 2 and rows[-1][0] == len(calls) - MOST_DEPTH - 1
    assert f"… {rows[-1][0]} more: {rows[-1][0]} delegation" in "\n".join(lines)
    assert len(rows_of(shown(recorded, full=True, width=300))) == len(calls)


def test_ids_and_texts_cannot_write_to_the_terminal(tmp_path):
    path, identity = tmp_path / "r.jsonl", "task:[/bold][red]7\x1b[2J\u202e\x00😀"
    with RunLogWriter(path) as log:
        log.append(Call("[/]\x07", identity, [1], [2], logprobs=[-1.0]))
        log.append(Call("b", "other", [1], [2], logprobs=[-1.0]))
    for options in ((), ("--execution", "task:")):
        result = gyre("tree", "inspect", path, *options, env=os.environ | {"COLUMNS": "160"})
        assert result.returncode == 0, result.stderr
        assert r"task:[/bold][red]7\u{1b}[2J\u{202e}\u{0}😀" in result.stdout
        assert not any(char in result.stdout for char in "\x1b\x00\x07\u202e")


def test_errors_cannot_write_to_the_terminal(tmp_path):
    path = tmp_path / "r.jsonl"
    with RunLogWriter(path) as log:
        for name in ("x\x1b[2J1", "x\x1b[2J2"):
            log.append(Call("a", name, [1], [2], logprobs=[-1.0]))
            log.append(Call("b\x1b[2J", name, [1], [2], parent="\x1b[2J", logprobs=[-1.0]))
    refused(gyre("tree", "inspect", path, "--execution", "x"), r"x\u{1b}[2J1, x\u{1b}[2J2")
    result = gyre("tree", "inspect", path, "--execution", "x\x1b[2J2")
    assert "in no tree" in result.stdout and "\x1b" not in result.stdout


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, log):
    refused(gyre("tree", "inspect", tmp_path), "is not a file")
    refused(gyre("tree", "inspect", tmp_path / "none.jsonl"), "none.jsonl")
    (tmp_path / "other.jsonl").write_text("not a log\n" * 3)
    refused(gyre("tree", "inspect", tmp_path / "other.jsonl"), "line 1")
    (tmp_path / "torn.jsonl.gz").write_bytes(b"\x1f\x8b nonsense")
    refused(gyre("tree", "inspect", tmp_path / "torn.jsonl.gz"), "torn.jsonl.gz")
    refused(
        gyre("tree", "inspect", log, "--html", tmp_path / "p.html", "--tokenizer", tmp_path), "tokenizer.json"
    )
    refused(gyre("tree", "inspect", log, "--tokenizer", tmp_path), "add --html")


def test_help_says_what_the_columns_are():
    text = " ".join(gyre("tree", "inspect", "--help", env=os.environ | {"COLUMNS": "200"}).stdout.split())
    assert "A strand is one conversation" in text and "◆n" in text
