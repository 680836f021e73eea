"""Directories that appear whole, and continuing from one."""

import json

import pytest
import torch
from gyre_trainer import checkpoint
from gyre_trainer.actor import TrainingActor
from gyre_trainer.errors import ModelError
from gyre_trainer.rows import MicroStep
from gyre_trainer.settings import AdamSettings, ObjectiveSettings


def test_a_directory_appears_only_when_its_writing_ended_well(tmp_path):
    target = tmp_path / "weights" / "v1"
    with pytest.raises(RuntimeError, match="disk"), checkpoint.atomic_directory(target) as temporary:
        (temporary / "half").write_text("x")
        assert not target.exists()
        raise RuntimeError("disk")
    assert list(target.parent.iterdir()) == []
    with checkpoint.atomic_directory(target) as temporary:
        (temporary / "whole").write_text("x")
    assert [path.name for path in target.parent.iterdir()] == ["v1"]


def test_a_directory_of_an_earlier_run_is_replaced(tmp_path):
    for text in ("old", "new"):
        with checkpoint.atomic_directory(tmp_path / "v1") as temporary:
            (temporary / text).write_text(text)
    assert [path.name for path in (tmp_path / "v1").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_model_files_are_copied_without_weights_or_state(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "optimizer.pt",
    ):
        (source / name).write_text("{}")
    checkpoint.write_state(source, 4)
    checkpoint.copy_model_files(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("content", [None, "{", "{}", '{"format": 1}', '{"format": 2, "version": 3}'])
def test_what_is_no_checkpoint_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / checkpoint.STATE).write_text(content)
    with pytest.raises(ModelError, match="not a checkpoint|upgrade"):
        checkpoint.read_version(tmp_path)


def test_training_continues_from_saved_state_as_if_it_had_not_stopped(tmp_path, model_dir, make_executions):
    adam = AdamSettings(lr=1e-3, eps=1e-8)
    batches = [make_executions(3, seed=seed) for seed in range(3)]

    def step(actor, batch):
        actor.train(MicroStep(0, tuple(batch)))
        actor.optimizer_step(1 / len(batch))

    straight = TrainingActor(model_dir, 0, ObjectiveSettings(), adam)
    for batch in batches[:2]:
        step(straight, batch)
    torch.save(straight.optimizer_state(), tmp_path / "optimizer.pt")
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    straight.save_weights(tmp_path / "model.safetensors")
    step(straight, batches[2])

    resumed = TrainingActor(tmp_path, 2, ObjectiveSettings(), adam)
    resumed.load_optimizer_state(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    step(resumed, batches[2])
    assert resumed.version == straight.version == 3
    assert all(torch.equal(resumed.weights[name], value) for name, value in straight.weights.items())


def test_rates_of_a_resumed_run_are_those_of_its_settings(tmp_path, model_dir, make_executions):
    first = TrainingActor(model_dir, 0, ObjectiveSettings(), AdamSettings(lr=1e-3, weight_decay=0.5))
    first.train(MicroStep(0, tuple(make_executions(1))))
    first.optimizer_step(1.0)
    second = TrainingActor(model_dir, 1, ObjectiveSettings(), AdamSettings(lr=2e-4, weight_decay=0.1))
    second.load_optimizer_state(first.optimizer_state())
    groups = second.optimizer_state()["param_groups"]
    assert {group["lr"] for group in groups} == {2e-4}
    assert sorted({group["weight_decay"] for group in groups}) == [0.0, 0.1]


def test_the_state_file_is_plain_json(tmp_path):
    checkpoint.write_state(tmp_path, 12)
    assert json.loads((tmp_path / checkpoint.STATE).read_text()) == {"format": 1, "version": 12}
    assert checkpoint.read_version(tmp_path) == 12
