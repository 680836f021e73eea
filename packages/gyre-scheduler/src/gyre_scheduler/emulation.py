"""Cells and a trainer that take time instead of compute, for load tests without GPUs.

`EmulatedPool` has what a driver uses of gyre-trainer's `CellPool`: engines, roles, publication. `EmulatedTrainer` is the
runtime's Trainer over it. How long things take comes from the simulator's `Costs`, so that `simulate` predicts what a
live run over emulated cells does. The simulator's model of training holds: equal micro-steps, claimed one at a time,
in cell order. Cells do not die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .emulation_engine import EmulatedEngine
from .errors import ProtocolError
from .events import Event, StreamDrained, Supply
from .settings import SchedulerSettings
from .simulator import Costs


@dataclass(frozen=True)
class Times:
    """Seconds that the operations of emulated cells take."""

    micro_step_s: tuple[float, ...]
    """Of each cell."""
    micro_steps_per_group: int
    to_training_s: float
    to_rollout_s: float
    update_s: float
    publish_s: float

    @classmethod
    def of(cls, settings: SchedulerSettings, costs: Costs, hour_s: float) -> Times:
        """The simulator's costs where an hour lasts `hour_s` seconds."""
        return cls(
            micro_step_s=tuple(hours * hour_s for hours in costs.micro_step_hours(settings)),
            micro_steps_per_group=costs.micro_steps_per_group,
            to_training_s=costs.to_training_hours * hour_s,
            to_rollout_s=costs.to_rollout_hours * hour_s,
            update_s=costs.update_hours * hour_s,
            publish_s=costs.publish_hours * hour_s,
        )


class EmulatedPool:
    """Cells of one engine each; those that were started, all in rollout.

    `async with EmulatedPool(...)`: the engines listen inside the block.
    """

    def __init__(self, engines: Sequence[EmulatedEngine], times: Times):
        self.times = times
        self.roles = ["rollout"] * len(engines)
        self.published: tuple[int, None] = (0, None)
        """The version that engines serve; there are no weights."""
        self.on_lost: Callable[[int, str], None] = lambda cell, reason: None
        """Never called."""
        self.on_joined: Callable[[], None] = lambda: None
        """A cell came into training."""
        self._engines = list(engines)

    async def __aenter__(self) -> EmulatedPool:
        for engine in self._engines:
            await engine.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        for engine in self._engines:
            await engine.stop()

    @property
    def engines(self) -> dict[int, str]:
        """Cell -> URL of its engine."""
        return {cell: engine.url for cell, engine in enumerate(self._engines)}

    @property
    def training(self) -> list[int]:
        return [cell for cell, role in enumerate(self.roles) if role == "training"]

    async def to_training(self, cell: int) -> None:
        """Release the engine; ProtocolError while it has calls, which then belong to nobody."""
        engine = self._engines[cell]
        if engine.running:
            raise ProtocolError(f"cell {cell} leaves rollout with {engine.running} calls in hand")
        engine.released = True
        await asyncio.sleep(self.times.to_training_s)
        self.roles[cell] = "training"
        self.on_joined()

    async def to_rollout(self, cell: int) -> int:
        """Restore the engine at the published version, which is returned."""
        self.roles[cell] = "rollout"
        await asyncio.sleep(self.times.to_rollout_s)
        self._engines[cell].load(self.published[0])
        self._engines[cell].released = False
        return self.published[0]

    async def publish(self, version: int) -> list[int]:
        """Load `version` into every engine in rollout; returns their cells."""
        await asyncio.sleep(self.times.publish_s)
        self.published = (version, None)
        cells = [cell for cell, role in enumerate(self.roles) if role == "rollout"]
        for cell in cells:
            self._engines[cell].load(version)
        return cells


class EmulatedTrainer:
    """The runtime's Trainer over emulated cells.

    `post` hands an event to the runtime; `serve` makes the engines of cells take calls at a version.
    """

    def __init__(
        self,
        pool: EmulatedPool,
        post: Callable[[Event], None],
        serve: Callable[[dict[int, str], int], Awaitable[None]],
    ):
        self._pool, self._post, self._serve = pool, post, serve
        self._step = 0
        self._unclaimed = 0
        self._closed = False
        self._workers: dict[int, asyncio.Task[None]] = {}
        pool.on_joined = self._claim

    async def admit(self, group: int, step: int, members: tuple[str, ...]) -> None:
        self._step = step
        self._unclaimed += self._pool.times.micro_steps_per_group
        self._post(Supply(step, self._unclaimed))
        self._claim()

    async def close_stream(self, step: int) -> None:
        self._closed = True
        self._drain()

    async def step(self, step: int, cells: tuple[int, ...]) -> None:
        await asyncio.sleep(self._pool.times.update_s)

    async def publish(self, version: int) -> None:
        cells = await self._pool.publish(version)
        await self._serve({cell: self._pool.engines[cell] for cell in cells}, version)

    async def close(self) -> None:
        """End the micro-steps of a run that did not come to its end."""
        for worker in self._workers.values():
            worker.cancel()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)

    def _claim(self) -> None:
        """Idle training cells take a micro-step each, in cell order."""
        for cell in self._pool.training:
            if self._unclaimed and cell not in self._workers:
                self._workers[cell] = asyncio.create_task(self._work(cell, self._take()))

    def _take(self) -> float:
        """Claim one micro-step; returns the time of now."""
        self._unclaimed -= 1
        self._post(Supply(self._step, self._unclaimed))
        return asyncio.get_running_loop().time()

    async def _work(self, cell: int, end: float) -> None:
        """Micro-steps one after another; late timers do not add up."""
        loop = asyncio.get_running_loop()
        while True:
            end += self._pool.times.micro_step_s[cell]
            await asyncio.sleep(max(end - loop.time(), 0.0))
            if not self._unclaimed:
                break
            self._take()
        del self._workers[cell]
        self._drain()

    def _drain(self) -> None:
        if self._closed and not self._unclaimed and not self._workers:
            self._closed = False
            self._post(StreamDrained(self._step))


def emulated_task(number: int, seconds: Sequence[float], token_s: float, call_s: float) -> dict[str, Any]:
    """A task for `emulation_harness`: member i of its group works `seconds[i]` in calls of about `call_s`."""
    view = {"seconds": list(seconds), "token_s": token_s, "call_s": call_s}
    return {"id": f"emulated-{number}", "prompt": "Work until the time is up.", "harness": view}


def score(workspace: Path, task: Mapping[str, Any]) -> float:
    """Evaluator of emulated executions: the share of its tokens that the harness was given."""
    given, wanted = map(int, (workspace / "tokens.txt").read_text().split())
    return given / wanted
