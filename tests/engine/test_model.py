"""What a model directory must be, and that loading it gives transformers' log-probs whatever its shape."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gyre_trainer.errors import EngineError, ModelError
from gyre_trainer.generation import Generation, Sampling
from gyre_trainer.model_folder import read_config
from gyre_trainer.model_qwen3 import KVCache, Qwen3
from safetensors.torch import load_file, save_file

SHAPES = {
    "tied, grouped": {},
    "untied, one kv head": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "every head its own kv, wide heads": {"num_key_value_heads": 4, "head_dim": 16},
    "large rope base, one layer": {
        "num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logprobs_equal_transformers_for_every_shape(tmp_path, make_model, reference, changes):
    truth = reference(make_model(tmp_path, 3, **changes))
    with torch.inference_mode():
        generation = Generation(Qwen3.load(tmp_path), context=128, seed=0)
        prompts = {str(n): [(7 * i + n) % 90 + 3 for i in range(n)] for n in (1, 2, 17, 60)}
        for rid, prompt in prompts.items():
            generation.add(rid, prompt, Sampling(max_new_tokens=12, ignore_eos=True))
        done = []
        while not generation.idle:
            done += generation.step()
    assert len(done) == len(prompts)
    for output in done:
        expected = truth.logprobs(prompts[output.rid], output.output_ids)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)


def test_weights_in_several_bfloat16_files_load_as_float32(tmp_path, models):
    weights = {n: t.bfloat16() for n, t in load_file(models["1"] / "model.safetensors").items()}
    names = sorted(weights)
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({n: weights[n] for n in part}, tmp_path / f"model-{index}.safetensors")
    shutil.copy(models["1"] / "config.json", tmp_path)
    model = Qwen3.load(tmp_path)
    assert torch.equal(model.embed, weights["model.embed_tokens.weight"].float())
    assert model.layers[1].down.dtype == torch.float32


def test_rope_base_and_eos_are_read_in_the_older_layout(tmp_path, models):
    config = json.loads((models["1"] / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5000.0, "rope_scaling": None, "eos_token_id": [2, 5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    assert (read.rope_theta, read.eos) == (5000.0, {2, 5})


def test_eos_of_the_generation_config_wins(tmp_path, models):
    shutil.copy(models["1"] / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_config(tmp_path).eos == {7, 8}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope scaling"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"attention_bias": True}, "attention bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"vocab_size": 97}, "embed_tokens.weight is (96, 32)"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
    ],
)
def test_a_model_that_cannot_be_served_is_named(tmp_path, models, change, says):
    config = json.loads((models["1"] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(models["1"] / "model.safetensors", tmp_path)
    with pytest.raises(ModelError) as error:
        Qwen3.load(tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value)


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _with_half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type":')


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _with_torn_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _with_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without_config, "does not exist"),
        (_with_half_a_config, "config.json cannot be read"),
        (_without_weights, "no *.safetensors"),
        (_with_torn_weights, "model.safetensors cannot be read"),
        (_with_nan, "model.norm.weight has numbers that are not finite"),
    ],
)
def test_a_damaged_directory_is_named(tmp_path, models, damage, says):
    folder = shutil.copytree(models["1"], tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError) as error:
        Qwen3.load(folder)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_cache_without_memory_says_what_to_lower(models):
    config = read_config(models["1"])
    with pytest.raises(EngineError, match="lower --max-running or --context-length"):
        KVCache(config, 1 << 30, 1 << 20, torch.device("cpu"), torch.float32)
