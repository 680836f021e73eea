"""Cells as real processes: joining late, dying, stepping and publishing, against one actor that does it all."""

import asyncio
import http.client
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import torch
from gyre_trainer import checkpoint
from gyre_trainer.actor import TrainingActor
from gyre_trainer.cell import Cell
from gyre_trainer.engines import EngineProcess
from gyre_trainer.errors import CellDied, CellError, ModelError
from gyre_trainer.pool import CellPool
from gyre_trainer.rows import MicroStep, TrainingExecution, TrainingRow
from gyre_trainer.settings import AdamSettings, CellSettings, EngineSettings, ObjectiveSettings
from gyre_trainer.stream import MicroStepQueue
from safetensors.torch import load_file

# With a large eps the update is smooth in the gradient, so weights show a wrong gradient and hide no rounding.
ADAM = AdamSettings(lr=1.0, eps=1.0, weight_decay=0.0)
FAKE = EngineSettings(module="trainer_fake_engine", start_timeout_s=60.0, health_interval_s=0.1)
BUDGET = 150


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def cell_settings(model_dir):
    return CellSettings(
        model=model_dir, adam=ADAM, engine=FAKE, start_timeout_s=100.0, collective_timeout_s=5.0
    )


def expected_weights(model_dir, tmp_path, batches) -> dict[str, torch.Tensor]:
    """Hugging Face weights after one step a batch, all on one actor, each execution its own micro-step."""
    actor = TrainingActor(model_dir, 0, ObjectiveSettings(), ADAM)
    for batch in batches:
        for number, execution in enumerate(batch):
            actor.train(MicroStep(number, (execution,)))
        actor.optimizer_step(1 / len(batch))
    actor.save_weights(tmp_path / "expected.safetensors")
    return load_file(tmp_path / "expected.safetensors")


def relative_difference(directory: Path, expected: dict[str, torch.Tensor], start: Path) -> float:
    """Of the updates, not the weights: how far the published update is from the expected one."""
    got, before = load_file(directory / "model.safetensors"), load_file(start / "model.safetensors")
    off = sum((got[n] - expected[n]).double().square().sum() for n in expected)
    return (off / sum((expected[n] - before[n]).double().square().sum() for n in expected)).sqrt().item()


async def until(queue: MicroStepQueue, condition) -> None:
    """Wait for a condition on the queue, hearing of every change."""
    changed = asyncio.Event()
    queue.watch(changed.set)
    async with asyncio.timeout(60):
        while not condition():
            changed.clear()
            await changed.wait()
    queue.unwatch(changed.set)


def done_by(queue: MicroStepQueue, cell: int) -> int:
    return sum(queue._holder.get(id) == cell for id in queue._results)


async def train_on_all(pool: CellPool, executions, cells) -> MicroStepQueue:
    """A drained batch of which each of `cells` did a part for certain."""
    queue = MicroStepQueue(pool.version + 1, BUDGET)
    training = asyncio.create_task(pool.train(queue))
    queue.admit(executions)
    await until(queue, lambda: all(done_by(queue, cell) for cell in cells))
    queue.close()
    await training
    return queue


