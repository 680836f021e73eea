"""The engines that the suite compares: the real SGLang server, the embedded one and the scripted one; one each a session."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "proxy"))
sys.path.insert(0, str(Path(__file__).parent.parent / "scripted"))
sys.path.insert(0, str(Path(__file__).parent.parent / "sglang_environment"))

from conformance_engines import EmbeddedServer, Engine, ScriptedServer
from conformance_model import Reference, build_models
from conformance_proxy import Proxy
from sglang_server import CONTEXT, MAX_RUNNING, SglangServer, missing


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights "1" and "2" of one tiny Qwen3, each with the tokenizer of the proxy's tests."""
    return build_models(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="session")
def references(models: dict[str, Path]) -> dict[str, Reference]:
    return {name: Reference(directory) for name, directory in models.items()}


@pytest.fixture(scope="session")
def sglang(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The one real server of the session. GYRE_TEST_SGLANG_URL names a running one instead."""
    url = os.environ.get("GYRE_TEST_SGLANG_URL")
    if url:
        yield Engine("sglang", url, None)
        return
    reason = missing()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    server = SglangServer(
        models["1"], tmp_path_factory.mktemp("sglang") / "server.log", "--weight-version", "1"
    )
    try:
        server.await_ready()
        yield Engine("sglang", server.url, models)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def embedded(models: dict[str, Path]) -> Iterator[Engine]:
    server = EmbeddedServer(models["1"], max_running=MAX_RUNNING, context=CONTEXT)
    try:
        yield Engine("embedded", server.url, models)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def scripted(models: dict[str, Path]) -> Iterator[Engine]:
    server = ScriptedServer(models["1"], max_running=MAX_RUNNING, context=CONTEXT)
    try:
        yield Engine("scripted", server.url, models)
    finally:
        server.stop()


@pytest.fixture(scope="session", params=["sglang", "embedded", "scripted"])
def shared_engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """One of the engines, running and idle, with its first weights; so it is left, whatever a test did."""
    yield shared_engine
    shared_engine.restore()


@pytest.fixture(scope="session", params=["embedded", "scripted"])
def guarded_engine(request: pytest.FixtureRequest) -> Engine:
    """Those that refuse what would end a real server."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def proxy(models: dict[str, Path], tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(models["1"], tmp_path / "run.jsonl")
    yield proxy
    proxy.stop()
