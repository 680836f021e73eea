"""A model folder is checked whole without torch, and what is wrong is one line that names the file."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from gyre_trainer.errors import ModelError
from gyre_trainer.model_folder import ModelFacts, check
from gyre_trainer.model_qwen3 import Qwen3

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


def writing(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def changing(**changes) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def header(**tensors) -> Damage:
    """Weights of this header, with eight bytes of numbers."""
    text = json.dumps(tensors).encode()
    return lambda folder: (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))


def pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


DAMAGES = {
    "a list": (writing("config.json", "[]"), "config.json must hold a JSON object"),
    "deep": (writing("config.json", "[" * 100_000), "config.json cannot be read"),
    "a pipe": (pipe, "config.json does not exist"),
    "text for a number": (changing(max_position_embeddings="a"), "config.json: max_position_embeddings"),
    "below zero": (changing(max_position_embeddings=-1), "config.json: max_position_embeddings"),
    "endless positions": (changing(max_position_embeddings=10**12), "config.json: max_position_embeddings"),
    "no heads": (changing(num_attention_heads=0), "config.json: num_attention_heads"),
    "a truth for a number": (changing(hidden_size=True), "config.json: hidden_size"),
    "heads that do not divide": (changing(num_key_value_heads=3), "config.json: 4 attention heads"),
    "odd heads": (changing(head_dim=7), "config.json: head_dim"),
    "not finite": (changing(rms_norm_eps=float("nan")), "config.json: rms_norm_eps"),
    "rope of text": (changing(rope_parameters="x"), "config.json: the rope parameters"),
    "tied by text": (changing(tie_word_embeddings="no"), "config.json: tie_word_embeddings"),
    "more layers than weights": (changing(num_hidden_layers=10**9), "no tensor model.layers.2"),
    "another shape": (
        changing(intermediate_size=50),
        "model.safetensors: model.layers.0.mlp.gate_proj.weight is",
    ),
    "eos of text": (
        writing("generation_config.json", '{"eos_token_id": ["a"]}'),
        "generation_config.json: eos",
    ),
    "eos of lists": (changing(eos_token_id=[[1]]), "config.json: eos"),
    "eos outside": (writing("generation_config.json", '{"eos_token_id": 96}'), "generation_config.json: eos"),
    "a list to generate by": (writing("generation_config.json", "[]"), "generation_config.json must hold"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no *.safetensors file"),
    "empty weights": (writing(WEIGHTS, ""), "model.safetensors cannot be read"),
    "half a header": (lambda folder: os.truncate(folder / WEIGHTS, 100), "model.safetensors cannot be read"),
    "half the numbers": (
        lambda folder: os.truncate(folder / WEIGHTS, 9000),
        "model.safetensors cannot be read",
    ),
    "a header of lists": (header(a=[]), "model.safetensors cannot be read"),
    "a shape of text": (
        header(a={"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}),
        "model.safetensors",
    ),
    "whole numbers": (header(a={"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}), "'I64'"),
    "an index of nothing": (writing(INDEX, '{"weight_map": 5}'), "index.json: weight_map"),
    "an index outside": (writing(INDEX, '{"weight_map": {"a": "../b"}}'), "is not the name of a file"),
    "an index of a lost file": (writing(INDEX, '{"weight_map": {"a": "b"}}'), "b does not exist"),
}


@pytest.fixture
def damaged(tmp_path, models):
    """`damaged(damage) -> folder`: a copy of a model that something is wrong with."""

    def make(damage: Damage) -> Path:
        folder = shutil.copytree(models["1"], tmp_path / "model")
        damage(folder)
        return folder

    return make


def test_the_facts_of_a_model_need_no_torch(models):
    code = (
        "import sys; from pathlib import Path; from gyre_trainer.model_folder import check;"
        f"print(check(Path({str(models['1'])!r})), 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"{ModelFacts(vocabulary=96, context=4096)} False"


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_wrong_is_one_line(damaged, damage, says):
    folder = damaged(damage)
    for read in (check, Qwen3.load):
        with pytest.raises(ModelError) as error:
            read(folder)
        assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES.keys())
def test_an_update_to_it_is_a_400_and_the_engine_serves_on(server, damaged, damage, says):
    body = {"model_path": str(damaged(damage)), "weight_version": "9"}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        before = client.get("/get_model_info").json()
        answer = client.post("/update_weights_from_disk", json=body)
        assert (answer.status_code, answer.json()["success"]) == (400, False)
        assert says in answer.json()["message"]
        assert client.get("/get_model_info").json() == before
        prompt = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        assert client.post("/generate", json=prompt).status_code == 200
