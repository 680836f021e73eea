"""Fixtures of the proxy's tests."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gyre_proxy.codec import Codec

sys.path.insert(0, str(Path(__file__).parent))

from proxy_stage import FakeEngine, Proxy, Stage
from proxy_tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer") / "qwen")


@pytest.fixture(scope="session")
def codec(tokenizer_dir: Path) -> Codec:
    return Codec(tokenizer_dir)


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def stage(loop_thread: Stage) -> Iterator[Stage]:
    yield loop_thread
    loop_thread.clear()


@pytest.fixture
def scene(stage: Stage, codec: Codec, tokenizer_dir: Path, tmp_path: Path) -> Callable:
    """scene(script, ...) -> (proxy, engine): one engine that plays the script behind one proxy."""

    def build(script: list, **settings: object) -> tuple[Proxy, FakeEngine]:
        engine = stage.engine(codec, script)
        settings = {"tokenizer": tokenizer_dir, "record": tmp_path / "run.jsonl", **settings}
        return stage.proxy(engines=(engine.url,), **settings), engine

    return build
