"""All cells of a run: roles, the claim loop, the summed step, and publication. asyncio, no torch.

Cells are ordered, 0 is the core. Invariants:
- a satellite that dies loses its micro-steps to the queue and leaves the members; the batch goes on;
- the optimizer step is taken once, after the stream is drained and a reduction over all cells that did its
  micro-steps succeeded; only then are they committed;
- a satellite joins outside a step, at exactly the core's version;
- `published` names the newest weights written for engines; a published directory is kept while an engine may
  read it, and `engines` lists no cell whose engine has not been verified at what it was told to serve.
What ends the run ends it everywhere: after the core was lost, everything raises CellDied for cell 0; after a
callback raised, everything raises what it raised.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gyre_trainer.cells import CellProcess, OnNotice
from gyre_trainer.errors import CellDied, CellError, TrainerError, VersionError
from gyre_trainer.groups import PrefixGroups
from gyre_trainer.rows import MicroStep
from gyre_trainer.settings import CellSettings
from gyre_trainer.statistics import TrainStatistics
from gyre_trainer.stream import MicroStepQueue

CORE = 0
KEPT_PUBLICATIONS = 2
"""Published directories kept besides those that engines were given."""

Role = Literal["rollout", "training"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step."""

    step: int
    version: int
    """Weight version after it."""
    cells: tuple[int, ...]
    """Cells whose gradients were summed."""
    grad_norm: float
    """Norm of the scaled gradient before clipping."""
    executions: int
    """|E|."""
    statistics: TrainStatistics
    seconds: float
    """Reduction, update and broadcast."""


