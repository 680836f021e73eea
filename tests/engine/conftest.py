"""Tiny random Qwen3 directories made by transformers, and what transformers says of their log-probs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 96
EOS = 2


def _make_model(directory: Path, seed: int, **changes) -> Path:
    """Save a random Qwen3 with `changes` to its configuration. Weights are wide, so that distributions are
    uneven.
    """
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**settings | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(directory)
    return directory


class Reference:
    """Log-probs by transformers: the independent truth."""

    def __init__(self, directory: Path):
        torch.set_num_threads(1)
        self.model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        """Of every output token, given all before it."""
        logits = self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        return logprobs.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1).tolist()


@pytest.fixture(scope="session")
def make_model():
    """`make_model(directory, seed, **configuration) -> directory`."""
    return _make_model


@pytest.fixture(scope="session")
def reference():
    """`reference(directory) -> Reference`."""
    return Reference


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Two sets of weights of one shape: versions "1" and "2"."""
    root = tmp_path_factory.mktemp("models")
    return {version: _make_model(root / version, int(version)) for version in ("1", "2")}


@pytest.fixture(scope="session")
def references(models) -> dict[str, Reference]:
    return {version: Reference(directory) for version, directory in models.items()}


class Server:
    """An engine server process; ended with its standard input at the latest."""

    def __init__(self, model: Path, *options: str):
        command = [sys.executable, "-m", "gyre_trainer.engine_server", "--model", str(model), *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        line = self.process.stdout.readline()
        assert line, "the server ended before it was ready"
        self.url = json.loads(line)["url"]

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.fixture(scope="session")
def start_server():
    """`start_server(model, *options) -> Server`; stopped at the end of the session."""
    running: list[Server] = []

    def start(model: Path, *options: str) -> Server:
        running.append(Server(model, "--exit-with-parent", *options))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def server(models, start_server) -> Server:
    """One server for all tests; each leaves it as it was: running, with the weights of version "1"."""
    return start_server(models["1"], "--weight-version", "1", "--seed", "0")
