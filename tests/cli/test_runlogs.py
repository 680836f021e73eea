"""Progress of slow work goes to standard error, once it is slow; targets are never lost."""

from __future__ import annotations

import errno

import pytest
from cli_trees import two_executions
from gyre_cli import runlogs
from gyre_cli.errors import CommandError, MisuseError
from gyre_cli.runlogs import Watched, opened
from gyre_trajtree import AccountError, TrajtreeError
from rich.console import Console


@pytest.fixture
def log(tmp_path):
    return two_executions(tmp_path / "run.jsonl")


def test_quick_work_says_nothing(log, capsys):
    with opened(log) as index:
        assert [each.id for each in Watched(index, index.ids, "working")] == ["one-a", "one-b"]
    assert capsys.readouterr() == ("", "")


def test_slow_work_says_how_far_it_is(log, capsys, monkeypatch):
    monkeypatch.setattr(runlogs, "LINE_EVERY_S", -1.0)
    with opened(log) as index:
        list(Watched(index, index.ids, "working"))
    said = capsys.readouterr()
    assert said.err.splitlines() == ["working: 0 of 2 executions", "working: 1 of 2 executions"]
    assert said.out == ""


def test_slow_work_moves_a_bar_on_a_terminal(log, capsys, monkeypatch):
    monkeypatch.setattr(runlogs, "QUIET_S", -1.0)
    monkeypatch.setattr(runlogs, "Console", lambda **options: Console(force_terminal=True, **options))
    with opened(log) as index:
        list(Watched(index, index.ids, "working"))
    said = capsys.readouterr()
    assert "working" in said.err and "2" in said.err and said.out == ""


def test_a_full_disk_and_a_broken_account_are_failures_and_the_rest_misuse(log):
    full = TrajtreeError("full")
    full.__cause__ = OSError(errno.ENOSPC, "no space")
    for error, code in ((full, 1), (AccountError("lost"), 1), (TrajtreeError("odd"), 2)):
        with pytest.raises(CommandError) as raised, opened(log):
            raise error
        assert raised.value.exit_code == code and isinstance(raised.value, MisuseError) is (code == 2)
