"""The engine as a child process, with a stand-in for the server."""

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from gyre_trainer.engines import EngineProcess
from gyre_trainer.errors import EngineError
from gyre_trainer.settings import EngineSettings

FAKE = EngineSettings(
    module="trainer_fake_engine", start_timeout_s=20.0, request_timeout_s=5.0, health_interval_s=0.05
)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def notices():
    return queue.Queue()


@pytest.fixture
def engine(tmp_path, notices):
    model = tmp_path / "v0"
    model.mkdir()
    made = EngineProcess(model, 0, FAKE, tmp_path / "engine.log", notices.put)
    made.start()
    made.wait_ready()
    yield made
    made.close()


def ask(engine, path="/server_info"):
    address = urlsplit(engine.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=5)
    connection.request("GET", path)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def directory(tmp_path, name, *flags):
    path = tmp_path / name
    path.mkdir()
    for flag in flags:
        (path / flag).touch()
    return path


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_started_engine_serves_the_promised_version(engine):
    assert engine.served_version() == "0"


def test_loading_pauses_updates_and_verifies(engine, tmp_path):
    model = directory(tmp_path, "v3")
    engine.load(model, 3)
    assert engine.served_version() == "3"
    assert ask(engine)["asked"] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


def test_a_dead_engine_is_restarted_on_the_same_port_with_the_published_weights(engine, tmp_path, notices):
    engine.load(directory(tmp_path, "v7"), 7)
    url, pid = engine.url, engine.pid
    os.kill(pid, signal.SIGKILL)
    notice = notices.get(timeout=20)
    assert (notice["engine"], notice["url"], notice["version"]) == ("restarted", url, 7)
    assert "code -9" in notice["reason"]
    assert engine.url == url and engine.pid != pid and engine.served_version() == "7"


def test_a_hanging_engine_is_replaced(engine, notices, monkeypatch):
    monkeypatch.setattr("gyre_trainer.engines.MISSED_CHECKS", 1)
    monkeypatch.setattr("gyre_trainer.engines.PING_WAIT_S", 0.2)
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    notice = notices.get(timeout=40)
    assert notice["engine"] == "restarted" and "hangs" in notice["reason"]
    assert gone(pid) and engine.served_version() == "0"


def test_a_refused_update_is_mended_by_a_restart(engine, tmp_path, notices):
    pid = engine.pid
    engine.load(directory(tmp_path, "v2", "refuse-update"), 2)
    assert engine.served_version() == "2" and engine.pid != pid
    assert notices.get(timeout=5)["engine"] == "restarted"


def test_weights_that_cannot_be_served_are_an_error_that_names_the_log(engine, tmp_path):
    with pytest.raises(EngineError, match="restarting failed.*engine.log"):
        engine.load(directory(tmp_path, "v2", "refuse-update", "refuse-start"), 2)
    assert engine.pid is None


def test_an_engine_that_cannot_be_restarted_is_reported_lost(engine, tmp_path, notices):
    (engine.model / "refuse-start").touch()
    os.kill(engine.pid, signal.SIGKILL)
    assert notices.get(timeout=20)["engine"] == "lost"


def test_a_released_engine_comes_back_with_the_weights_it_is_given(engine, tmp_path):
    engine.release()
    assert ask(engine)["released"]
    engine.resume(directory(tmp_path, "v1"), 1)
    assert not ask(engine)["released"] and engine.served_version() == "1"


def test_a_released_engine_needs_no_weights_but_those_it_is_given(engine, tmp_path):
    pid = engine.pid
    engine.release()
    engine.model.rmdir()
    engine.resume(directory(tmp_path, "v1"), 1)
    assert engine.pid == pid and engine.served_version() == "1"
    assert ask(engine)["model"].endswith("v1")


def test_weights_loaded_while_released_are_not_served_yet(engine, tmp_path):
    assert engine.load(directory(tmp_path, "v1"), 1)
    engine.release()
    assert not engine.load(directory(tmp_path, "v2"), 2)
    assert engine.served_version() == "1"


@pytest.mark.timeout(20)  # well below what a busy engine is given
def test_a_hanging_engine_is_ended_rather_than_released(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("gyre_trainer.engines.PING_WAIT_S", 0.2)
    monkeypatch.setattr(engine, "_settings", replace(FAKE, request_timeout_s=0.2))
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    engine.release()
    assert gone(pid) and engine.pid is None
    engine.resume(directory(tmp_path, "v1"), 1)
    assert engine.served_version() == "1"


def test_every_part_of_a_long_operation_is_told(engine, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(engine, "_progress", lambda: told.append(engine.pid))
    monkeypatch.setattr("gyre_trainer.engines.START_ATTEMPTS", 4)
    with pytest.raises(EngineError):
        engine.load(directory(tmp_path, "v2", "refuse-update", "refuse-start"), 2)
    assert len(told) >= 4


def test_an_engine_that_cannot_even_be_started_is_an_error(tmp_path):
    engine = EngineProcess(tmp_path, 0, FAKE, tmp_path / "no-folder" / "engine.log", print)
    with pytest.raises(EngineError, match="could not be started"):
        engine.start()


def test_a_busy_engine_is_not_released(engine, monkeypatch):
    monkeypatch.setattr("gyre_trainer.engines.RELEASE_WAIT_S", 0.2)
    (engine.model / "busy").touch()
    with pytest.raises(EngineError, match="requests are running"):
        engine.release()
    (engine.model / "busy").unlink()
    engine.release()


def test_an_engine_that_dies_while_released_starts_again_at_resume(engine, tmp_path, notices):
    engine.release()
    url, pid = engine.url, engine.pid
    os.kill(pid, signal.SIGKILL)
    engine.resume(directory(tmp_path, "v4"), 4)
    assert engine.url == url and engine.pid != pid and engine.served_version() == "4"


def test_an_engine_that_never_gets_ready_is_ended_and_named(tmp_path):
    settings = EngineSettings(module="json.tool", start_timeout_s=0.5)
    silent = EngineProcess(tmp_path, 0, settings, tmp_path / "engine.log", print)
    silent.start()
    with pytest.raises(EngineError, match="before it was ready|not ready within"):
        silent.wait_ready()
    silent.close()


def test_closing_leaves_no_process_and_frees_the_port(engine):
    url, pid = urlsplit(engine.url), engine.pid
    engine.close()
    assert gone(pid)
    with pytest.raises(OSError):
        socket.create_connection((url.hostname, url.port), 1.0)


def test_the_engine_ends_when_its_parent_is_killed(tmp_path):
    script = (
        "import sys; from pathlib import Path; from gyre_trainer.engines import EngineProcess;"
        "from gyre_trainer.settings import EngineSettings;"
        f"e = EngineProcess(Path({str(tmp_path)!r}), 0, EngineSettings(module='trainer_fake_engine'),"
        f" Path({str(tmp_path / 'log')!r}), print); e.start(); e.wait_ready();"
        "print(e.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    watch = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    import select

    assert select.select([watch], [], [], 10.0)[0], "the engine outlived its parent"
    os.close(watch)
    parent.stdin.close(), parent.stdout.close()
