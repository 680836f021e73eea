"""Feeds training steps and publishes weights (`gyre_scheduler.runtime.Trainer`).

One step has one stream of micro-steps. Its cells claim while groups are still admitted; the optimizer step comes after the
stream is drained. Every step leaves one row in metrics.jsonl.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_scheduler.events import Event, StreamDrained, Supply
from gyre_trainer.pool import CellPool, StepResult
from gyre_trainer.stream import MicroStepQueue

from gyre_cli.admission import Admission, AdmittedGroup
from gyre_cli.errors import RunFailed
from gyre_cli.progress import Progress
from gyre_cli.record import RunRecord
from gyre_cli.rollouts import Rollouts
from gyre_cli.routes import Routes

KEPT_CHECKPOINTS = 2


@dataclass
class Stream:
    """The stream of one training step and what was admitted to it."""

    queue: MicroStepQueue
    feeding: asyncio.Task[None]
    groups: list[AdmittedGroup] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)


class Training:
    """The training side of one run. `post` hands an event to the runtime, `fail` ends the run with an error."""

    def __init__(
        self,
        pool: CellPool,
        admission: Admission,
        rollouts: Rollouts,
        routes: Routes,
        record: RunRecord,
        progress: Progress,
        token_budget: int,
        checkpoints: Path,
        post: Callable[[Event], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        """metrics.jsonl so far."""
        self._pool = pool
        self._admission = admission
        self._rollouts = rollouts
        self._routes = routes
        self._record = record
        self._progress = progress
        self._token_budget = token_budget
        self._checkpoints = checkpoints
        self._post = post
        self._fail = fail
        self._streams: dict[int, Stream] = {}
        self._started = time.monotonic()

    async def admit(self, group: int, step: int, members: tuple[str, ...]) -> None:
        stream = self._stream(step)
        admitted = await asyncio.to_thread(self._admission.admit, list(members))
        stream.groups.append(admitted)
        stream.staleness.append(step - 1 - self._rollouts.groups[group].version)
        self._record.event("admit", group=group, step=step, tokens=admitted.trained_tokens)
        stream.queue.admit(admitted.executions)

    async def close_stream(self, step: int) -> None:
        self._stream(step).queue.close()

    async def step(self, step: int, cells: tuple[int, ...]) -> None:
        stream = self._streams.pop(step)
        await stream.feeding
        calls = sum(group.calls for group in stream.groups)
        if calls and calls == sum(group.failed_calls for group in stream.groups):
            raise RunFailed(
                f"each of the {calls} model calls of step {step} failed; see logs/proxy.log and logs/engine0.log"
            )
        result = await self._pool.step(stream.queue, cells)
        row = self._row(stream, result)
        self._record.metrics(row)
        self._record.event("step", step=step, cells=list(result.cells), reward=row["reward_mean"])
        self.rows.append(row)
        self._progress.step(row)

    async def publish(self, version: int) -> None:
        directory, verified = await self._pool.publish(version)
        engines = self._pool.engines
        await self._routes.admit({cell: engines[cell] for cell in verified if cell in engines}, version)
        await self._checkpoint(version)
        self._record.event("publication", version=version, path=str(directory), cells=verified)

    async def _checkpoint(self, version: int) -> None:
        """Write a checkpoint of the published version and forget all but the newest two."""
        await self._pool.save_checkpoint(self._checkpoints / f"v{version}")
        written = sorted(self._checkpoints.glob("v*"), key=lambda path: int(path.name[1:]))
        for old in written[:-KEPT_CHECKPOINTS]:
            await asyncio.to_thread(shutil.rmtree, old)

    async def close(self) -> None:
        """End the feeding of streams that were not finished."""
        for stream in self._streams.values():
            stream.feeding.cancel()
        await asyncio.gather(*(stream.feeding for stream in self._streams.values()), return_exceptions=True)

    def _stream(self, step: int) -> Stream:
        if step not in self._streams:
            queue = MicroStepQueue(step, self._token_budget)
            self._streams[step] = Stream(queue, asyncio.create_task(self._feed(queue)))
            queue.watch(lambda: self._post(Supply(step, queue.unclaimed)))
        return self._streams[step]

    async def _feed(self, queue: MicroStepQueue) -> None:
        """Let the training cells work the stream off, then say that it is drained."""
        try:
            await self._pool.train(queue)
        except Exception as error:
            self._fail(error)
            raise
        self._post(StreamDrained(queue.step))

    def _row(self, stream: Stream, result: StepResult) -> dict[str, Any]:
        """One row of metrics.jsonl. `trained_tokens` are all admitted targets; those of executions whose advantage is
        exactly 0 have no gradient and are not computed (`zero_advantage_tokens`).
        """
        rewards = [reward for group in stream.groups for reward in group.rewards]
        statistics = result.statistics
        return {
            "step": result.step,
            "version": result.version,
            "elapsed_s": time.monotonic() - self._started,
            "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
            "rewards": len(rewards),
            "executions": result.executions,
            "staleness_mean": sum(stream.staleness) / len(stream.staleness),
            "trained_tokens": statistics.targets,
            "zero_advantage_tokens": statistics.skipped_targets,
            "tokens": statistics.tokens,
            "trajectories": sum(group.trajectories for group in stream.groups),
            "micro_steps": statistics.micro_steps,
            "oversize_executions": len(stream.queue.oversize),
            "cells": list(result.cells),
            "loss": statistics.loss / result.executions if result.executions else 0.0,
            "grad_norm": result.grad_norm,
            "clip_share": statistics.clip_share,
            "ratio_mean": statistics.ratio_mean,
            "capped_tokens": statistics.capped_targets,
            "entropy": statistics.entropy,
            "same_version_tokens": statistics.same_version_targets,
            "logprob_mismatch": statistics.mismatch_max,
            "training_s": statistics.seconds,
            "step_s": result.seconds,
        }
