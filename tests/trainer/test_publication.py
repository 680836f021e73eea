"""The pool's promises that need no model: cells are real processes with an engine, their trainer only counts."""

import asyncio
import http.client
import json
import os
import select
import shutil
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from gyre_trainer.cells import CellProcess
from gyre_trainer.errors import CellDied, CellError, TrainerError, VersionError
from gyre_trainer.pool import CellPool
from gyre_trainer.rows import TrainingExecution, TrainingRow
from gyre_trainer.settings import CellSettings, EngineSettings
from gyre_trainer.stream import MicroStepQueue

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def counting_cells(tmp_path, monkeypatch):
    """Cells are `trainer_fake_cell.py`, engines `trainer_fake_engine`."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FOLDER / "trainer_fake_cell.py"}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr("gyre_trainer.cells.sys.executable", str(script))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))


@pytest.fixture
def start(tmp_path):
    """`await start(count, **settings)`: a pool over `tmp_path`, whose notices are put in `pool.notices`."""

    async def start(count: int, on_notice=None, **settings) -> CellPool:
        (tmp_path / "v0").mkdir(exist_ok=True)
        engine = EngineSettings(module="trainer_fake_engine", start_timeout_s=30.0, health_interval_s=0.1)
        notices = asyncio.Queue()
        pool = await CellPool.start(
            count,
            CellSettings(tmp_path / "v0", engine=engine, start_timeout_s=60.0, **settings),
            tmp_path,
            tmp_path / "logs",
            on_notice or (lambda cell, notice: notices.put_nowait((cell, notice))),
        )
        pool.notices = notices
        return pool

    return start


def run(pool_start, body):
    """Run `body(pool)` against a pool that is closed whatever happens."""

    async def main():
        pool = await pool_start
        try:
            async with asyncio.timeout(60):
                return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def execution(name: str) -> TrainingExecution:
    row = TrainingRow(name, np.ones(2), [False, True], [np.nan, -1.0], [-1, 0])
    return TrainingExecution(name, 1.0, (row,))


def drained(pool: CellPool) -> MicroStepQueue:
    queue = MicroStepQueue(pool.version + 1, 100)
    queue.close()
    return queue


def served(url: str) -> dict:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    connection.request("GET", "/server_info")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_misuse_is_refused_and_harms_nothing(start):
    async def body(pool):
        with pytest.raises(TrainerError, match="before the core trains"):
            await pool.to_training(1)
        with pytest.raises(VersionError, match="at version 0, not at 4"):
            await pool.publish(4)
        with pytest.raises(CellError, match="unknown operation 'engine'"):
            await pool.cells[0].call("engine")
        with pytest.raises(TrainerError, match="no lost satellite"):
            await pool.revive(1)
        await pool.to_training(0)
        with pytest.raises(TrainerError, match="in training already"):
            await pool.to_training(0)
        queue = MicroStepQueue(1, 100)
        queue.admit([execution("a")])
        queue.close()
        await pool.train(queue)
        with pytest.raises(TrainerError, match="must not leave"):
            await pool.to_rollout(0)
        assert (await pool.step(queue)).version == 1

    run(start(2), body)


def test_a_restarted_engine_is_told_and_serves_the_publication(start):
    async def body(pool):
        os.kill(pool.cells[0].engine_pid, signal.SIGKILL)
        cell, notice = await pool.notices.get()
        assert (cell, notice["engine"], notice["url"]) == (0, "restarted", pool.engines[0])
        assert served(pool.engines[0])["version"] == "0"

    run(start(1), body)


def test_a_lost_core_ends_everything(start):
    async def body(pool):
        training = asyncio.create_task(pool.train(MicroStepQueue(1, 100)))
        await asyncio.sleep(0)
        os.kill(pool.cells[0].pid, signal.SIGKILL)
        with pytest.raises(CellDied, match="cell 0"):
            await training
        for operation in (
            pool.publish(0),
            pool.to_training(0),
            pool.to_training(1),
            pool.step(drained(pool)),
        ):
            with pytest.raises(CellDied, match="cell 0"):
                await operation

    run(start(2), body)


def test_a_cell_without_its_engine_is_ended(start, tmp_path):
    async def body(pool):
        lost = asyncio.Queue()
        pool.on_lost = lambda *what: lost.put_nowait(what)
        process = pool.cells[1]
        (tmp_path / "v0" / "refuse-start").touch()
        os.kill(process.engine_pid, signal.SIGKILL)
        cell, reason = await lost.get()
        assert cell == 1 and "its engine was lost" in reason
        assert sorted(pool.engines) == [0]
        assert await process._process.wait() == -signal.SIGKILL

    run(start(2), body)


def test_what_a_callback_raises_at_a_death_fails_the_run_and_the_cell_is_gone(start):
    """A full disk under the record of the loss."""

    async def body(pool):
        def full(cell, reason):
            raise OSError(28, "no space left")

        pool.on_lost = full
        training = asyncio.create_task(pool.train(MicroStepQueue(1, 100)))
        process = pool.cells[1]
        handles = [os.pidfd_open(pid) for pid in (process.pid, process.engine_pid)]
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(CellDied, match="did not answer 'join'"):
            await process.call("join", timeout_s=0.2, generation=1, members=(), store=None)
        assert list(pool.engines) == [0]
        for handle in handles:
            assert select.select([handle], [], [], 10)[0], "a process of the lost cell lives"
            os.close(handle)
        for operation in (training, pool.publish(0), pool.revive(1)):
            with pytest.raises(OSError, match="no space left"):
                await operation

    run(start(2), body)


def test_what_a_callback_raises_at_a_notice_fails_the_run_and_the_cell_is_heard(start):
    async def body(pool):
        training = asyncio.create_task(pool.train(MicroStepQueue(1, 100)))
        os.kill(pool.cells[0].engine_pid, signal.SIGKILL)
        with pytest.raises(OSError, match="no space left"):
            await training
        assert await pool.cells[0].call("host_store") == ("127.0.0.1", 1)
        with pytest.raises(OSError, match="no space left"):
            await pool.to_training(0)

    def full(cell, notice):
        raise OSError(28, "no space left")

    run(start(1, on_notice=full), body)


def test_a_cell_that_sends_nonsense_is_ended_with_a_reason(start):
    async def body(pool):
        process = pool.cells[0]
        process._on_notice = lambda: None  # takes no arguments: raises in the listener itself
        os.kill(process.engine_pid, signal.SIGKILL)
        await process._process.wait()
        with pytest.raises(CellDied, match="could not be handled: TypeError"):
            await process.call("host_store")

    run(start(1), body)


def test_an_operation_that_makes_progress_outlives_its_deadline(start, monkeypatch):
    """A sum of twelve pieces of 0.1 s with a second for no sign of life."""
    monkeypatch.setattr("gyre_trainer.groups.COLLECTIVE_MARGIN_S", 0.5)
    monkeypatch.setenv("FAKE_PIECES", "12")

    async def body(pool):
        await pool.to_training(0)
        await pool.to_training(1)
        result = await pool.step(drained(pool), (0, 1))
        assert result.cells == (0, 1) and sorted(pool.engines) == [0, 1]

    run(start(2, collective_timeout_s=0.5), body)


def test_a_stopped_satellite_is_lost_by_the_deadline_of_operations(start):
    async def body(pool):
        await pool.to_training(0)
        os.kill(pool.cells[1].pid, signal.SIGSTOP)
        with pytest.raises(CellDied, match="did not answer 'enter_training' within 1 s"):
            async with asyncio.timeout(10):  # well below what an engine may take to start
                await pool.to_training(1)
        assert list(pool.cells) == [0]

    run(start(2, operation_timeout_s=1.0), body)


def test_an_engine_that_starts_again_may_take_longer_than_an_operation(start, tmp_path):
    async def body(pool):
        await pool.to_training(0)
        for flag in ("refuse-update", "slow-start"):
            (tmp_path / "v0" / flag).touch()
        await pool.to_rollout(0)
        assert list(pool.cells) == [0] and (await pool.notices.get())[1]["engine"] == "restarted"

    run(start(1, operation_timeout_s=1.5), body)


def test_a_publication_names_the_cells_that_serve_it(start, tmp_path):
    async def body(pool):
        real = pool.cells[2].call

        async def dies_loading(operation, **arguments):
            if operation == "load_engine":
                os.kill(pool.cells[2].pid, signal.SIGKILL)
            return await real(operation, **arguments)

        pool.cells[2].call = dies_loading
        # released, as in the middle of a change of role: it will load when it comes back
        await pool.cells[1].call("enter_training", version=0, source=None)
        directory, cells = await pool.publish(0)
        assert directory == tmp_path / "weights" / "v0" and (directory / "version").read_text() == "0"
        assert cells == [0] and sorted(pool.engines) == [0, 1]

    run(start(3), body)


def test_weights_that_an_engine_was_given_are_kept(start, tmp_path):
    def kept():
        return sorted(path.name for path in (tmp_path / "weights").iterdir())

    async def body(pool):
        engine = pool.cells[0].engine_pid
        await pool.to_training(0)
        await pool.step(drained(pool))
        await pool.publish(1)
        assert await pool.to_rollout(0) == 1
        await pool.to_training(0)
        for version in range(2, 6):
            await pool.step(drained(pool))
            await pool.publish(version)
        assert kept() == ["v1", "v4", "v5"]
        assert await pool.to_rollout(0) == 5
        assert served(pool.engines[0])["version"] == "5" and pool.cells[0].engine_pid == engine
        await pool.publish(5)
        assert kept() == ["v4", "v5"]

    run(start(1), body)


async def lose(pool: CellPool, cell: int) -> None:
    lost = asyncio.Event()
    pool.on_lost = lambda *what: lost.set()
    os.kill(pool.cells[cell].pid, signal.SIGKILL)
    await lost.wait()


def test_a_revived_cell_is_listed_once_it_serves_the_newest_publication(start, tmp_path, monkeypatch):
    async def body(pool):
        await lose(pool, 1)
        await pool.to_training(0)
        await pool.step(drained(pool))
        revival = asyncio.create_task(pool.revive(1))
        await asyncio.sleep(0)
        with pytest.raises(TrainerError, match="no lost satellite"):
            await pool.revive(1)
        listed = []
        take = pool._take_notice
        monkeypatch.setattr(
            pool, "_take_notice", lambda *what: (listed.append(1 in pool.engines), take(*what))
        )
        # published while the cell starts; its engine refuses the update and restarts, which is told
        real = pool.cells[0].call

        async def refusing(operation, **arguments):
            answer = await real(operation, **arguments)
            if operation == "save_weights":
                (arguments["directory"] / "refuse-update").touch()
            return answer

        pool.cells[0].call = refusing
        directory, cells = await pool.publish(1)
        assert cells == [] and 1 not in pool.engines
        assert await revival == 1
        assert listed == [False]
        assert served(pool.engines[1])["version"] == "1" and served(pool.engines[1])["model"] == str(
            directory
        )

    run(start(2), body)


def test_a_cell_that_cannot_be_revived_is_an_error_and_leaves_nothing(start, tmp_path):
    async def body(pool):
        await lose(pool, 1)
        shutil.rmtree(tmp_path / "v0")
        with pytest.raises(CellError, match="cell 1"):
            await pool.revive(1)
        assert sorted(pool.engines) == [0] and pool._revivals == {}

    run(start(2), body)


def test_closing_ends_a_cell_that_is_being_revived(start, monkeypatch):
    async def body(pool):
        await lose(pool, 1)
        spawned = asyncio.Queue()
        real = CellProcess._spawn

        async def spawn(process, port):
            await real(process, port)
            spawned.put_nowait(process.pid)

        monkeypatch.setattr(CellProcess, "_spawn", spawn)
        revival = asyncio.create_task(pool.revive(1))
        pid = await spawned.get()
        await pool.close()
        assert gone(pid)
        with pytest.raises(asyncio.CancelledError):
            await revival

    run(start(2), body)
