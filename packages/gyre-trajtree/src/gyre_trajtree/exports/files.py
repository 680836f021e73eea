"""Owns how an export reaches its place: whole, or not at all.

Invariant: what is written goes to a file beside the target, which takes the target's name when everything has been
written and checked; whatever ends the work before removes it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gyre_trajtree.errors import ExportError


@contextmanager
def replacing(target: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """A file to write, which becomes `target` when the block ends without an exception.

    Raises ExportError when `target` exists and may not be replaced, or cannot be written.
    """
    _check_free(target, overwrite)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
        _check_free(target, overwrite)  # another program may have been faster
        os.replace(partial, target)
    except OSError as error:
        raise ExportError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        if os.path.exists(partial):
            partial.unlink()


def _check_free(target: Path, overwrite: bool) -> None:
    if not os.path.isdir(target.parent):
        raise ExportError(f"{target}: there is no folder {target.parent}; create it first")
    if not os.path.exists(target):
        return
    if not os.path.isfile(target):  # a device would be replaced by a file of its name
        raise ExportError(f"{target}: is no file that could be replaced; name one")
    if not overwrite:
        raise ExportError(f"{target}: already exists; give another name, or ask for it to be overwritten")
