"""A tiny Qwen3 from transformers, executions of random tokens, and a dense reference of the objective."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from gyre_trainer.rows import TrainingExecution, TrainingRow
from gyre_trainer.settings import ObjectiveSettings

VOCABULARY = 640


def make_model(directory: Path, tied: bool = True, groups: int = 4, seed: int = 0):
    """Write a tiny random Qwen3 and return transformers' model of it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=groups,
        head_dim=16,
        intermediate_size=192,
        tie_word_embeddings=tied,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.08,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():  # norms other than one, so that a mix-up shows
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="session")
def reference_model(model_dir):
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="session")
def make_executions(reference_model):
    """`make_executions(count, seed)`: executions of one to three rows, sampled near the model's policy."""

    def make(count: int, seed: int = 0, noise: float = 0.01, version: int = 0) -> list[TrainingExecution]:
        rng = np.random.default_rng(seed)
        executions = []
        for i in range(count):
            name = f"e{seed}-{i}"
            rows = [_row(reference_model, name, rng, noise, version) for _ in range(rng.integers(1, 4))]
            executions.append(TrainingExecution(name, float(rng.normal()), tuple(rows)))
        return executions

    return make


def _row(model, execution, rng, noise, version) -> TrainingRow:
    length = int(rng.integers(2, 40))
    ids = rng.integers(0, VOCABULARY, length)
    targets = rng.random(length) < 0.4
    targets[0], targets[-1] = False, True
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0]
    log_pi = torch.log_softmax(logits[:-1], -1).gather(-1, torch.from_numpy(ids[1:])[:, None])[:, 0].numpy()
    log_b = np.concatenate([[np.nan], log_pi + rng.normal(size=length - 1) * noise])
    return TrainingRow(
        execution, ids, targets, np.where(targets, log_b, np.nan), np.where(targets, version, -1)
    )


def dense_loss(model, executions: list[TrainingExecution], settings: ObjectiveSettings) -> torch.Tensor:
    """The objective written out for one execution and one row at a time, summed over executions."""
    total = torch.zeros(())
    for execution in executions:
        log_pi, log_b = [], []
        for row in execution.rows:
            ids = torch.from_numpy(row.ids).long()
            log_probs = torch.log_softmax(model(ids[None]).logits[0] / settings.temperature, -1)
            for position in np.flatnonzero(row.targets):
                log_pi.append(log_probs[position - 1, ids[position]])
                log_b.append(float(row.logprobs[position]))
        if not log_pi:
            continue
        log_pi, log_b = torch.stack(log_pi), torch.tensor(log_b)
        ratio = (log_pi.detach() - log_b).mean().exp()
        masked = (execution.advantage > 0 and ratio > settings.clip_high) or (
            execution.advantage < 0 and ratio < settings.clip_low
        )
        weight = (log_pi.detach() - log_b).exp().clamp(max=settings.token_weight_cap)
        if not masked:
            total = total - execution.advantage * (weight * log_pi).sum() / len(log_pi)
    return total


@pytest.fixture(scope="session")
def reference_gradients(reference_model):
    """`reference_gradients(executions, settings)`: Hugging Face name -> gradient of the dense loss."""

    def gradients(executions, settings) -> dict[str, torch.Tensor]:
        reference_model.zero_grad()
        dense_loss(reference_model, executions, settings).backward()
        return {name: parameter.grad.clone() for name, parameter in reference_model.named_parameters()}

    return gradients


@pytest.fixture(scope="session")
def make_tiny_model():
    return make_model
