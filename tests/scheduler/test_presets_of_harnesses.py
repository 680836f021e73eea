"""Presets of harnesses: what they render to. tests/harnesses runs them."""

import json
import re
import tomllib

import pytest
from gyre_scheduler.errors import HarnessNotFound
from gyre_scheduler.executions import ExecutionFolder
from gyre_scheduler.harnesses import HARNESSES, Model, opencode

MODEL = Model('na"me', window=50_000, output=4000)
URL, KEY = "http://127.0.0.1:7/x/e", "secret-key"


def rendered(preset, tmp_path, **options):
    """(command, environment, files) for one execution."""
    harness = preset.harness(MODEL, **options)
    values = ExecutionFolder(tmp_path).values({"prompt": "--help me"}, URL, KEY)
    files = {str(path): text for path, text in harness.render_files(values).items()}
    return harness.render_command(values), harness.render_env(values), files


@pytest.mark.parametrize("name", HARNESSES)
def test_a_preset_tells_its_harness_address_key_and_model(name, tmp_path):
    command, environment, files = rendered(HARNESSES[name], tmp_path)
    ours = {"GYRE_BASE_URL", "GYRE_API_KEY", "GYRE_TASK_FILE"}
    told = "\n".join([*command, *(v for k, v in environment.items() if k not in ours), *files.values()])
    assert URL in told and ('na"me' in told or 'na\\"me' in told)
    assert KEY in told or 'env_key = "GYRE_API_KEY"' in told
    assert not re.search(r"\{\w+\}", told), "a placeholder is left"
    assert KEY not in " ".join(command), "a list of processes shows the key"
    for path, text in files.items():
        (json.loads if path.endswith(".json") else tomllib.loads)(text)


@pytest.mark.parametrize("name", ["claude-code", "codex", "qwen-code", "opencode", "pi"])
def test_a_preset_tells_the_window(name, tmp_path):
    _, environment, files = rendered(HARNESSES[name], tmp_path)
    assert "50000" in [*environment.values()] or any("50000" in text for text in files.values())


@pytest.mark.parametrize("name", HARNESSES)
def test_a_prompt_is_never_an_option(name, tmp_path):
    command, _, _ = rendered(HARNESSES[name], tmp_path)
    after_options = command[-2] == "--" and command[-1] == "--help me"
    assert after_options or any(re.fullmatch(r"(--\w+=|\n)--help me", part) for part in command)


def test_what_is_given_changes_a_preset(tmp_path):
    preset = HARNESSES["qwen-code"]
    command, environment, files = rendered(
        preset,
        tmp_path,
        program=("node", "cli.js"),
        env={"OPENAI_MODEL": "another", "EXTRA": "{model}"},
        files={"notes": "{key}"},
    )
    assert command[:3] == ["node", "cli.js", "--prompt=--help me"]
    assert (environment["OPENAI_MODEL"], environment["EXTRA"]) == ("another", 'na"me')
    assert files["notes"] == KEY and ".qwen/settings.json" in files
    command, environment, _ = rendered(preset, tmp_path, command=("mine", "{model}"))
    assert command == ["mine", 'na"me'] and environment["OPENAI_BASE_URL"] == f"{URL}/v1"


def test_opencode_speaks_what_its_package_speaks(tmp_path):
    _, _, files = rendered(opencode("@ai-sdk/anthropic"), tmp_path)
    (text,) = files.values()
    assert json.loads(text)["provider"]["gyre"]["npm"] == "@ai-sdk/anthropic"


def test_a_harness_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HarnessNotFound, match="'codex' does not exist"):
        HARNESSES["codex"].harness(MODEL).check()
