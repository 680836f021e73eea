"""One live run over emulated cells: real runtime, proxy and harness processes, composed as `gyre train` composes them."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_cli.cellroles import CellRoles
from gyre_cli.config import load_config
from gyre_cli.errors import RunFailed
from gyre_cli.progress import Progress
from gyre_cli.proxy import ProxyProcess
from gyre_cli.quickstart import model_path
from gyre_cli.record import RunRecord
from gyre_cli.rollouts import Rollouts
from gyre_cli.routes import Routes
from gyre_scheduler import Scheduler, SchedulerSettings, emulation_harness
from gyre_scheduler.actions import Action, Launch, Publish, Step, Transition
from gyre_scheduler.dispatch import group_of
from gyre_scheduler.emulation import EmulatedPool, EmulatedTrainer, Times, emulated_task
from gyre_scheduler.emulation_engine import EmulatedEngine
from gyre_scheduler.evaluation import Evaluator
from gyre_scheduler.events import Assessed, Event, Published, RoleChanged, StepTrained, Terminated
from gyre_scheduler.executions import Harness
from gyre_scheduler.guard import Guard
from gyre_scheduler.replay import replay
from gyre_scheduler.runtime import Runtime
from gyre_scheduler.simulator import Costs
from gyre_scheduler.workloads import Workload
from gyre_trajtree import RecordedExecution, RunLogIndex
from tokenizers import Tokenizer

SPARE_S = 60.0
"""What an operation may take longer than planned before the run fails."""


@dataclass(frozen=True)
class Pace:
    """How a run's hours become seconds and tokens."""

    hour_s: float = 4.0
    token_s: float = 0.02
    call_s: float = 1.5
    """About how long a model call takes."""