class CellPool:
    """Create with `CellPool.start`. Methods may be called concurrently; each waits where it must."""

    def __init__(self, settings: CellSettings, run_dir: Path, log_dir: Path, on_notice: OnNotice):
        self.settings = settings
        self.cells: dict[int, CellProcess] = {}
        """Live cells by index."""
        self.roles: dict[int, Role] = {}
        self.version = settings.version
        """The core's weight version: optimizer steps taken."""
        self.published: tuple[int, Path] = (settings.version, settings.model)
        self.on_lost: Callable[[int, str], None] = lambda index, reason: None
        """Called once for each cell that died, with the reason."""
        self._weights_dir = Path(run_dir) / "weights"
        self._log_dir = Path(log_dir)
        self._on_notice = on_notice
        self._key = secrets.token_bytes(32)
        self._groups = PrefixGroups(self.cells, self._order, self._core, settings.collective_timeout_s)
        self._models: dict[int, Path] = {}
        """The directory that each cell's engine was last given."""
        self._source: tuple[str, int] | None = None
        self._window = asyncio.Lock()
        self._wake = asyncio.Event()
        self._queue: MicroStepQueue | None = None
        self._revivals: dict[int, asyncio.Task[int]] = {}
        self._failure: BaseException | None = None
        """What ended the run: the core's death, or what a callback raised."""

    @classmethod
    async def start(
        cls,
        count: int,
        settings: CellSettings,
        run_dir: Path,
        log_dir: Path,
        on_notice: OnNotice = lambda index, notice: None,
    ) -> CellPool:
        """Start `count` cells at once, all in rollout, and prebuild their groups. Raises CellError.

        Weights go to `run_dir`/weights, the output of cells and engines to `log_dir`. What `on_notice` or
        `on_lost` raises stops nothing at that moment: the operation in hand, or the next, raises it.
        """
        pool = cls(settings, run_dir, log_dir, on_notice)
        try:
            starts = [pool._add(index) for index in range(count)]
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            await pool._groups.start()
        except BaseException:
            await pool.close()
            raise
        return pool

    async def close(self) -> None:
        """End all cells and engines; never raises."""
        for revival in self._revivals.values():
            revival.cancel()
        await asyncio.gather(*self._revivals.values(), return_exceptions=True)
        await asyncio.gather(*(cell.stop() for cell in self.cells.values()))

    # -- roles
    @property
    def engines(self) -> dict[int, str]:
        """Cell -> URL of its engine, live cells only."""
        return {index: cell.engine_url for index, cell in self.cells.items()}

    @property
    def training(self) -> list[int]:
        """Cells in training, in order."""
        return sorted(index for index, role in self.roles.items() if role == "training")

    async def to_training(self, cell: int) -> None:
        """Release the cell's engine, which must be idle, and let the cell train at the core's version.

        A satellite pulls the core's weights without interrupting the core. Raises CellDied when the cell is
        lost, also when it cannot get the weights. An engine that is still busy after a minute raises CellError
        of kind "EngineError": somebody else sends it requests. The cell stays in rollout and nothing is
        lost, but there is no way on for a caller who has moved the engine's requests away: the run has
        failed.
        """
        async with self._window:  # not between a step's reduction and its broadcast
            self._core()
            if self.roles.get(cell) == "training":
                raise TrainerError(f"cell {cell} is in training already")
            if cell != CORE and self._source is None:
                raise TrainerError(f"cell {cell} cannot join before the core trains")
            source = None if cell == CORE else self._source
            address = await self._essential(cell, "enter_training", version=self.version, source=source)
            if cell == CORE:
                self._source = address
            self.roles[cell] = "training"
            self._wake.set()

    async def to_rollout(self, cell: int) -> int:
        """Restore the cell's engine at the published version; returns the one it serves. Raises CellDied."""
        if self._queue is not None and cell in self._queue.workers():
            raise TrainerError(f"cell {cell} holds gradients of step {self._queue.step} and must not leave")
        if cell == CORE:
            self._source = None
        if cell in self.roles:
            self.roles[cell] = "rollout"
        version, model = self.published
        await self._essential(cell, "leave_training", model=model, version=version)
        if cell in self.cells:
            self._models[cell] = model
        return version

    async def revive(self, cell: int) -> int:
        """Start a lost satellite again, in rollout; groups follow when needed.

        The cell is listed once its engine serves the newest publication, whose version is returned. Raises
        CellError when it cannot be started.
        """
        self._core()
        if cell == CORE or cell in self.cells or cell in self._revivals:
            raise TrainerError(f"cell {cell} is no lost satellite")
        self._revivals[cell] = asyncio.create_task(self._revive(cell))
        try:
            return await self._revivals[cell]
        finally:
            del self._revivals[cell]

    # -- training
    async def train(self, queue: MicroStepQueue) -> None:
        """Feed micro-steps to the cells in training until the queue is drained.

        Cells that join meanwhile take part at once. Waits for admissions without a deadline of its own: how
        long a rollout may take is the scheduler's business. Raises CellError when a micro-step is refused,
        CellDied when the core is lost.
        """
        self._queue = queue
        queue.watch(self._wake.set)
        workers: dict[int, asyncio.Task[None]] = {}
        try:
            while not queue.drained:
                self._core()
                self._wake.clear()
                for cell in self.training:
                    if cell not in workers and (micro_step := queue.claim(cell)) is not None:
                        workers[cell] = asyncio.create_task(self._work(cell, micro_step, queue))
                waking = asyncio.create_task(self._wake.wait())
                await asyncio.wait({waking, *workers.values()}, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                for cell in [cell for cell, task in workers.items() if task.done()]:
                    workers.pop(cell).result()
        finally:
            queue.unwatch(self._wake.set)
            # A claimed micro-step is finished, never cut: the cell adds it to its sum in any case.
            await asyncio.gather(*workers.values(), return_exceptions=True)

    async def step(self, queue: MicroStepQueue, cells: Iterable[int] = ()) -> StepResult:
        """One optimizer step on the closed queue: sum, scale by 1/|E|, clip, update, broadcast, commit.

        The sum goes over the prefix that holds `cells` and every cell that did work; of those lost meanwhile
        the others first train the micro-steps again. Without targets the gradient is zero and still a step.
        """
        async with self._window:
            started = time.perf_counter()
            members = await self._reduce(queue, set(cells))
            answer = await self._core().call(
                "step", version=self.version, scale=queue.scale, reduced=len(members) > 1
            )
            statistics = queue.commit()
            self.version = answer["version"]
            self._queue = None
            await self._broadcast()
            return StepResult(
                step=queue.step,
                version=self.version,
                cells=members,
                grad_norm=answer["grad_norm"],
                executions=queue.execution_count,
                statistics=statistics,
                seconds=time.perf_counter() - started,
            )

    # -- publication
    async def publish(self, version: int) -> tuple[Path, list[int]]:
        """Write the core's weights as `weights/v<version>` and load them into every engine in rollout.

        Returns the Hugging Face directory and the cells whose engines were verified to serve it. A satellite
        whose engine cannot is lost.
        """
        if version != self.version:
            raise VersionError(f"the core is at version {self.version}, not at {version}")
        directory = self._weights_dir / f"v{version}"
        await self._core().call("save_weights", directory=directory, version=version)
        self.published = (version, directory)
        rollout = [index for index in self.cells if self.roles[index] == "rollout"]
        loads = [self._essential(index, "load_engine", model=directory, version=version) for index in rollout]
        verified = []
        for index, state in zip(rollout, await asyncio.gather(*loads, return_exceptions=True), strict=True):
            if isinstance(state, CellDied):
                continue
            if isinstance(state, BaseException):
                raise state
            if index in self.cells:
                self._models[index] = directory
                verified += [index] if state["serving"] else []
        self._core()
        self._forget_publications(version)
        return directory, verified

    async def save_checkpoint(self, directory: Path) -> None:
        """Write weights, optimizer state and version to `directory`, atomically."""
        await self._core().call("save_checkpoint", directory=directory, version=self.version)

    # -- inside
    async def _start(self, index: int, settings: CellSettings) -> CellProcess:
        return await CellProcess.start(
            index, settings, self._log_dir, self._key, self._take_notice, self._account_lost
        )

    async def _add(self, index: int) -> None:
        self._enlist(await self._start(index, self.settings), self.settings.model)

    def _enlist(self, process: CellProcess, model: Path) -> None:
        self.cells[process.index] = process
        self.roles[process.index] = "rollout"
        self._models[process.index] = model

    async def _revive(self, cell: int) -> int:
        version, model = self.published
        self._models[cell] = model
        process = None
        try:
            process = await self._start(
                cell, replace(self.settings, model=model, version=version, optimizer_state=None)
            )
            while self.published[0] != version:  # a publication came meanwhile
                version, model = self.published
                await process.call("load_engine", model=model, version=version)
        except BaseException:
            del self._models[cell]
            if process is not None:
                await process.kill("its revival was given up")
            raise
        self._enlist(process, model)
        return version

    async def _work(self, cell: int, micro_step: MicroStep, queue: MicroStepQueue) -> None:
        """Train one claimed micro-step; when the cell is lost meanwhile it is queued again."""
        process = self.cells[cell]
        try:
            statistics = await process.call("train", micro_step=micro_step)
        except CellDied:
            return
        if self.cells.get(cell) is process:
            queue.done(cell, micro_step.id, statistics)

    async def _reduce(self, queue: MicroStepQueue, wanted: set[int]) -> tuple[int, ...]:
        """Sum the gradients of a prefix that holds all of the queue's work; returns that prefix."""
        for attempt in self._groups.attempts():
            if not queue.drained:
                await self.train(queue)
            prefix = self._groups.prefix((wanted | queue.workers()) & set(self.training))
            if len(prefix) == 1 or await self._groups.run("reduce", prefix, attempt):
                return prefix
        raise AssertionError("the last attempt raises")

    async def _broadcast(self) -> None:
        """Give the satellites in training the core's new weights."""
        for attempt in self._groups.attempts():
            prefix = self._groups.prefix(self.training)
            if len(prefix) == 1 or await self._groups.run("broadcast", prefix, attempt, version=self.version):
                return

    def _order(self) -> list[int]:
        """Cells in the order of groups, those in training first; without losses the order of cells."""
        return sorted(self.cells, key=lambda index: (index != CORE, self.roles[index] != "training", index))

    async def _essential(self, cell: int, operation: str, **arguments: Any) -> Any:
        """Change what the cell's engine does. Without that it is of no use: it is killed when it fails, and
        CellDied raised.

        An engine that refuses to be released changes nothing, so that alone is raised as it is.
        """
        self._core()
        if cell not in self.cells:
            raise CellDied(cell, "it was lost before")
        process = self.cells[cell]
        try:
            return await process.call(operation, **arguments)
        except CellDied:
            raise
        except CellError as error:
            if operation == "enter_training" and error.kind == "EngineError":
                raise
            await process.kill(str(error))
            raise CellDied(cell, str(error)) from None

    def _core(self) -> CellProcess:
        """The core. Raises what ended the run."""
        if self._failure is not None:
            raise self._failure
        return self.cells[CORE]

    def _take_notice(self, cell: int, notice: dict[str, Any]) -> None:
        self._call_back(self._on_notice, cell, notice)

    def _account_lost(self, cell: int, reason: str) -> None:
        """A cell died: it leaves the members, and its micro-steps of an uncommitted step are queued again."""
        if self.cells.pop(cell, None) is None:
            return
        del self.roles[cell], self._models[cell]
        if cell == CORE:
            self._failure = self._failure or CellDied(CORE, reason)
        if self._queue is not None and not self._queue.committed:
            self._call_back(self._queue.fail, cell)
        self._wake.set()
        self._call_back(self.on_lost, cell, reason)

    def _call_back(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """What it raises fails the run: every later operation raises it, and `train` at once."""
        try:
            callback(*arguments)
        except Exception as error:
            self._failure = self._failure or error
            self._wake.set()

    def _forget_publications(self, version: int) -> None:
        """Keep the newest published directories, and those that engines may read."""
        names = [path.name for path in self._weights_dir.glob("v*") if path.name[1:].isdigit()]
        past = sorted(int(name[1:]) for name in names if int(name[1:]) <= version)
        for old in past[:-KEPT_PUBLICATIONS]:
            if self._weights_dir / f"v{old}" not in self._models.values():
                shutil.rmtree(self._weights_dir / f"v{old}")
