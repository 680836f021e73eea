"""Owns the parquet export: one row for each trajectory, written in row groups of a bounded number of tokens.

Invariant: columns and metadata are those of `SCHEMA_VERSION`; a change to either raises it.
"""

from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np
import orjson

from gyre_trajtree.conservation import Ledger
from gyre_trajtree.exports.files import ExportError
from gyre_trajtree.samples import Sample

try:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter
except ImportError as error:
    raise ExportError("the parquet format needs pyarrow; install gyre-trajtree[parquet]") from error

SCHEMA_NAME = "gyre-samples"
SCHEMA_VERSION = 1

SCHEMA = pa.schema(
    [
        pa.field("execution", pa.string(), nullable=False),
        pa.field("group", pa.string()),
        pa.field("task", pa.string()),
        pa.field("harness", pa.string()),
        pa.field("leaf", pa.string(), nullable=False),
        pa.field("role", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("ids", pa.list_(pa.int32()), nullable=False),
        pa.field("targets", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
    ]
)
TOKEN_COLUMNS = ("ids", "targets", "logprobs", "versions")

ROW_GROUP_TOKENS = 1 << 20
"""Tokens after which a row group is closed (13 MiB of arrays); a longer trajectory has one of its own."""


def write(samples: Iterable[Sample], file: BinaryIO, ledger: Ledger | None) -> None:
    """Write one row a sample, then the schema's name and version and the ledger as metadata "gyre"."""
    with ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for batch in _batches(samples):
            writer.write_batch(batch)
        writer.add_key_value_metadata({"gyre": orjson.dumps(_metadata(ledger))})


def _batches(samples: Iterable[Sample]) -> Iterator[pa.RecordBatch]:
    """The samples in row groups."""
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        group.append(sample)
        tokens += len(sample.trajectory.ids)
        if tokens >= ROW_GROUP_TOKENS:
            yield _batch(group)
            group, tokens = [], 0
    if group:
        yield _batch(group)


def _batch(group: list[Sample]) -> pa.RecordBatch:
    columns = []
    for field in SCHEMA:
        if field.name in TOKEN_COLUMNS:
            columns.append(_lists([getattr(sample.trajectory, field.name) for sample in group], field.type))
        else:
            columns.append(pa.array([getattr(sample, field.name) for sample in group], field.type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _lists(rows: list[np.ndarray], kind: pa.ListType) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    values = pa.array(np.concatenate(rows), kind.value_type, from_pandas=True)  # NaN becomes null
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _metadata(ledger: Ledger | None) -> dict:
    account = None
    if ledger is not None:
        account = {"sampled": ledger.sampled, "trained": ledger.trained, "excluded": dict(ledger.excluded)}
    return {"format": SCHEMA_NAME, "version": SCHEMA_VERSION, "account": account}
