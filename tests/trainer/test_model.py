"""Qwen3 on megatron-core against transformers, and the way back."""

import json

import numpy as np
import pytest
import torch
from gyre_trainer.actor import TrainingActor
from gyre_trainer.errors import ModelError, RowError
from gyre_trainer.model import read_shape
from gyre_trainer.rows import TrainingRow
from gyre_trainer.settings import ObjectiveSettings
from safetensors.torch import load_file


def rows_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for i, length in enumerate(lengths):
        targets = np.ones(length, bool)
        targets[0] = False
        rows.append(
            TrainingRow(
                f"e{i}",
                rng.integers(0, 640, length),
                targets,
                np.where(targets, -1.0, np.nan),
                np.where(targets, 0, -1),
            )
        )
    return rows


def reference_log_probs(model, rows):
    parts = []
    with torch.no_grad():
        for row in rows:
            ids = torch.from_numpy(row.ids).long()
            log_probs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
            parts.append(log_probs.gather(-1, ids[1:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize(("tied", "groups"), [(True, 4), (True, 2), (False, 1)])
def test_packed_log_probs_equal_transformers_row_by_row(tmp_path, make_tiny_model, tied, groups):
    model = make_tiny_model(tmp_path, tied, groups)
    actor = TrainingActor(tmp_path, 0, ObjectiveSettings())
    rows = rows_of([2, 31, 7, 31, 90])
    got = actor.log_probs(rows)
    assert (got - reference_log_probs(model, rows)).abs().max() < 2e-5


@pytest.mark.parametrize(("tied", "groups"), [(True, 4), (False, 2)])
def test_weights_survive_the_round_trip_bit_for_bit(tmp_path, make_tiny_model, tied, groups):
    make_tiny_model(tmp_path, tied, groups)
    TrainingActor(tmp_path, 0, ObjectiveSettings()).save_weights(tmp_path / "back.safetensors")
    before, after = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "back.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_sharded_weights_are_read(tmp_path, make_tiny_model):
    model = make_tiny_model(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    rows = rows_of([9])
    one = TrainingActor(tmp_path / "one", 0, ObjectiveSettings()).log_probs(rows)
    many = TrainingActor(tmp_path / "many", 0, ObjectiveSettings()).log_probs(rows)
    assert torch.equal(one, many)


def test_rows_packed_together_do_not_see_each_other(model_dir):
    actor = TrainingActor(model_dir, 0, ObjectiveSettings())
    rows = rows_of([5, 40, 3, 17])
    together = actor.log_probs(rows)
    alone = torch.cat([actor.log_probs([row]) for row in rows])
    assert (together - alone).abs().max() < 1e-5
    changed = rows_of([5], seed=9) + rows[1:]
    assert torch.allclose(actor.log_probs(changed)[4:], together[4:], atol=1e-6)


def test_log_probs_are_taken_at_the_sampling_temperature(model_dir, reference_model):
    rows = rows_of([12])
    hot = TrainingActor(model_dir, 0, ObjectiveSettings(temperature=2.0)).log_probs(rows)
    ids = torch.from_numpy(rows[0].ids).long()
    with torch.no_grad():
        logits = reference_model(ids[None]).logits[0, :-1] / 2.0
    expected = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
    assert (hot - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama"}, "'llama'; only dense"),
        ({"attention_bias": True}, "attention bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling"),
        ({"num_hidden_layers": None}, "has no 'num_hidden_layers'"),
        ({"intermediate_size": 128}, "config.json asks for"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
    ],
)
def test_a_model_that_is_not_supported_is_named(tmp_path, model_dir, change, says):
    config = json.loads((model_dir / "config.json").read_text())
    config.update(change)
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=says):
        TrainingActor(tmp_path, 0, ObjectiveSettings())


def test_a_directory_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ModelError, match="give a Hugging Face model directory"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ModelError, match="has no"):
        read_shape(tmp_path)


def test_torn_weights_are_named(tmp_path, model_dir):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes()[: 2000 if name[0] == "m" else None])
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        TrainingActor(tmp_path, 0, ObjectiveSettings())


def test_a_token_outside_the_vocabulary_is_named(model_dir):
    row = rows_of([4])[0]
    bad = TrainingRow("e", np.array([1, 2, 3, 640]), row.targets, row.logprobs, row.versions)
    with pytest.raises(RowError, match="640 is outside the vocabulary of 640"):
        TrainingActor(model_dir, 0, ObjectiveSettings()).log_probs([bad])
