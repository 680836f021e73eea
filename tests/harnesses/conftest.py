"""Modules that these tests share, those of the proxy's tests among them, are imported by name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from harness_stage import HarnessStage


@pytest.fixture(scope="session")
def harness_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarnessStage]:
    stage = HarnessStage(tmp_path_factory.mktemp("tokenizer") / "qwen")
    yield stage
    stage.close()


@pytest.fixture
def harness_stage(harness_loop: HarnessStage) -> Iterator[HarnessStage]:
    yield harness_loop
    harness_loop.clear()