@dataclass
class LiveRun:
    """What one run was. Times are seconds since it started."""

    settings: SchedulerSettings
    log: list[tuple[Event, list[Action]]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each entry of `log` was handled."""
    staleness_mean: float = 0.0
    executions: int = 0
    switches: int = 0
    continued: int = 0
    """Calls that were rerouted while they ran."""
    cpu_share: float = 0.0
    """Of all cores, by this process and those that it started."""
    faults: list[str] = field(default_factory=list)
    """What was lost, done twice or not as planned."""
    overheads_s: dict[str, float] = field(default_factory=dict)
    """Median time beyond what was planned, by operation."""

    @property
    def seconds(self) -> float:
        return self.times[-1]


async def run_live(
    settings: SchedulerSettings, workload: Workload, costs: Costs, seed: int, pace: Pace, folder: Path
) -> LiveRun:
    """Run to the end. `folder` must be empty; what was recorded stays there."""
    config = load_config(
        assignments=[
            f"harness.timeout_s={_longest_s(workload, seed, settings, pace) + SPARE_S}",
            "task.evaluator=gyre_scheduler.emulation:score",
        ]
    )
    planned: dict[int, list[float]] = {}
    before = _cpu_s()
    async with AsyncExitStack() as stack:
        record = RunRecord(folder, {"seed": seed, "policy": settings.policy})
        stack.callback(record.close)
        guard = stack.enter_context(Guard())
        proxy = await ProxyProcess.start(
            [
                *("--tokenizer", str(model_path()), "--record", str(record.path), "--strict"),
                *("--context-length", "1000000"),
            ],
            folder / "proxy.log",
        )
        stack.push_async_callback(proxy.stop)
        stack.enter_context(guard.watching(proxy.pid))
        evaluator = await stack.enter_async_context(Evaluator(config.task.evaluator, workers=1, guard=guard))
        token = Tokenizer.from_file(str(model_path() / "tokenizer.json")).token_to_id("!")
        engines = [EmulatedEngine(pace.token_s, answer_tokens=1 << 30, token=token) for _ in settings.cells]
        pool = await stack.enter_async_context(EmulatedPool(engines, Times.of(settings, costs, pace.hour_s)))
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> None:
            if not failure.done():
                failure.set_exception(error)

        def post(event: Event) -> None:
            runtime.post(event)

        def log(event: Event, actions: list[Action]) -> None:
            live.log.append((event, actions))
            live.times.append(time.monotonic() - started)

        routes = Routes(proxy, drain_s=SPARE_S)
        rollouts = Rollouts(
            config=config,
            tasks=_tasks(workload, seed, settings, pace, planned),
            harness=Harness(("{python}", "-I", "-S", emulation_harness.__file__)),
            evaluator=evaluator,
            proxy=proxy,
            routes=routes,
            record=record,
            folder=folder / "executions",
            guard=guard,
            fail=fail,
        )
        roles = CellRoles(pool, routes, record, Progress(settings.steps), post, fail)
        trainer = EmulatedTrainer(pool, post, routes.admit)
        stack.push_async_callback(trainer.close)
        live = LiveRun(settings)
        runtime = Runtime(
            Scheduler(settings), rollouts, roles, trainer, log, stall_s=config.harness.timeout_s + SPARE_S
        )
        await roles.start()
        started = time.monotonic()
        await _until_end(runtime, proxy, failure)
        live.switches, live.continued = roles.switches, routes.continued
    live.staleness_mean = float(runtime.scheduler.staleness_mean)
    live.executions = runtime.scheduler.ledger.launched
    live.cpu_share = (_cpu_s() - before) / live.seconds / _cores()
    live.overheads_s = _overheads(live, planned, pool.times)
    live.faults = _faults(live, record.path)
    return live


async def _until_end(runtime: Runtime, proxy: ProxyProcess, failure: asyncio.Future[None]) -> None:
    running = asyncio.create_task(runtime.run())
    ended = asyncio.create_task(proxy.wait_ended())
    try:
        await asyncio.wait({running, ended, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            failure.result()
        if ended.done():
            raise RunFailed(f"the proxy ended: {ended.result()}")
        await running
    finally:
        running.cancel()
        ended.cancel()
        await asyncio.gather(running, ended, return_exceptions=True)
        failure.cancel()


def _groups(settings: SchedulerSettings) -> int:
    """More groups than a run without failures dispatches."""
    return settings.queue_depth + settings.steps * settings.groups_per_step


def _longest_s(workload: Workload, seed: int, settings: SchedulerSettings, pace: Pace) -> float:
    groups = (workload.hours(seed, group, settings.group_size) for group in range(_groups(settings)))
    return max(map(max, groups)) * pace.hour_s


def _tasks(
    workload: Workload, seed: int, settings: SchedulerSettings, pace: Pace, planned: dict[int, list[float]]
) -> Iterator[dict[str, Any]]:
    """One task a group, in the order of dispatch; notes in `planned` what they should take."""
    for group in itertools.count():
        hours = workload.hours(seed, group, settings.group_size)
        planned[group] = [hour * pace.hour_s for hour in hours]
        yield emulated_task(group, planned[group], pace.token_s, pace.call_s)


# -- what a run's log says


def _overheads(live: LiveRun, planned: dict[int, list[float]], times: Times) -> dict[str, float]:
    """What each operation took beyond its plan; `assess`: from the end of a harness to its score."""
    begun: dict[tuple, float] = {}
    over: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    for now, (event, actions) in zip(live.times, live.log, strict=True):
        match event:
            case Terminated(execution, "completed"):
                member = int(execution.rpartition("-")[2])
                plan = planned[group_of(execution)][member]
                over["execution"].append(now - begun["execution", execution] - plan)
                begun["assess", execution] = now
            case Assessed(execution) if ("assess", execution) in begun:
                over["assess"].append(now - begun["assess", execution])
            case RoleChanged(cell, role):
                plan = times.to_training_s if role == "training" else times.to_rollout_s
                over[f"to_{role}"].append(now - begun[role, cell] - plan)
            case StepTrained(step):
                over["update"].append(now - begun["update", step] - times.update_s)
            case Published(version):
                over["publish"].append(now - begun["publish", version] - times.publish_s)
        for action in actions:
            match action:
                case Launch(execution):
                    begun["execution", execution] = now
                case Transition(cell, role):
                    begun[role, cell] = now
                case Step(step):
                    begun["update", step] = now
                case Publish(version):
                    begun["publish", version] = now
    return {name: statistics.median(values) for name, values in over.items() if values}


OPERATIONS = ("execution", "assess", "to_training", "to_rollout", "update", "publish")


def _faults(live: LiveRun, path: Path) -> list[str]:
    """Replay the run, and look for tokens that are missing or were sampled twice."""
    replay(live.settings, live.log)
    index = RunLogIndex(path)
    found = [fault for name in index.ids for fault in _execution_faults(name, index.load(name))]
    return found if len(index.ids) == live.executions else [*found, "an execution is missing in the run log"]


def _execution_faults(name: str, execution: RecordedExecution) -> list[str]:
    faults = [f"{name}: late call {call.id}" for call in execution.late]
    if execution.states[-1].termination == "cancelled":  # was under way at the run's end
        return faults
    if execution.reward != 1.0:
        faults.append(f"{name}: {execution.states[-1]} with reward {execution.reward}")
    for call in execution.calls:
        if call.finish != "length" or set(map(float, call.logprobs)) != {-1.0}:
            faults.append(
                f"{name}: call {call.id} ended with {call.finish} and {len(call.output_ids)} tokens"
            )
    return faults


def _cpu_s() -> float:
    """Processor time of this process and of its children that have ended."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
