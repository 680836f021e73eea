"""Owns the TRL export: JSON Lines that `datasets` loads, for AsyncGRPO's rollout queue and for SFTTrainer (TRL 1.16).

Invariant: `input_ids`, `completion_mask`, `old_log_probs`, `advantage`, `group_id`, `model_version` and `metrics` are
fields of TRL's RolloutSample; `assistant_masks` is the mask that SFTTrainer applies whatever its settings.
"""

from collections.abc import Iterable
from typing import BinaryIO

import orjson

from gyre_trajtree.conservation import Ledger
from gyre_trajtree.exports.rollouts import Rollout, rollouts
from gyre_trajtree.samples import Sample


def write(samples: Iterable[Sample], file: BinaryIO, ledger: Ledger | None) -> None:
    """Write one line a sample. Raises ExportError for an execution without an advantage."""
    for rollout in rollouts(samples, "trl"):
        file.write(orjson.dumps(_row(rollout), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


def _row(rollout: Rollout) -> dict:
    sample = rollout.sample
    return {
        "input_ids": sample.trajectory.ids,
        "completion_mask": rollout.mask,
        "assistant_masks": rollout.mask,
        "old_log_probs": rollout.logprobs,
        "advantage": sample.advantage,
        "model_version": rollout.versions[0],  # the oldest, by which staleness is judged
        "group_id": rollout.group,
        "metrics": {"reward": sample.reward},
        "execution": sample.execution,
        "group": sample.group,
        "leaf": sample.leaf,
        "role": sample.role,
    }
