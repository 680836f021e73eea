"""`gyre schedule`: machine-readable results, durations of recorded runs, pages, and mistakes."""

from __future__ import annotations

import json

import pytest
from gyre_cli.config import load_config
from gyre_cli.errors import MisuseError
from gyre_cli.main import app
from gyre_trajtree import Execution, RunLogWriter
from typer.testing import CliRunner

SHORT = ("--set", "steps=3", "--seeds", "1")


def gyre(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["schedule", *arguments, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout.splitlines()[-1])


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["schedule", *arguments])
    assert isinstance(result.exception, MisuseError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.fixture
def log(tmp_path):
    """Six executions of two tasks that took 1 to 3 hours, one that was cancelled, one that is open."""
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path) as writer:
        for number in range(8):
            name, task = f"e{number}", f"task-{number % 2}"
            writer.append(Execution(name, "opened", group=str(number // 4), task=task, time=1000.0))
            if number < 7:
                end = "cancelled" if number == 6 else "completed"
                hours = 1 + number // 2
                writer.append(Execution(name, "closed", time=1000.0 + 3600 * hours, termination=end))
    return path


def test_table1_has_eleven_rows_and_says_what_was_fitted():
    found = gyre("compare", "table1", "--seeds", "1")
    assert [row["name"] for row in found["rows"]] == [
        "A0",
        "A1",
        "A2",
        "A3",
        "C0",
        "C1",
        "C2",
        "C3",
        "E0",
        "E1",
        "E2",
    ]
    assert {"hours", "paper_hours", "error"} <= found["rows"][0].keys()
    assert found["rms_error"] <= 0.03 and found["worst_error"] <= 0.06 and found["same_order"] is True
    assert found["fitted"]["node_hours_per_step"] > 0


def test_presets_side_by_side_with_overrides_have_no_paper_hours(tmp_path):
    page = tmp_path / "side.html"
    found = gyre("compare", "nl2repo-e0", "nl2repo-c0", *SHORT, "--html", str(page))
    assert [row["policy"] for row in found["rows"]] == ["elastic", "colocate"]
    assert found["rms_error"] is None and found["rows"][0]["paper_hours"] is None and found["fitted"] == {}
    text = page.read_text()
    assert text.count("<svg") == 2 and "nl2repo-c0" in text


def test_a_run_log_gives_the_durations_by_task(log):
    found = gyre("simulate", "--preset", "nl2repo-e0", "--workload", str(log), "--set", "steps=3")
    from gyre_cli.durations import load_workload

    assert load_workload(log).groups == ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
    assert found["steps"] == 3 and found["hours"] > 3 and found["paper_hours"] is None


def test_samples_of_a_file_are_hours_by_query(tmp_path):
    file = tmp_path / "hours.json"
    file.write_text("[[0.5, 1], [2]]")
    found = gyre("compare", "nl2repo-e0", "nl2repo-a0", "--workload", str(file), *SHORT)
    assert found["rows"][0]["hours"] < found["rows"][1]["hours"]


def test_a_plan_recommends_settings_that_a_run_takes():
    found = gyre("plan", "--preset", "nl2repo-e2", *SHORT)
    best = found["best"]
    assert best["staleness_target"] == 1.5
    names = ("policy", "phi", "mu", "launch_order", "training_cells", "streaming", "dispatch")
    assignments = [f"schedule.{name}={json.dumps(best['settings'][name])}" for name in names]
    taken = load_config(assignments=assignments).schedule
    assert {name: getattr(taken, name) for name in names} == {name: best["settings"][name] for name in names}
    assert best["hours"] >= found["bounds"]["work"] > found["bounds"]["training_only"] > 0
    assert set(found["hours_by_j_max"]) == {"1", "5", "all"} and found["limit"]


def test_people_get_tables():
    for arguments in (
        ("compare", "nl2repo-e0", "nl2repo-e2", *SHORT),
        ("plan", "--preset", "nl2repo-e2", *SHORT),
    ):
        result = CliRunner().invoke(app, ["schedule", *arguments])
        assert result.exit_code == 0 and "elastic" in result.output
        assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1.0], [0]]", "above 0 hours"),
        ("[]", "at least one group"),
        ("{", "is not JSON"),
        ("[1, 2]", "a list of lists of hours"),
        ('[["x"]]', "a list of lists of hours"),
        ("[[true]]", "a list of lists of hours"),
    ],
)
def test_samples_that_are_none_are_refused_in_a_line(tmp_path, content, message):
    file = tmp_path / "hours.json"
    file.write_text(content)
    assert message in refused("simulate", "--workload", str(file))


def test_a_page_never_takes_the_place_of_what_is_read_and_is_refused_before_the_work(tmp_path, log):
    before = log.read_bytes()
    for command in (("simulate",), ("compare", "quickstart")):
        message = refused(*command, "--workload", str(log), "--html", str(log))
        assert "name another file" in message and log.read_bytes() == before
        assert "is a folder" in refused(*command, "--html", str(tmp_path))
        assert "make it first" in refused(*command, "--html", str(tmp_path / "none" / "x.html"))


def test_short_workloads_are_told_in_seconds():
    for arguments in (("compare", "quickstart", *SHORT), ("plan", "--preset", "quickstart", *SHORT)):
        result = CliRunner().invoke(app, ["schedule", *arguments])
        assert "seconds" in result.output and " 0.00 " not in result.output, result.output


def test_a_plan_does_not_ask_for_the_presets_phi():
    assert gyre("plan", "--preset", "quickstart", "--set", "groups_per_step=5", "--staleness", "1", *SHORT)[
        "best"
    ]


def test_mistakes_are_one_line(tmp_path, log):
    assert "nothing is called 'nl2repo-e9'; there are comparisons table1" in refused("compare", "nl2repo-e9")
    assert "named twice" in refused("compare", "quickstart", "quickstart")
    assert "there is no preset 'E0'" in refused("simulate", "--preset", "E0")
    assert "publish_hours must be at most" in refused("simulate", "--set", "costs.publish_hours=1e308")
    for setting in ("phi=1e300", "mu=100000000", "costs.micro_steps_per_group=1000000"):
        assert "are more than the" in refused("simulate", "--set", setting)
    assert "table1 is a comparison of its own" in refused("compare", "table1", "nl2repo-e0")
    assert "a plan searches phi itself" in refused("plan", "--set", "settings.phi=1")
    assert "executions or micro-steps" in refused("simulate", "--set", "oversample=100000000")
    result = CliRunner().invoke(app, ["schedule", "simulate", "--set", "costs.invalid=1"])
    assert result.exception.exit_code == 1 and "aborted" in str(result.exception)
    assert "no schedule has a mean staleness of 0.01" in refused("plan", "--staleness", "0.01")
    assert "phi*B must be a whole number" in refused("simulate", "--set", "phi=0.3")
    assert "cannot be read" in refused("simulate", "--workload", str(tmp_path / "none.json"))
    assert "no setting 'queries'" in refused(
        "simulate", "--workload", str(log), "--set", "workload.queries=3"
    )
    assert "are more than the" in refused("compare", "nl2repo-e0", "--set", "steps=1000000")
    empty = tmp_path / "empty.jsonl"
    RunLogWriter(empty).close()
    assert "holds no execution" in refused("simulate", "--workload", str(empty))
