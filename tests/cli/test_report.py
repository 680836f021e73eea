"""Reports of runs that are whole, in progress or killed; charts that are well-formed."""

from __future__ import annotations

import xml.etree.ElementTree as xml

import pytest
from gyre_cli.charts import Span, line_chart, role_timeline
from gyre_cli.errors import MisuseError
from gyre_cli.progress import sparkline
from gyre_cli.report import read_run, training_share, write_report
from gyre_cli.summary import show_summary
from gyre_trajtree import Event, RunLogWriter


@pytest.fixture
def run_dir(tmp_path):
    with RunLogWriter(tmp_path / "run.jsonl") as log:
        for time, cell, role in (
            (0, 0, "rollout"),
            (0, 1, "rollout"),
            (6, 0, "transition"),
            (7, 0, "training"),
            (9, 0, "rollout"),
        ):
            log.append(Event("role", 100.0 + time, {"cell": cell, "role": role}))
        log.append(Event("schedule", 110.0, {"event": {}, "actions": [], "waterlevel": 3}))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward_mean": 0.5, "staleness_mean": 0.0}\n{"step": 2, "rew'
    )
    return tmp_path


def test_roles_become_spans_that_cover_the_time(run_dir):
    data = read_run(run_dir)
    assert data.cells == 2 and data.end == 10.0
    assert sorted((s.cell, s.role, s.start, s.end) for s in data.spans) == [
        (0, "rollout", 0.0, 6.0), (0, "rollout", 9.0, 10.0), (0, "training", 7.0, 9.0), (0, "transition", 6.0, 7.0),
        (1, "rollout", 0.0, 10.0),
    ]  # fmt: skip
    assert training_share(data) == {0: 0.2, 1: 0.0}


def test_a_killed_run_has_a_report_too(run_dir):
    page = write_report(run_dir).read_text()
    assert "the run has not finished" in page and 'class="role training"' in page


def test_a_page_that_cannot_be_written_is_named(run_dir):
    with pytest.raises(MisuseError, match="cannot be written"):
        write_report(run_dir, run_dir / "no" / "such" / "page.html")


@pytest.mark.parametrize(
    "points", [[(0, 0)], [(1, 0.5), (2, 0.5)], [(0, -3), (1e6, 1e-9)], [(0.1, 12345.678)] * 3]
)
def test_charts_are_well_formed_for_any_range(points):
    xml.fromstring(line_chart({"a & b": points}, "x <", "y"))


def test_no_points_make_no_chart():
    assert "No data" in line_chart({"a": []}, "x", "y")


def test_a_timeline_draws_each_span_in_its_row():
    picture = xml.fromstring(
        "<p>" + role_timeline([Span(0, "training", 0, 5), Span(1, "rollout", 5, 5)], 2, 10) + "</p>"
    )
    bars = [e for e in picture.iter() if e.tag.endswith("rect")]
    assert len(bars) == 2 and bars[0].get("y") != bars[1].get("y")
    assert float(bars[1].get("width")) > 0


def test_a_sparkline_holds_its_bounds():
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 2.0]) == "▁▁▅██"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.jsonl", b"garbage\n"),
        ("summary.json", b'{"torn": '),
        ("summary.json", b"[1]"),
        ("metrics.jsonl", b'{"step": 1}\n'),
        ("metrics.jsonl", b'{"step": 1, "reward_mean": null, "staleness_mean": 0}\n'),
        ("metrics.jsonl", b"[1]\n"),
    ],
)
def test_what_no_run_writes_is_named(run_dir, name, content):
    (run_dir / name).write_bytes(content)
    with pytest.raises(MisuseError, match=name):
        write_report(run_dir)


@pytest.mark.parametrize(
    "fields", [{"cell": 10_000_000, "role": "rollout"}, {"role": "rollout"}, {"cell": "x", "role": "r"}]
)
def test_an_event_that_no_run_writes_is_named(run_dir, fields):
    with RunLogWriter(run_dir / "run.jsonl") as log:
        log.append(Event("role", 111.0, fields))
    with pytest.raises(MisuseError, match="event that no run writes"):
        write_report(run_dir)


def test_a_configuration_in_another_encoding_is_shown(run_dir):
    (run_dir / "config.toml").write_bytes(b"seed = 1 # \xe9")
    assert "seed = 1" in write_report(run_dir).read_text()


def test_paths_of_the_summary_can_be_copied(capsys, monkeypatch):
    """However narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", "40")
    where = "/a/long/[path]/" + "x" * 100
    names = ("steps", "executions", "sampled_tokens", "trained_tokens", "role_switches", "reroutes", "seed")
    numbers = dict.fromkeys((*names, "same_version_tokens", "max_logprob_mismatch", "seconds"), 1)
    rewards = dict.fromkeys(("reward_first3", "reward_last3", "staleness_mean", "staleness_target"), 0.5)
    words = {"policy": "elastic", "excluded_tokens": {}, "outcomes": {}, "trajectories": {}, "rewards": [0.5]}
    show_summary({**numbers, **rewards, **words, "run_dir": where})
    assert f"{where}/run.jsonl" in capsys.readouterr().out
