"""The configuration: priorities, refusals, and a round trip through its own file."""

import pytest
from gyre_cli.config import load_config, to_toml
from gyre_cli.errors import MisuseError


def test_a_dumped_configuration_loads_as_itself(tmp_path):
    config = load_config(None, ["schedule.steps=12", 'harness.env={"A": "b c"}', "training.j_max=0"], seed=3)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config.dump()))
    assert load_config(path) == config


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
