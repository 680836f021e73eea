"""A cell without a model: the real process, connection, key and engine supervision, and a trainer that only counts.

Run as a script in place of `python -m gyre_trainer.cell`. The weights of a version are a directory that holds the
version's number.
"""

import os
import sys
import time
from pathlib import Path

from gyre_trainer import cell
from gyre_trainer.engines import EngineProcess
from gyre_trainer.statistics import TrainStatistics


class CountingCell(cell.Cell):
    def start(self, settings):
        self.version = settings.version
        self.engine = EngineProcess(
            settings.model, self.version, settings.engine, self._engine_log, self._notice, self._progress
        )
        self.engine.start()
        self.engine.wait_ready()
        return self._engine_state()

    def host_store(self):
        return "127.0.0.1", 1

    def join(self, generation, members, store):
        pass

    def enter_training(self, version, source):
        self.engine.release()
        self.version = version
        return "127.0.0.1", 2

    def leave_training(self, model, version):
        self.engine.resume(model, version)
        return self._engine_state()

    def train(self, micro_step):
        return TrainStatistics(targets=micro_step.target_count, executions=len(micro_step.executions))

    def reduce(self, count):
        """As many pieces as the environment says, each well within a collective's deadline."""
        for _ in range(int(os.environ.get("FAKE_PIECES", "0"))):
            time.sleep(0.1)
            self._progress()

    def step(self, version, scale, reduced):
        self.version += 1
        return {"version": self.version, "grad_norm": 0.0}

    def broadcast(self, count, version):
        self.version = version

    def save_weights(self, directory, version):
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "version").write_text(str(version))


if __name__ == "__main__":
    sys.argv[1:3] = []  # -m gyre_trainer.cell
    cell.PROGRESS_INTERVAL_S = 0.0
    cell.Cell = CountingCell
    cell.main()
