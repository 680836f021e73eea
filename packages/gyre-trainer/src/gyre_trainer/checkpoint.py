"""Directories that appear whole or not at all: published weights and checkpoints.

A weights directory is a Hugging Face model directory (weights, config, tokenizer). A checkpoint is one with
`optimizer.pt` and `trainer.json` beside it, so it can be served as it is. Invariant: a name either does not
exist or names a complete directory; everything is written under a temporary name, synced, and renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from gyre_trainer.errors import ModelError

STATE = "trainer.json"
OPTIMIZER = "optimizer.pt"
WEIGHTS = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path` when the block ends well, and vanishes when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        if path.exists():  # left by an earlier run that resumed here
            replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
            path.rename(replaced)
            temporary.rename(path)
            shutil.rmtree(replaced)
        else:
            temporary.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def copy_model_files(source: Path, target: Path) -> None:
    """Copy config, tokenizer and everything else of a model directory but weights and trainer state."""
    for file in Path(source).iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name != STATE:
            shutil.copy2(file, target / file.name)


def write_state(directory: Path, version: int) -> None:
    (directory / STATE).write_text(json.dumps({"format": 1, "version": version}) + "\n")


def read_version(directory: Path) -> int:
    """Weight version of a checkpoint directory. Raises ModelError when it is none."""
    path = Path(directory) / STATE
    try:
        state = json.loads(path.read_text())
        if state["format"] != 1:
            raise ModelError(f"{path}: format {state['format']} is newer than this program reads; upgrade it")
        return int(state["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{directory} is not a checkpoint: {error}") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
