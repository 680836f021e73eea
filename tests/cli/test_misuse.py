"""Mistakes of a user: one clear line on standard error, a defined exit code, no traceback, nothing left running."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys

import pytest
from gyre_cli.quickstart import model_path


def gyre(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "gyre_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(result: subprocess.CompletedProcess, message: str, code: int = 2) -> None:
    lines = result.stderr.strip().splitlines()
    assert result.returncode == code, result.stderr
    assert lines[-1].startswith("gyre: ") and message in lines[-1], result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.path=/no/such/model", "is not a folder"),
        ("task.source=/no/such/tasks.jsonl", "cannot be read"),
        ("task.source=no_module:tasks", "cannot be loaded"),
        ('harness.command=["/no/such/harness"]', "does not exist"),
        ('harness.command=["{python}", "{nonsense}"]', "{nonsense}"),
        ("schedule.phi=0.3", "phi*B must be a whole number"),
        ("schedule.policy=async,schedule.training_cells=2", "leaves no rollout capacity"),
        ("training.clip_low=1.2", "training.clip_low"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_starts(tmp_path, assignment, message):
    options = [part for each in assignment.split(",schedule.") for part in ("--set", each)]
    options = [o if not o.startswith("training_cells") else f"schedule.{o}" for o in options]
    result = gyre("train", "--run-dir", str(tmp_path / "run"), *options)
    refused(result, message)
    assert not (tmp_path / "run").exists()


def test_a_used_run_directory_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused(gyre("train", "--run-dir", str(tmp_path)), "already holds something")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_path(), model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    refused(
        gyre("train", "--run-dir", str(tmp_path / "run"), "--set", f"model.path={model}"), "chat template"
    )


def test_a_busy_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        model = str(model_path())
        refused(gyre("engine", "serve", "--model", model, "--port", str(port)), f"127.0.0.1:{port}")
        record = str(tmp_path / "run.jsonl")
        arguments = ("--tokenizer", model, "--record", record, "--engine", "http://127.0.0.1:1")
        refused(gyre("proxy", "serve", *arguments, "--port", str(port)), f"127.0.0.1:{port}")
        refused(
            gyre("train", "--run-dir", str(tmp_path / "run"), "--set", f"proxy.port={port}"),
            f"{port}",
            code=1,
        )


def test_paths_of_the_other_commands_are_checked(tmp_path):
    refused(gyre("tree", "inspect", str(tmp_path / "none.jsonl")), "none.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text("not a run log\n")
    refused(gyre("tree", "inspect", str(broken)), "line 1")
    refused(gyre("report", str(tmp_path)), "is not a run directory")
    refused(gyre("engine", "serve", "--model", str(tmp_path)), str(tmp_path))
    refused(
        gyre("proxy", "serve", "--tokenizer", str(tmp_path), "--record", "r", "--engine", "http://x"),
        "tokenizer",
    )
    refused(gyre("proxy", "serve", "--tokenizer", str(tmp_path)), "--record")
    refused(gyre("schedule", "simulate", "--preset", "none"), "there is no preset")
    refused(gyre("schedule", "simulate", "--set", "costs.publish_hours=x"), "publish_hours")
    refused(gyre("model", "tiny", str(broken)), "cannot be made a folder")
    refused(gyre("model", "tiny", str(tmp_path)), "already holds something")


def test_the_proxy_command_takes_the_proxys_own_arguments():
    shown = gyre("proxy", "serve", "--help")
    assert shown.returncode == 0 and shown.stdout.startswith("usage: gyre proxy serve")
    for flag in ("--top-k", "--call-deadline", "--keepalive", "--template-arguments", "--admin-token-stdin"):
        assert flag in shown.stdout
    refused(gyre("proxy", "serve", "--nonsense"), "--help")


def test_an_unknown_command_or_option_exits_2():
    assert gyre("trian").returncode == 2
    assert gyre("train", "--nonsense").returncode == 2


def test_a_dry_run_prints_a_configuration_that_loads(tmp_path):
    printed = gyre("train", "--dry-run", "--set", "schedule.steps=7")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "mine.toml").write_text(printed.stdout)
    again = gyre("train", "--dry-run", "--json", "--config", str(tmp_path / "mine.toml"))
    assert json.loads(again.stdout)["schedule"]["steps"] == 7
