"""`gyre train`: composes proxy, cells, scheduler, rollouts and training into one run. No algorithm lives here.

Invariant: whatever ends a run, every process it started is ended with its group, and the run directory holds everything
that was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from gyre_proxy.errors import ProxyError
from gyre_scheduler import Scheduler
from gyre_scheduler.actions import Action
from gyre_scheduler.errors import (
    EvaluatorNotFound,
    HarnessNotFound,
    RunAborted,
    SchedulerError,
    TemplateError,
)
from gyre_scheduler.evaluation import Evaluator
from gyre_scheduler.events import Event
from gyre_scheduler.guard import Guard
from gyre_scheduler.runtime import Runtime
from gyre_trainer.errors import TrainerError
from gyre_trainer.pool import CellPool
from gyre_trajtree import TrajtreeError

from gyre_cli.admission import Admission, History
from gyre_cli.cellroles import CellRoles
from gyre_cli.config import RunConfig
from gyre_cli.errors import CommandError, MisuseError, RunFailed
from gyre_cli.preflight import Plan, prepare
from gyre_cli.progress import Progress
from gyre_cli.proxy import ProxyProcess
from gyre_cli.record import RunRecord
from gyre_cli.report import write_report
from gyre_cli.rollouts import Rollouts
from gyre_cli.routes import Routes
from gyre_cli.summary import summarise
from gyre_cli.training import Training


def run_training(config: RunConfig) -> dict[str, Any]:
    """Run to the end and return the summary. Raises MisuseError before anything starts, RunFailed afterwards."""
    plan = prepare(config)
    _log_to(plan.run_dir / "logs/driver.log")
    try:
        with Progress(plan.schedule.steps) as progress:
            progress.say(f"run directory {plan.run_dir}")
            summary = asyncio.run(_until_signal(_train(plan, progress)))
        partial = plan.run_dir / "summary.json.partial"
        partial.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        partial.rename(plan.run_dir / "summary.json")
        write_report(plan.run_dir)
    except (HarnessNotFound, EvaluatorNotFound, TemplateError) as error:
        raise MisuseError(str(error)) from None
    except (SchedulerError, TrainerError, TrajtreeError, ProxyError, OSError) as error:
        raise RunFailed(f"{error}; what was recorded is in {plan.run_dir}") from error
    return summary


def _log_to(path: Path) -> None:
    """Warnings and the tracebacks of single failures go to a file; the screen belongs to the progress."""
    logging.raiseExceptions = False  # a full disk is reported by the run log's own writer
    logging.basicConfig(filename=path, level=logging.WARNING, force=True)


async def _until_signal(work) -> dict[str, Any]:
    """Run `work`; SIGINT and SIGTERM cancel it, so that it ends its processes first."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(sign: signal.Signals) -> None:
        received.append(sign)
        task.cancel()

    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, stop, sign)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(f"{received[0].name} received; what was recorded is kept") from None


class Interrupted(CommandError):
    """The user, or a supervisor, asked the run to end."""

    exit_code = 130


async def _train(plan: Plan, progress: Progress) -> dict[str, Any]:
    config, started = plan.config, time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        record = RunRecord(plan.run_dir, {"seed": config.seed, "policy": plan.schedule.policy})
        stack.callback(record.close)
        progress.say(f"starting the proxy, an evaluator and {len(plan.schedule.cells)} cells")
        proxy_start = asyncio.create_task(
            ProxyProcess.start(_proxy_arguments(plan), plan.run_dir / "logs/proxy.log")
        )
        pool_start = asyncio.create_task(
            CellPool.start(
                len(plan.schedule.cells), plan.cells, plan.run_dir, plan.run_dir / "logs", _noting(record)
            )
        )
        for start in (proxy_start, pool_start):
            stack.push_async_callback(_end_of, start)
        guard = stack.enter_context(Guard())
        evaluator = await stack.enter_async_context(_evaluator(config, guard, record))
        proxy, pool = await proxy_start, await pool_start
        # They end by themselves when the driver dies, but a stopped process cannot.
        for group in (proxy.pid, *(cell.pid for cell in pool.cells.values())):
            stack.enter_context(guard.watching(group))
        progress.say(f"ready after {time.monotonic() - started:.0f} s; {plan.schedule.steps} steps to train")
        run = await stack.enter_async_context(Run(plan, progress, record, proxy, pool, evaluator, guard))
        await run.to_end()
        if not config.harness.keep_workspaces:
            shutil.rmtree(plan.run_dir / "executions", ignore_errors=True)
        return summarise(plan, run, time.monotonic() - started)


