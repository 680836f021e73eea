"""What `gyre train` uses unless it is told otherwise: a task set, evaluator, harness, tiny model."""

from __future__ import annotations

from pathlib import Path

from gyre_cli.errors import MisuseError

HARNESS = Path("examples/harness/harness.py")


def model_path() -> Path:
    """Hugging Face directory of the tiny model that comes with the package."""
    return Path(__file__).parent / "tiny"


def harness_path() -> Path:
    """The example harness of the checkout in use. Raises MisuseError outside a checkout."""
    for folder in Path(__file__).resolve().parents:
        if (folder / HARNESS).is_file():
            return folder / HARNESS
    raise MisuseError(f"{HARNESS} is not here: run from a checkout of gyre, or name a harness of your own")
