"""The process of one cell: `python -m gyre_trainer.cell` (paper section 4.1).

Hosts the training actor and the rollout engine, connects to the driver, and answers its operations one at a
time. Between answers it may send notices (`{"engine": "restarted", ...}`), and within a long operation it
tells that it goes on. Its first line of standard input is the run's key; it ends with its engine when standard
input ends, because then the driver has ended, also by a crash.

Messages: driver -> cell `(number, operation, arguments)`; cell -> driver `("hello", pid)`,
`("answer", number, value)`, `("error", number, kind, message)`, `("notice", dict)` or `("progress",)`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_trainer.engines import EngineProcess
from gyre_trainer.errors import TrainerError, VersionError
from gyre_trainer.rows import MicroStep
from gyre_trainer.settings import CellSettings
from gyre_trainer.statistics import TrainStatistics
from gyre_trainer.wire import Channel

HOST = "127.0.0.1"
PROGRESS_INTERVAL_S = 1.0
"""Least time between two messages of progress."""
OPERATIONS = (
    *(
        "start",
        "host_store",
        "join",
        "enter_training",
        "leave_training",
        "train",
        "reduce",
        "step",
        "broadcast",
    ),
    *("save_weights", "load_engine", "save_checkpoint", "checksum", "stop"),
)


class Cell:
    """State of one cell and its operations, whose arguments and answers are plain picklable values."""

    def __init__(self, index: int, key: bytes, engine_log: Path, channel: Channel):
        self.index = index
        self.engine: EngineProcess | None = None
        self._key = key
        self._engine_log = engine_log
        self._channel = channel
        self._store = None
        self._membership = None
        self._reduced: list | None = None
        self._told = 0.0

    def start(self, settings: CellSettings) -> dict[str, Any]:
        """Build the actor while the engine starts. Cell 0 is the core and owns the optimizer."""
        self.settings = settings
        # An engine that hangs must be noticed, and replaced, while the driver still waits for this cell.
        wait_s = min(settings.engine.request_timeout_s, settings.operation_timeout_s / 2)
        self.engine = EngineProcess(
            settings.model,
            settings.version,
            replace(settings.engine, request_timeout_s=wait_s),
            self._engine_log,
            self._notice,
            self._progress,
        )
        self.engine.start()
        # Imported here, beside the starting engine: torch and megatron-core take seconds.
        import torch

        torch.set_num_threads(settings.threads)
        from gyre_trainer.actor import TrainingActor
        from gyre_trainer.transfer import TcpTransfer, Transfer

        adam = settings.adam if self.index == 0 else None
        self.actor = TrainingActor(settings.model, settings.version, settings.objective, adam)
        if settings.optimizer_state is not None and self.index == 0:
            self.actor.load_optimizer_state(torch.load(settings.optimizer_state, weights_only=True))
        self._transfer: Transfer = TcpTransfer(self._key, HOST, settings.collective_timeout_s)
        self.engine.wait_ready()
        self.actor.offload()
        return {"engine": self.engine.url, "engine_pid": self.engine.pid, "version": self.actor.version}

    # -- membership
    def host_store(self) -> tuple[str, int]:
        """Core only: the address of the store through which groups are built."""
        from gyre_trainer import membership

        if self._store is None:
            self._store = membership.host_store(HOST, self.settings.collective_timeout_s)
        return HOST, self._store.port

    def join(self, generation: int, members: tuple[int, ...], store: tuple[str, int]) -> None:
        """Build the prefix groups of a generation, together with all its members."""
        from gyre_trainer import membership

        timeout_s = self.settings.collective_timeout_s
        if self._membership is not None:
            self._membership.close()
        if self._store is None:
            self._store = membership.join_store(*store, timeout_s)
        self._membership = membership.Membership(
            self._store, generation, members, self.index, HOST, timeout_s, self._progress
        )

    # -- roles
    def enter_training(self, version: int, source: tuple[str, int] | None) -> tuple[str, int]:
        """Release the engine's memory and get ready to train at `version`.

        A satellite pulls the weights from `source`; the core (None) exposes its own and answers where. Raises
        EngineError when the engine stays busy; nothing was changed then.
        """
        self.engine.release()
        self.actor.onload()
        if source is None:
            self._at(version)
            self._expose()
        else:
            buffers = self.actor.arrays()
            self._transfer.pull(source, version, buffers, self._progress)
            self.actor.take(buffers, version)
        self.actor.zero_gradients()
        return self._transfer.address

    def leave_training(self, model: Path, version: int) -> dict[str, Any]:
        """Offload the actor and serve the published `model` again."""
        self._transfer.withdraw()
        self._reduced = None
        self.actor.offload()
        self.engine.resume(model, version)
        return self._engine_state()

    def load_engine(self, model: Path, version: int) -> dict[str, Any]:
        """Serve newly published weights; "serving" is false where the engine is released and will load them
        when it comes back.
        """
        serving = self.engine.load(model, version)
        return {**self._engine_state(), "serving": serving}

    # -- training
    def train(self, micro_step: MicroStep) -> TrainStatistics:
        return self.actor.train(micro_step)

    def reduce(self, count: int) -> None:
        """Sum the gradients of the first `count` members on the core; everybody's own sum stays as it is."""
        self._reduced = self._membership.reduce(self.actor.gradients, count)

    def step(self, version: int, scale: float, reduced: bool) -> dict[str, Any]:
        """Core only: one optimizer step on the reduced (or, training alone, on its own) gradient sum.

        `version` is the one the step must start from. The new weights are exposed.
        """
        self._at(version)
        self._transfer.withdraw()
        if reduced:
            for gradient, total in zip(self.actor.gradients, self._reduced, strict=True):
                gradient.copy_(total)
        self._reduced = None
        norm = self.actor.optimizer_step(scale)
        self._expose()
        return {"version": self.actor.version, "grad_norm": norm}

    def broadcast(self, count: int, version: int) -> None:
        """Take the core's weights, which are at `version`, and start the next sum."""
        if self.index == 0:
            self._at(version)
        self._membership.broadcast(list(self.actor.weights.values()), count)
        self.actor.version = version
        if self.index:
            self.actor.zero_gradients()

    # -- files
    def save_weights(self, directory: Path, version: int) -> None:
        """Core only: write a Hugging Face directory, atomically."""
        from gyre_trainer.checkpoint import WEIGHTS, atomic_directory, copy_model_files

        self._at(version)
        with atomic_directory(directory) as temporary:
            copy_model_files(self.settings.model, temporary)
            self.actor.save_weights(temporary / WEIGHTS)

    def save_checkpoint(self, directory: Path, version: int) -> None:
        """Core only: weights, optimizer state and version, atomically."""
        import torch

        from gyre_trainer import checkpoint

        self._at(version)
        with checkpoint.atomic_directory(directory) as temporary:
            checkpoint.copy_model_files(self.settings.model, temporary)
            self.actor.save_weights(temporary / checkpoint.WEIGHTS)
            torch.save(self.actor.optimizer_state(), temporary / checkpoint.OPTIMIZER)
            checkpoint.write_state(temporary, self.actor.version)

    def checksum(self) -> int:
        """CRC-32 over all weights of the actor, in order."""
        import zlib

        value = 0
        for array in self.actor.arrays().values():
            value = zlib.crc32(array.tobytes(), value)
        return value

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.close()

    # -- inside
    def _at(self, version: int) -> None:
        if self.actor.version != version:
            raise VersionError(f"the actor's weights are at version {self.actor.version}, not at {version}")

    def _expose(self) -> None:
        self._transfer.expose(self.actor.version, self.actor.arrays())

    def _engine_state(self) -> dict[str, Any]:
        return {"engine": self.engine.url, "engine_pid": self.engine.pid, "version": self.engine.version}

    def _notice(self, notice: dict[str, Any]) -> None:
        self._send(("notice", {**notice, "engine_pid": self.engine.pid}))

    def _progress(self) -> None:
        """Tell the driver that the operation in hand goes on, so that it waits longer."""
        now = time.monotonic()
        if now - self._told >= PROGRESS_INTERVAL_S:
            self._told = now
            self._send(("progress",))

    def _send(self, message: tuple) -> None:
        try:
            self._channel.send(message)
        except OSError:
            _end(self)


