"""Owns the JSON Lines export: one object for each trajectory, with the fields of the parquet export."""

from collections.abc import Iterable
from typing import BinaryIO

import orjson

from gyre_trajtree.conservation import Ledger
from gyre_trajtree.samples import Sample


def write(samples: Iterable[Sample], file: BinaryIO, ledger: Ledger | None) -> None:
    """Write one line a sample. Missing log-probs are null, unknown weight versions -1."""
    for sample in samples:
        row = sample.trajectory
        fields = {
            "execution": sample.execution,
            "group": sample.group,
            "task": sample.task,
            "harness": sample.harness,
            "leaf": sample.leaf,
            "role": sample.role,
            "reward": sample.reward,
            "advantage": sample.advantage,
            "ids": row.ids,
            "targets": row.targets,
            "logprobs": row.logprobs,
            "versions": row.versions,
        }
        file.write(orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
