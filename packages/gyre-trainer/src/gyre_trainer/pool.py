"""All cells of a run: roles, the claim loop, the summed step, and publication. asyncio, no torch.

Cells are ordered, 0 is the core. Invariants:
- a satellite that dies loses its micro-steps to the queue and leaves the members; the batch goes on;
- the optimizer step is taken once, after the stream is drained and a reduction over all cells that did its
  micro-steps succeeded; only then are they committed;
- a satellite joins outside a step, at exactly the core's version;
- `published` names weights that every engine in rollout has been verified to serve.
A lost core ends the run: everything raises CellDied for cell 0.
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
from gyre_trainer.rows import MicroStep
from gyre_trainer.settings import CellSettings
from gyre_trainer.statistics import TrainStatistics
from gyre_trainer.stream import MicroStepQueue

CORE = 0
COLLECTIVE_ATTEMPTS = 3
"""Attempts of a collective that fails though no cell died; each death allows one more."""
COLLECTIVE_MARGIN_S = 5.0
"""Seconds a cell may answer later than its collective's own deadline."""
KEPT_PUBLICATIONS = 2

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

    def __init__(self, settings: CellSettings, run_dir: Path, on_notice: OnNotice):
        self.settings = settings
        self.cells: dict[int, CellProcess] = {}
        """Live cells by index."""
        self.roles: dict[int, Role] = {}
        self.version = settings.version
        """The core's weight version: optimizer steps taken."""
        self.published: tuple[int, Path] = (settings.version, settings.model)
        self.on_lost: Callable[[int, str], None] = lambda index, reason: None
        """Called once for each cell that died, with the reason."""
        self._run_dir = Path(run_dir)
        self._on_notice = on_notice
        self._key = secrets.token_bytes(32)
        self._store: tuple[str, int] | None = None
        self._generation = 0
        self._members: tuple[int, ...] = ()
        self._source: tuple[str, int] | None = None
        self._window = asyncio.Lock()
        self._wake = asyncio.Event()
        self._queue: MicroStepQueue | None = None
        self._core_death = "it did not start"
        self._endings: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        count: int,
        settings: CellSettings,
        run_dir: Path,
        on_notice: OnNotice = lambda index, notice: None,
    ) -> CellPool:
        """Start `count` cells at once, all in rollout, and prebuild their groups. Raises CellError."""
        pool = cls(settings, run_dir, on_notice)
        starts = [pool._start(index, settings) for index in range(count)]
        try:
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            pool._store = await pool._core().call("host_store")
            await pool._join()
        except BaseException:
            await pool.close()
            raise
        return pool

    async def close(self) -> None:
        """End all cells and engines; never raises."""
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

        A satellite pulls the core's weights without interrupting the core. Raises CellError when the engine
        stays busy (the cell stays in rollout), CellDied when the cell is lost, also when it cannot get the
        weights.
        """
        async with self._window:  # not between a step's reduction and its broadcast
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

    async def to_rollout(self, cell: int) -> None:
        """Restore the cell's engine at the published version, verified. Raises CellDied."""
        if self._queue is not None and cell in self._queue.workers():
            raise TrainerError(f"cell {cell} holds gradients of step {self._queue.step} and must not leave")
        if cell == CORE:
            self._source = None
        if cell in self.roles:
            self.roles[cell] = "rollout"
        version, model = self.published
        await self._essential(cell, "leave_training", model=model, version=version)

    async def revive(self, cell: int) -> None:
        """Start a lost satellite again, in rollout at the published version; groups follow when needed."""
        if cell == CORE or cell in self.cells:
            raise TrainerError(f"cell {cell} is no lost satellite")
        version, model = self.published
        await self._start(cell, replace(self.settings, model=model, version=version, optimizer_state=None))
        if self.published[0] != version:  # a publication came while the cell started
            version, model = self.published
            await self._essential(cell, "load_engine", model=model, version=version)

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
    async def publish(self, version: int) -> Path:
        """Write the core's weights as `weights/v<version>` and load them into every engine in rollout.

        A satellite whose engine cannot serve them is lost. Returns the Hugging Face directory.
        """
        self._expect(version)
        directory = self._run_dir / "weights" / f"v{version}"
        await self._core().call("save_weights", directory=directory, version=version)
        self.published = (version, directory)
        serving = [index for index in self.cells if self.roles[index] == "rollout"]
        loads = [self._essential(i, "load_engine", model=directory, version=version) for i in serving]
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, CellDied):
                raise outcome
        self._core()
        self._forget_publications(version)
        return directory

    async def save_checkpoint(self, directory: Path) -> None:
        """Write weights, optimizer state and version to `directory`, atomically."""
        await self._core().call("save_checkpoint", directory=directory, version=self.version)

    # -- inside
    async def _start(self, index: int, settings: CellSettings) -> None:
        self.cells[index] = await CellProcess.start(
            index, settings, self._run_dir, self._key, self._take_notice, self._account_lost
        )
        self.roles[index] = "rollout"

    def _take_notice(self, cell: int, notice: dict[str, Any]) -> None:
        """Pass a cell's notice on; without its engine a cell is of no use and is ended."""
        self._on_notice(cell, notice)
        if notice.get("engine") == "lost" and cell in self.cells:
            ending = asyncio.create_task(self.cells[cell].kill(f"its engine was lost: {notice['reason']}"))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

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
        for attempt in range(COLLECTIVE_ATTEMPTS + len(self.cells)):
            if not queue.drained:
                await self.train(queue)
            prefix = self._prefix((wanted | queue.workers()) & set(self.training))
            if len(prefix) == 1 or await self._collective("reduce", prefix, attempt):
                return prefix
        raise AssertionError("the last attempt raises")

    async def _broadcast(self) -> None:
        """Give the satellites in training the core's new weights."""
        for attempt in range(COLLECTIVE_ATTEMPTS + len(self.cells)):
            prefix = self._prefix(self.training)
            if len(prefix) == 1 or await self._collective("broadcast", prefix, attempt, version=self.version):
                return

    async def _collective(
        self, operation: str, prefix: tuple[int, ...], attempt: int, **arguments: Any
    ) -> bool:
        """Run a collective on all cells of a prefix, building groups first where needed.

        False when it failed and may be tried again with the cells that live now. Raises what a further
        attempt cannot mend, and the failure of the last attempt.
        """
        cells = {index: self.cells[index] for index in prefix}
        failure: BaseException | None = None
        if self._members[: len(prefix)] != prefix:
            failure = await self._join()
        if failure is None:
            failure = await self._all(cells, operation, count=len(prefix), **arguments)
        if failure is None:
            return True
        self._members = ()  # a group that failed once stays broken
        alive = all(self.cells.get(index) is cell for index, cell in cells.items())
        if alive and attempt >= COLLECTIVE_ATTEMPTS - 1:
            raise failure
        return False

    async def _join(self) -> CellError | None:
        """Build the prefix groups of all live cells under a new generation; the failure, or None."""
        self._generation += 1
        members = tuple(self._order())
        cells = {index: self.cells[index] for index in members}
        failure = await self._all(
            cells, "join", generation=self._generation, members=members, store=self._store
        )
        self._members = () if failure else members
        return failure

    async def _all(self, cells: dict[int, CellProcess], operation: str, **arguments: Any) -> CellError | None:
        """Run an operation on all `cells` at once. The first failure that a retry may mend, or None."""
        wait = self.settings.collective_timeout_s + COLLECTIVE_MARGIN_S
        calls = [cell.call(operation, timeout_s=wait, **arguments) for cell in cells.values()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        self._core()
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for failure in failures:
            if not isinstance(failure, CellError) or failure.kind not in ("CellDied", "CollectiveError"):
                raise failure
        return failures[0] if failures else None

    def _order(self) -> list[int]:
        """Cells in the order of groups, those in training first; without losses the order of cells."""
        return sorted(self.cells, key=lambda index: (index != CORE, self.roles[index] != "training", index))

    def _prefix(self, needed: Iterable[int]) -> tuple[int, ...]:
        """The shortest prefix of the order that holds the core and all of `needed` that live."""
        order = self._order()
        last = max((order.index(index) for index in needed if index in self.cells), default=0)
        return tuple(order[: last + 1])

    async def _essential(self, cell: int, operation: str, **arguments: Any) -> Any:
        """Without this operation the cell is of no use: it is killed when it fails. Raises CellDied.

        An engine that refuses to be released changes nothing, so that alone is raised as it is.
        """
        if cell not in self.cells:
            raise CellDied(cell, self._core_death if cell == CORE else "it was lost before")
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
        """The core. Raises CellDied when it is lost: nothing can go on then."""
        if CORE not in self.cells:
            raise CellDied(CORE, self._core_death)
        return self.cells[CORE]

    def _expect(self, version: int) -> None:
        if version != self.version:
            raise VersionError(f"the core is at version {self.version}, not at {version}")

    def _account_lost(self, cell: int, reason: str) -> None:
        """A cell died: it leaves the members, and its micro-steps of an uncommitted step are queued again."""
        if self.cells.pop(cell, None) is None:
            return
        del self.roles[cell]
        if cell == CORE:
            self._core_death = reason
        if self._queue is not None and not self._queue.committed:
            self._queue.fail(cell)
        self._wake.set()
        self.on_lost(cell, reason)

    def _forget_publications(self, version: int) -> None:
        """Keep the newest published directories only."""
        names = [path.name for path in (self._run_dir / "weights").glob("v*") if path.name[1:].isdigit()]
        past = sorted(int(name[1:]) for name in names if int(name[1:]) <= version)
        for old in past[:-KEPT_PUBLICATIONS]:
            shutil.rmtree(self._run_dir / "weights" / f"v{old}")
