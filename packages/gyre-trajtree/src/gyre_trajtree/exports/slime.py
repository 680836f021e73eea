"""Owns the slime export: one file that slime's `--load-debug-rollout-data` loads and trains on (slime of August 2026).

Invariant: each sample is what slime's `Sample.from_dict` takes, and all samples of one execution share a `rollout_id`,
by which slime averages the loss over the execution's targets. The loader wants one object, so all rows are gathered.
"""

from collections.abc import Iterable
from typing import BinaryIO

from gyre_trajtree.conservation import Ledger
from gyre_trajtree.exports.files import ExportError
from gyre_trajtree.exports.rollouts import Rollout, rollouts
from gyre_trajtree.samples import Sample

try:
    import torch
except ImportError as error:
    raise ExportError("the slime format needs torch; install gyre-trajtree[slime]") from error


def write(samples: Iterable[Sample], file: BinaryIO, ledger: Ledger | None) -> None:
    """Write all samples as the data of rollout 0. Raises ExportError for an execution without an advantage."""
    rows = [_row(number, rollout) for number, rollout in enumerate(rollouts(samples, "slime"))]
    try:
        torch.save({"rollout_id": 0, "samples": rows}, file)
    except RuntimeError as error:  # torch hides the reason for which a write failed behind its own
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _row(number: int, rollout: Rollout) -> dict:
    sample = rollout.sample
    return {
        "group_index": rollout.group,
        "index": number,
        "rollout_id": rollout.execution,
        "tokens": sample.trajectory.ids.tolist(),
        "response_length": len(sample.trajectory.ids) - rollout.prompt,
        "loss_mask": rollout.mask[rollout.prompt :].tolist(),
        "rollout_log_probs": rollout.logprobs[rollout.prompt :].tolist(),
        "reward": {"score": sample.reward, "advantage": sample.advantage},
        "weight_versions": [str(version) for version in rollout.versions if version >= 0],
        "status": "completed",
        "metadata": {
            "raw_reward": sample.reward,
            "execution": sample.execution,
            "leaf": sample.leaf,
            "role": sample.role,
        },
    }