def serve(cell: Cell, channel: Channel) -> None:
    """Answer operations until the driver says stop or is gone."""
    channel.send(("hello", os.getpid()))
    while True:
        try:
            number, operation, arguments = channel.receive()
        except (EOFError, OSError):
            return
        try:
            if operation not in OPERATIONS:
                raise TrainerError(f"unknown operation {operation!r}")
            answer = ("answer", number, getattr(cell, operation)(**arguments))
        except TrainerError as error:
            answer = ("error", number, type(error).__name__, str(error))
        except Exception as error:  # a bug: the driver names it, the log has the whole of it
            traceback.print_exc()
            answer = (
                "error",
                number,
                type(error).__name__,
                f"{operation} failed: {error} (see the cell's log)",
            )
        channel.send(answer)
        if operation == "stop":
            return


def _end(cell: Cell) -> None:
    """End at once, the engine's process group first."""
    pid = cell.engine.pid if cell.engine else None
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(1)


def _watch_parent(cell: Cell) -> None:
    sys.stdin.buffer.read()
    _end(cell)


def main() -> None:
    parser = argparse.ArgumentParser(prog="gyre_trainer.cell", description=__doc__.splitlines()[0])
    parser.add_argument("--driver", required=True, help="HOST:PORT of the driver")
    parser.add_argument("--index", required=True, type=int)
    parser.add_argument("--engine-log", required=True, type=Path)
    options = parser.parse_args()
    key = bytes.fromhex(sys.stdin.buffer.readline().decode())
    host, port = options.driver.rsplit(":", 1)
    channel = Channel(socket.create_connection((host, int(port)), 30.0))
    channel.call(key)
    channel.socket.settimeout(None)
    cell = Cell(options.index, key, options.engine_log, channel)
    threading.Thread(target=_watch_parent, args=(cell,), name="parent", daemon=True).start()
    try:
        serve(cell, channel)
    finally:
        cell.stop()


if __name__ == "__main__":
    main()
