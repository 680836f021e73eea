"""The configuration: priorities, refusals, and a round trip through its own file."""

import json

import pytest
from gyre_cli.config import load_config, to_toml
from gyre_cli.errors import MisuseError


def test_a_dumped_configuration_loads_as_itself(tmp_path):
    config = load_config(None, ["schedule.steps=12", 'harness.env={"A": "b c"}', "training.j_max=0"], seed=3)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config.dump()))
    assert load_config(path) == config


@pytest.mark.parametrize(
    "evaluator",
    [
        "my.module:evaluate",
        "https://host:8000/score",
        ["{python}", "score.py", "{workspace}"],
        {
            "url": "https://host/v1",
            "model": "m",
            "key_env": "JUDGE_KEY",
            "rubric": 'half for "a",\n½ for \U0001f600\x7f',
        },
        {"url": "https://host/v1", "model": "m", "options": {"temperature": 0, "stop": ["x"]}, "turns": 3},
    ],
)
def test_every_kind_of_evaluator_survives_its_own_file(tmp_path, evaluator, monkeypatch):
    config = load_config(None, [f"task.evaluator={json.dumps(evaluator)}"])
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config.dump()))
    assert load_config(path) == config
    found = config.dump()["task"]["evaluator"]
    assert (
        found if not isinstance(evaluator, dict) else {name: found[name] for name in evaluator}
    ) == evaluator
    given = evaluator if isinstance(evaluator, str) else json.dumps(evaluator)
    monkeypatch.setenv("GYRE_TASK__EVALUATOR", given)
    assert load_config().task == config.task


def test_the_judge_of_a_file_is_changed_by_its_parts(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[task.evaluator]\nurl = "http://host/v1"\nmodel = "m"\n')
    judge = load_config(path, ["task.evaluator.model=n"]).task.evaluator
    assert (judge.url, judge.model) == ("http://host/v1", "n")


def test_set_beats_environment_beats_file_beats_default(tmp_path, monkeypatch):
    path = tmp_path / "c.toml"
    path.write_text("[schedule]\nsteps = 6\ngroup_size = 4\nmu = 2\n")
    monkeypatch.setenv("GYRE_SCHEDULE__GROUP_SIZE", "5")
    monkeypatch.setenv("GYRE_SCHEDULE__MU", "6")
    schedule = load_config(path, ["schedule.mu=1"]).schedule
    assert (schedule.steps, schedule.group_size, schedule.mu, schedule.groups_per_step) == (6, 5, 1, 6)


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("schedule.stepz=3", "schedule.stepz"),
        ("schedule.steps=many", "schedule.steps"),
        ("schedule.policy=lazy", "schedule.policy"),
        ("nonsense", "--set takes"),
        ("schedule..steps=3", "--set takes"),
        ("seed=1000000000000000000000000000000", "seed"),
        ("training.betas=[NaN, 0.5]", "training.betas"),
        ("training.betas=[2, 0.5]", "training.betas"),
        ("harness.timeout_s=Infinity", "harness.timeout_s"),
        ('harness.env={"A": "a\\u0000b"}', "cannot be written"),
        ('harness.env={"A=B": "x"}', "harness.env"),
        ('task.source="\\ud800"', "cannot be written"),
        ("seed=" + "[" * 100_000, "seed"),
        ("seed.x=1", "seed"),
        ("task.evaluator=http://host:port/", "task.evaluator: 'http://host:port/' is not a URL"),
        ("task.evaluator=https://u:p@host/", "task.evaluator: a URL with a user or password"),
        ("task.evaluator=7", "task.evaluator.text"),
        ("task.evaluator=[1]", "task.evaluator.command.0"),
        ("task.evaluator.url=http://host/v1", "task.evaluator.judge.model: Field required"),
        ('task.evaluator={"url": "host", "model": "m"}', "task.evaluator.judge.url: 'host' is not a URL"),
        ('task.evaluator={"url": "http://h", "model": "m", "key_env": "sk-1"}', "judge.key_env"),
        ('task.evaluator={"url": "http://h", "model": "m", "rubrik": "x"}', "judge.rubrik: there is no such"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(assignment, part):
    with pytest.raises(MisuseError) as error:
        load_config(None, [assignment])
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(MisuseError, match="does not exist"):
        load_config(tmp_path / "no.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[schedule\n")
    with pytest.raises(MisuseError, match="cannot be read"):
        load_config(broken)


@pytest.mark.parametrize("name", ["GYRE_SCHEDULE", "GYRE_HARNESS__COMMAND", "GYRE_HARNESS__ENV"])
def test_a_variable_that_is_not_json_where_it_must_be_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "{bad")
    with pytest.raises(MisuseError) as error:
        load_config()
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_file_of_a_hundred_thousand_brackets_is_refused(tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(MisuseError, match="cannot be read"):
        load_config(path)


def test_a_file_does_not_leak_into_the_next_load(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("seed = 9\n")
    assert load_config(path).seed == 9
    assert load_config().seed == 0
