"""Owns the verl export: JSON Lines of agent loop outputs, keyed as verl's replay buffer keys them (verl 0.9).

Invariant: a line has the fields of verl's AgentLoopOutput beside `uid`, `session_id` and `index`, of which verl makes
the key of a trajectory: group, execution within it, trajectory within that. GRPO counts each session once.
"""

from collections.abc import Iterable
from typing import BinaryIO

import orjson

from gyre_trajtree.conservation import Ledger
from gyre_trajtree.exports.rollouts import Rollout, rollouts
from gyre_trajtree.samples import Sample


def write(samples: Iterable[Sample], file: BinaryIO, ledger: Ledger | None) -> None:
    """Write one line a sample. Raises ExportError for an execution without a group or a reward."""
    for rollout in rollouts(samples, "verl"):
        file.write(orjson.dumps(_row(rollout), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


def _row(rollout: Rollout) -> dict:
    sample = rollout.sample
    prompt = rollout.prompt
    return {
        "uid": sample.group,
        "session_id": rollout.member,
        "index": rollout.part,
        "prompt_ids": sample.trajectory.ids[:prompt],
        "response_ids": sample.trajectory.ids[prompt:],
        "response_mask": rollout.mask[prompt:],
        "response_logprobs": rollout.logprobs[prompt:],
        "reward_score": sample.reward,
        "metrics": {},
        "extra_fields": {
            "advantage": sample.advantage,
            "execution": sample.execution,
            "leaf": sample.leaf,
            "role": sample.role,
            "min_global_steps": rollout.versions[0],
            "max_global_steps": rollout.versions[-1],
            "reward_extra_info": {},  # verl copies it from the last output of a session to the others
        },
    }
