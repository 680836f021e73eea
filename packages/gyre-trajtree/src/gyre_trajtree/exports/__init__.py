"""Owns the export of samples to files that other programs load; docs/exports.md has the schema of each format.

Invariant: a target holds either a whole export whose targets are those that the ledger calls trained, or what it held
before. Rows are written as they come: no format but slime's, whose loader wants one object, gathers them.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

from gyre_trajtree.conservation import Ledger
from gyre_trajtree.errors import AccountError
from gyre_trajtree.exports.files import ExportError, replacing
from gyre_trajtree.samples import Sample

FORMATS = ("jsonl", "parquet", "slime", "trl", "verl")
"""Each is a module of this package with one function, `write(samples, file, ledger)`."""

__all__ = ["FORMATS", "ExportError", "export"]


def export(
    samples: Iterable[Sample],
    format: str,
    target: str | Path,
    ledger: Ledger | None = None,
    overwrite: bool = False,
) -> int:
    """Write `samples` to the file `target`; returns how many rows were written, 0 for a file without rows.

    `ledger` is the one that `sample_run` was given: the export is kept only if its law holds and it calls exactly the
    written targets trained. `overwrite` replaces an existing file. Raises ExportError for an unknown format, a target
    that cannot be written, a missing extra, or a sample without what the format needs; AccountError when a row is not
    sound or the ledger does not agree. Then `target` is left as it was.
    """
    if format not in FORMATS:
        raise ExportError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}")
    write = import_module(f"gyre_trajtree.exports.{format}").write
    tally = Ledger()
    with replacing(Path(target), overwrite) as file:
        write(_tallied(samples, tally), file, ledger)
        if ledger is not None:
            _agree(tally, ledger)
    return tally.roles.total()


def _tallied(samples: Iterable[Sample], tally: Ledger) -> Iterator[Sample]:
    """The samples, each checked, with their targets and roles counted."""
    written: set[tuple[str, str]] = set()
    for sample in samples:
        name = sample.execution, sample.leaf
        if name in written:
            raise AccountError(f"trajectory {sample.leaf} of execution {sample.execution} is exported twice")
        written.add(name)
        tally.trained += _sound(sample)
        tally.roles[sample.role] += 1
        yield sample


def _sound(sample: Sample) -> int:
    """Count of a sample's targets. Raises AccountError for a row that no trainer could take as it is meant."""
    row = sample.trajectory
    lengths = {len(row.ids), len(row.targets), len(row.logprobs), len(row.versions)}
    count = int(np.count_nonzero(row.targets))
    if len(lengths) > 1 or not count:
        raise AccountError(f"trajectory {row.leaf}: arrays of lengths {sorted(lengths)} with {count} targets")
    if row.targets[0] or not np.isfinite(row.logprobs[row.targets]).all():
        raise AccountError(f"trajectory {row.leaf}: a target has no context or no behaviour log-prob")
    return count


def _agree(tally: Ledger, ledger: Ledger) -> None:
    """Raise AccountError unless what was written is what the ledger says."""
    ledger.check()
    if (tally.trained, tally.roles) != (ledger.trained, ledger.roles):
        raise AccountError(
            f"{tally.trained} targets in {tally.roles.total()} rows were written, but the ledger has "
            f"{ledger.trained} in {ledger.roles.total()}; export all samples of one ledger, once"
        )
