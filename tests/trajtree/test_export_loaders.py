"""The verl and slime exports against those projects' schemas.

Neither can share this environment (verl wants older transformers, slime is installed from its repository), so their
schemas are pinned here from the named sources, and their own loaders are run where these variables point to them:

GYRE_VERL_PYTHON   a Python with `verl==0.9.1 TransferQueue cachetools fastapi uvicorn msgspec pyzmq`
GYRE_SLIME_SOURCE  a checkout of THUDM/slime
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from gyre_trajtree import Assessment, Ledger, export, group_advantages, sample_run
from sampled_runs import call, opened, recorded

REWARDS = {"a": 0.0, "b": 1.0, "c": 0.5}
RECORDS = [
    record
    for name, score in REWARDS.items()
    for record in [
        opened(name, "some_group"),  # verl splits its keys at underscores
        call(f"{name}1", name, [1, 2, 3], [10, 11, 12], [-0.1, -0.2, -0.3], version=4),
        call(f"{name}2", name, [4], [13, 14], [-0.4, -0.5], version=5, parent=f"{name}1"),
        call(f"{name}3", name, [5, 6], [15, 16, 17], [-0.6, None, -0.8], version=5, parent=f"{name}1"),
        Assessment(name, "valid", score),
    ]
]
ADVANTAGES = dict(zip(REWARDS, group_advantages(list(REWARDS.values())), strict=True))

# verl 0.9.1, verl/experimental/agent_loop/agent_loop.py: AgentLoopOutput
VERL_FIELDS = {
    "prompt_ids": [int],
    "response_ids": [int],
    "response_mask": [int],
    "response_logprobs": [float],
    "reward_score": float,
    "metrics": dict,
    "extra_fields": dict,
}
# verl 0.9.1, verl/trainer/ppo/v1/replay_buffer.py: a trajectory's key is {uid}_{session_id}_{index}
VERL_KEY = {"uid": str, "session_id": int, "index": int}
# slime 624b824a, slime/utils/types.py: Sample
SLIME_FIELDS = {
    "group_index": int,
    "index": int,
    "rollout_id": int,
    "tokens": [int],
    "response_length": int,
    "loss_mask": [int],
    "rollout_log_probs": [float],
    "reward": dict,
    "weight_versions": [str],
    "status": str,
    "metadata": dict,
}


def exported(format, target):
    ledger = Ledger()
    samples = list(sample_run(recorded(RECORDS), ledger=ledger))
    export(iter(samples), format, target, ledger)
    return samples


def kind(value):
    """Type of a value; of a list, its elements' types."""
    return [*set(map(type, value))] if isinstance(value, list) else type(value)


def test_verl_rows_have_the_fields_of_an_agent_loop_output_and_of_its_key(tmp_path):
    samples = exported("verl", tmp_path / "verl.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "verl.jsonl").read_bytes().splitlines()]
    assert len(rows) == len(samples) == 6
    for row in rows:
        assert {name: kind(value) for name, value in row.items()} == VERL_FIELDS | VERL_KEY
        assert len(row["response_ids"]) == len(row["response_mask"]) == len(row["response_logprobs"])
        assert row["extra_fields"]["reward_extra_info"] == {}  # verl reads it where a session has two outputs


def test_slime_rows_have_the_fields_of_a_sample(tmp_path):
    samples = exported("slime", tmp_path / "slime.pt")
    data = torch.load(tmp_path / "slime.pt", weights_only=True)
    assert data.keys() == {"rollout_id", "samples"} and len(data["samples"]) == len(samples) == 6
    for row in data["samples"]:
        assert {name: kind(value) for name, value in row.items()} == SLIME_FIELDS
        assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == row["response_length"]
        assert row["response_length"] < len(row["tokens"])
        assert row["status"] == "completed"


VERL_SCRIPT = """
import json, sys
import numpy as np, torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

rows = [json.loads(line) for line in open(sys.argv[1])]
outputs = [AgentLoopOutput(**row).as_dict() for row in rows]
pad = lambda name: torch.nn.utils.rnn.pad_sequence([o[name] for o in outputs], batch_first=True)
data = DataProto(
    batch=TensorDict(
        {"token_level_rewards": pad("rm_scores"), "response_mask": pad("response_mask")}, batch_size=len(rows)
    ),
    non_tensor_batch={"uid": np.array([row["uid"] for row in rows], dtype=object)},
)
keys = [f"{row['uid']}_{row['session_id']}_{row['index']}" for row in rows]
data = compute_advantage_for_multi_trajectories(
    data, keys, AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=False, config=OmegaConf.create({})
)
print(json.dumps([
    {
        "ids": o["prompts"].tolist() + o["responses"].tolist(),
        "mask": o["response_mask"].tolist(),
        "logprobs": o["rollout_log_probs"].tolist(),
        "advantages": advantages[: len(o["responses"])].tolist(),
    }
    for o, advantages in zip(outputs, data.batch["advantages"])
]))
"""

SLIME_SCRIPT = """
import json, sys
from types import SimpleNamespace
from slime.observability.rollout_data_utils import load_debug_rollout_data

loaded = load_debug_rollout_data(sys.argv[1], rollout_id=0)
for sample in loaded:
    sample._validate_response_metadata_lengths()
args = SimpleNamespace(reward_key="advantage")
print(json.dumps([
    {
        "ids": sample.tokens,
        "mask": sample.loss_mask,
        "logprobs": sample.rollout_log_probs,
        "advantages": [sample.get_reward_value(args) * trains for trains in sample.loss_mask],
        "rollout": sample.rollout_id,
        "trained": sample.effective_response_length,
    }
    for sample in loaded
]))
"""


def run(python, script, *arguments, **environment):
    done = subprocess.run(
        [python, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compare(found, samples):
    """What a project made of the export, against the samples."""
    assert len(found) == len(samples)
    for row, sample in zip(found, samples, strict=True):
        trajectory = sample.trajectory
        start = int(trajectory.targets.argmax())
        targets = trajectory.targets[start:].tolist()
        assert row["ids"] == trajectory.ids.tolist()
        assert row["mask"] == targets
        logprobs = zip(row["logprobs"], trajectory.logprobs[start:].tolist(), targets, strict=True)
        assert all(given == recorded for given, recorded, trains in logprobs if trains)
        assert row["advantages"] == pytest.approx([ADVANTAGES[sample.execution] * t for t in targets])


@pytest.mark.skipif("GYRE_VERL_PYTHON" not in os.environ, reason="GYRE_VERL_PYTHON names no Python with verl")
def test_verl_loads_its_export_and_computes_our_advantages(tmp_path):
    samples = exported("verl", tmp_path / "verl.jsonl")
    compare(run(os.environ["GYRE_VERL_PYTHON"], VERL_SCRIPT, tmp_path / "verl.jsonl"), samples)


@pytest.mark.skipif(
    "GYRE_SLIME_SOURCE" not in os.environ, reason="GYRE_SLIME_SOURCE names no checkout of slime"
)
def test_slime_loads_its_export_and_takes_our_advantages(tmp_path):
    samples = exported("slime", tmp_path / "slime.pt")
    found = run(
        sys.executable, SLIME_SCRIPT, tmp_path / "slime.pt", PYTHONPATH=os.environ["GYRE_SLIME_SOURCE"]
    )
    compare(found, samples)
    targets = {}
    for row, sample in zip(found, samples, strict=True):
        assert row["trained"] == sample.trajectory.targets.sum()
        targets.setdefault(row["rollout"], []).append(sample.execution)
    assert {number: set(names) for number, names in targets.items()} == {0: {"a"}, 1: {"b"}, 2: {"c"}}