async def _end_of(start: asyncio.Task) -> None:
    """End what `start` started, or is still starting."""
    if not start.done():
        start.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        started = await start
        await (started.stop() if isinstance(started, ProxyProcess) else started.close())


def _evaluator(config: RunConfig, guard: Guard, record: RunRecord) -> Evaluator:
    task = config.task
    return Evaluator(
        task.evaluator,
        timeout_s=task.evaluation_timeout_s,
        attempts=task.evaluation_attempts,
        workers=task.evaluation_workers,
        guard=guard,
        late=partial(record.assessed, designated=False),
    )


def _noting(record: RunRecord):
    return lambda cell, notice: record.event("engine", cell=cell, notice=notice)


def _longest_silence(config: RunConfig) -> float:
    """Seconds without any event of the scheduler after which something must be wrong: a whole execution and more."""
    return config.execution_budget_s + 10 * config.cells.operation_timeout_s


def _proxy_arguments(plan: Plan) -> list[str]:
    proxy, sampling = plan.config.proxy, plan.config.sampling
    return [
        *("--tokenizer", str(plan.model), "--record", str(plan.run_dir / "run.jsonl"), "--strict"),
        *("--host", proxy.host, "--port", str(proxy.port), "--call-deadline", str(proxy.call_timeout_s)),
        *("--context-length", str(plan.config.cells.context_length)),
        *("--temperature", str(sampling.temperature), "--max-new-tokens", str(sampling.max_new_tokens)),
    ]


class Run:
    """The parts of one run in progress, wired together. Closing it ends its tasks; processes belong to the caller."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        record: RunRecord,
        proxy: ProxyProcess,
        pool: CellPool,
        evaluator: Evaluator,
        guard: Guard,
    ) -> None:
        config = plan.config
        self.progress, self.record = progress, record
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.scheduler = Scheduler(plan.schedule)
        self.routes = Routes(proxy, drain_s=config.proxy.call_timeout_s)
        self.history = History(record.path)
        self.rollouts = Rollouts(
            config=config,
            tasks=plan.tasks,
            harness=plan.harness,
            evaluator=evaluator,
            proxy=proxy,
            routes=self.routes,
            record=record,
            folder=plan.run_dir / "executions",
            guard=guard,
            fail=self._fail,
        )
        training = config.training
        self.admission = Admission(self.history, training.j_max, training.advantages, config.seed)
        self.roles = CellRoles(pool, self.routes, record, progress, self._post, self._fail)
        self.training = Training(
            pool=pool,
            admission=self.admission,
            rollouts=self.rollouts,
            routes=self.routes,
            record=record,
            progress=progress,
            token_budget=config.training.tokens_per_micro_step,
            checkpoints=plan.run_dir / "checkpoints",
            post=self._post,
            fail=self._fail,
        )
        self.runtime = Runtime(
            self.scheduler,
            self.rollouts,
            self.roles,
            self.training,
            self._log,
            stall_s=_longest_silence(config),
        )
        self._proxy = proxy

    async def __aenter__(self) -> Run:
        await self.roles.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.training.close()
        await self.roles.close()

    async def to_end(self) -> None:
        """Run until the scheduler finishes. Raises what made the run fail."""
        running = asyncio.create_task(self.runtime.run())
        watching = asyncio.create_task(self._watch_proxy())
        try:
            await asyncio.wait({running, watching, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._failure, watching):
                if ended.done():
                    ended.result()
            await running
        except RunAborted as reason:
            why = self.rollouts.last_unresolved
            raise RunFailed(f"{reason} (last: {why})" if why else str(reason)) from None
        finally:
            for task in (running, watching):
                task.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)

    async def _watch_proxy(self) -> None:
        raise RunFailed(f"the proxy ended: {await self._proxy.wait_ended()}")

    def _post(self, event: Event) -> None:
        self.runtime.post(event)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _log(self, event: Event, actions: list[Action]) -> None:
        """Record one turn of the scheduler, so that the run can be replayed through a fresh one."""
        self.record.event(
            "schedule",
            event=event.to_dict(),
            actions=[action.to_dict() for action in actions],
            waterlevel=self.scheduler.waterlevel,
        )
        self.progress.waterlevel = self.scheduler.waterlevel
        self.progress.executions = self.rollouts.launched