def ask(url: str, path: str, body: dict | None = None) -> dict:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def gone(pid: int) -> bool:
    """No process, or a zombie that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def keeps_to_itself(pid: int, key: bytes) -> None:
    """It listens on loopback alone, and its environment and command line, which others can read, are free of
    the key.
    """
    listening = [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening and {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
    for name in ("environ", "cmdline"):
        assert key.hex().encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def outside_the_vocabulary() -> TrainingExecution:
    row = TrainingRow("bad", np.array([1, 639, 640]), [False, False, True], [np.nan, np.nan, -1], [-1, -1, 0])
    return TrainingExecution("bad", 1.0, (row,))


def at_operation(pool: CellPool, cell: int, name: str, signal_number: int) -> None:
    """Send the cell a signal the moment it is asked for the operation."""
    process = pool.cells[cell]
    real = process.call

    async def call(operation, **arguments):
        if operation == name:
            os.kill(process.pid, signal_number)
        return await real(operation, **arguments)

    process.call = call


def test_every_batch_has_the_right_gradient_whatever_happens_to_satellites(
    cell_settings, model_dir, tmp_path, make_executions, monkeypatch
):
    """Late joins; death in a batch, in the sum (frozen: only a deadline shows it), in the broadcast; return."""
    monkeypatch.setattr("gyre_trainer.groups.COLLECTIVE_MARGIN_S", 1.0)
    settings = replace(cell_settings, collective_timeout_s=3.0)
    batches = [make_executions(14, seed=seed) for seed in (20, 21, 22, 23)]
    lost = []

    async def run():
        pool = await CellPool.start(3, settings, tmp_path, tmp_path / "logs")
        pool.on_lost = lambda cell, reason: lost.append(cell)
        try:
            # 1: satellites join while the core is training
            with pytest.raises(CellError, match="offloaded"):
                await pool.cells[0].call("train", micro_step=MicroStep(0, tuple(batches[0][:1])))
            await pool.to_training(0)
            refused = MicroStepQueue(1, BUDGET)
            refused.admit([outside_the_vocabulary()])
            with pytest.raises(CellError, match="640 is outside the vocabulary"):
                await pool.train(refused)
            queue = MicroStepQueue(1, BUDGET)
            training = asyncio.create_task(pool.train(queue))
            queue.admit(batches[0][:7])
            await until(queue, lambda: done_by(queue, 0))
            await pool.to_training(1)
            await pool.to_training(2)
            queue.admit(batches[0][7:])
            await until(queue, lambda: done_by(queue, 1) or done_by(queue, 2))
            queue.close()
            await training
            results = [await pool.step(queue, (0, 1, 2))]
            assert results[0].cells == (0, 1, 2)
            assert len({await cell.call("checksum") for cell in pool.cells.values()}) == 1
            for cell in pool.cells.values():
                keeps_to_itself(cell.pid, pool._key)
                keeps_to_itself(cell.engine_pid, pool._key)

            # 2: the middle cell is killed after it did work; the survivors get groups of their own
            queue = MicroStepQueue(2, BUDGET)
            training = asyncio.create_task(pool.train(queue))
            queue.admit(batches[1][:10])
            await until(queue, lambda: done_by(queue, 1))
            pids = pool.cells[1].pid, pool.cells[1].engine_pid
            os.kill(pids[0], signal.SIGKILL)
            await until(queue, lambda: lost == [1])
            queue.admit(batches[1][10:])
            queue.close()
            await training
            results.append(await pool.step(queue, (0, 1, 2)))
            assert results[1].cells == (0, 2) and all(map(gone, pids))
            with pytest.raises(CellDied, match="cell 1"):
                await pool.to_training(1)

            # 3: a cell freezes in the sum, while the first lost cell starts again
            revival = asyncio.create_task(pool.revive(1))
            queue = await train_on_all(pool, batches[2], (0, 2))
            at_operation(pool, 2, "reduce", signal.SIGSTOP)
            results.append(await pool.step(queue, (0, 2)))
            assert results[2].cells == (0,) and lost == [1, 2]

            # 4: it takes part, and dies in the broadcast, after the core's update
            assert await revival == 0
            await pool.to_training(1)
            queue = await train_on_all(pool, batches[3], (0, 1))
            at_operation(pool, 1, "broadcast", signal.SIGKILL)
            results.append(await pool.step(queue, (0, 1)))
            assert results[3].cells == (0, 1) and lost == [1, 2, 1]

            await pool.publish(4)
            assert await pool.to_rollout(0) == 4
            await pool.save_checkpoint(tmp_path / "checkpoint")
            assert checkpoint.read_version(tmp_path / "checkpoint") == 4
            assert ask(pool.engines[0], "/get_model_info")["weight_version"] == "4"
            return results
        finally:
            await pool.close()

    results = asyncio.run(run())
    published = tmp_path / "weights" / "v4"
    expected = expected_weights(model_dir, tmp_path, batches)
    assert relative_difference(published, expected, model_dir) < 1e-5
    assert [r.statistics.targets for r in results] == [sum(e.target_count for e in b) for b in batches]
    assert {path.name for path in published.iterdir()} == {path.name for path in model_dir.iterdir()}


def test_a_cell_whose_process_ends_at_once_is_named_with_its_log(cell_settings, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(CellDied, match="cell 0: ended with code 1 while starting; see .*cell0.log"):
        asyncio.run(CellPool.start(2, cell_settings, tmp_path, tmp_path / "logs"))


def test_a_cell_waits_less_long_for_its_engine_than_the_driver_for_the_cell(
    cell_settings, tmp_path, monkeypatch
):
    given = []

    def engine(model, version, settings, *rest):
        given.append(settings)
        raise ModelError("no engine here")

    monkeypatch.setattr("gyre_trainer.cell.EngineProcess", engine)
    for longest in (8.0, 1000.0):
        with pytest.raises(ModelError):
            Cell(0, b"k" * 32, tmp_path / "log", None).start(
                replace(cell_settings, operation_timeout_s=longest)
            )
    assert [settings.request_timeout_s for settings in given] == [4.0, FAKE.request_timeout_s]


def test_a_model_that_cannot_be_trained_is_refused_by_the_cell(cell_settings, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    cell = Cell(0, b"k" * 32, tmp_path / "engine.log", channel=None)
    try:
        with pytest.raises(ModelError, match="only dense 'qwen3'"):
            cell.start(replace(cell_settings, model=tmp_path))
    finally:
        cell.stop()


def test_no_process_outlives_a_killed_driver(cell_settings, tmp_path):
    settings = tmp_path / "settings"
    settings.write_bytes(pickle.dumps(cell_settings))
    script = (
        "import asyncio, pickle, sys; from pathlib import Path; from gyre_trainer.cells import CellProcess;"
        f"settings = pickle.loads(Path({str(settings)!r}).read_bytes());"
        f"asyncio.run(CellProcess.start(0, settings, Path({str(tmp_path)!r})))"
    )
    driver = subprocess.Popen([sys.executable, "-c", script])
    watched: list[int] = []
    deadline = time.monotonic() + 60
    while len(watched) < 2:  # the cell and its engine
        assert time.monotonic() < deadline and driver.poll() is None, "the engine was never started"
        watched = [child.pid for child in psutil.Process(driver.pid).children(recursive=True)]
        select.select([], [], [], 0.02)
    handles = [os.pidfd_open(pid) for pid in watched]
    driver.kill()
    driver.wait()
    for handle in handles:
        assert select.select([handle], [], [], 20)[0], "a process outlived the driver"
        os.close(handle)


def test_trainer_and_engine_agree_on_log_probs_before_and_after_a_step(model_dir, tmp_path):
    """The embedded engine samples, the actor trains on it, and the mismatch at equal weights is rounding."""
    actor = TrainingActor(model_dir, 0, ObjectiveSettings(), AdamSettings(lr=0.05, eps=1e-8))
    engine = EngineProcess(model_dir, 0, EngineSettings(), tmp_path / "engine.log", print)

    def sample(seed: int) -> TrainingExecution:
        prompt = [int(i) for i in np.random.default_rng(seed).integers(0, 640, 12)]
        sampling = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        answer = ask(engine.url, "/generate", body)
        version = int(answer["meta_info"]["weight_version"])
        log_probs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        row = TrainingRow(
            f"e{seed}",
            prompt + answer["output_ids"],
            [False] * 12 + [True] * len(log_probs),
            [np.nan] * 12 + log_probs,
            [-1] * 12 + [version] * len(log_probs),
        )
        return TrainingExecution(f"e{seed}", 1.0 if seed % 2 else -1.0, (row,))

    engine.start()
    try:
        engine.wait_ready()
        pid = engine.pid
        for version in range(2):
            executions = tuple(sample(seed) for seed in range(4))
            engine.release()
            statistics = actor.train(MicroStep(0, executions))
            assert statistics.same_version_targets == statistics.targets == 64
            assert statistics.mismatch_max < 1e-4
            assert statistics.ratio_min == pytest.approx(1.0, abs=1e-5)
            actor.optimizer_step(1 / 4)
            with checkpoint.atomic_directory(tmp_path / f"v{version + 1}") as directory:
                checkpoint.copy_model_files(model_dir, directory)
                actor.save_weights(directory / checkpoint.WEIGHTS)
            if version:  # weights that the released engine served before are gone
                shutil.rmtree(tmp_path / f"v{version}")
            engine.resume(tmp_path / f"v{version + 1}", version + 1)
        assert engine.pid == pid and engine.served_version() == "2"
    finally:
        engine.close()
