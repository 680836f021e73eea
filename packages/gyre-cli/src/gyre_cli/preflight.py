"""Everything that can be refused before a process is started: paths, commands, functions, settings.

A run that passes has a tokenizer with a chat template, a model, a harness command that exists, tasks, and a run directory
of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_proxy.codec import Codec
from gyre_proxy.errors import ProxyError
from gyre_scheduler import SchedulerSettings
from gyre_scheduler.errors import HarnessNotFound, SchedulerError
from gyre_scheduler.executions import Harness
from gyre_scheduler.harnesses import HARNESSES, KnownHarness, Model
from gyre_trainer import model_folder
from gyre_trainer.errors import TrainerError
from gyre_trainer.settings import AdamSettings, CellSettings, EngineSettings, ObjectiveSettings

from gyre_cli.config import RunConfig, to_toml
from gyre_cli.errors import MisuseError
from gyre_cli.quickstart import harness_path, model_path
from gyre_cli.sources import Task, load_tasks

POLICY_DISPATCH = {"elastic": (0.5, 3), "async": (1.5, 1), "colocate": (0.0, 4)}
"""(phi, mu) of each policy at a mean staleness of 1.5 (paper appendix A.3)."""

QUICKSTART = KnownHarness(("{python}", "-I", "-S", "{quickstart_harness}"), ())


@dataclass(frozen=True)
class Plan:
    """A checked configuration, in the terms of the packages that carry it out."""

    config: RunConfig
    run_dir: Path
    model: Path
    tasks: Iterator[Task]
    harness: Harness
    schedule: SchedulerSettings
    cells: CellSettings


def prepare(config: RunConfig) -> Plan:
    """Check a configuration and make its run directory. Raises MisuseError with one line."""
    model = _resolved(config.model.path or model_path(), "model.path")
    try:
        _check_model(model, config.cells.context_length)
        return Plan(
            config=config,
            model=model,
            tasks=load_tasks(config.task.source, config.seed),
            harness=_harness(config),
            schedule=_schedule(config),
            cells=_cells(config, model),
            run_dir=_run_dir(config),
        )
    except (ProxyError, SchedulerError, TrainerError) as error:
        raise MisuseError(str(error)) from None


def _resolved(path: Path, what: str) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise MisuseError(f"{what} {path} cannot be followed: {error}") from None


def _check_model(model: Path, context_length: int) -> None:
    """A model that an engine and an actor can load, with a tokenizer and chat template that belong to it."""
    if not model.is_dir():
        raise MisuseError(f"model.path {model} is not a folder; give a Hugging Face model directory")
    facts = model_folder.check(model)
    if context_length > facts.context:
        raise MisuseError(
            f"cells.context_length {context_length} is more than the {facts.context} tokens of the model in {model}"
        )
    Codec(model)


def _harness(config: RunConfig) -> Harness:
    """The preset's harness, or the quickstart's, with what the settings change of it."""
    given = config.harness
    preset = HARNESSES[given.preset] if given.preset else QUICKSTART
    options = {"command": tuple(given.command)} if given.command else {}
    if any("{quickstart_harness}" in part for part in given.command or preset.program):
        options["placeholders"] = {"quickstart_harness": str(harness_path())}
    harness = preset.harness(
        Model(given.model, config.cells.context_length, config.sampling.max_new_tokens),
        given.program,
        env=given.env,
        files=given.files,
        prefix=tuple(given.prefix),
        stop=tuple(given.stop),
        **options,
    )
    try:
        harness.check()
    except HarnessNotFound as error:
        where = (
            f"install {given.preset}, or set harness.program" if given.preset and not given.command else ""
        )
        raise MisuseError("; ".join(filter(None, (str(error), where)))) from None
    return harness


def _schedule(config: RunConfig) -> SchedulerSettings:
    schedule = config.schedule
    phi, mu = POLICY_DISPATCH[schedule.policy]
    return SchedulerSettings(
        policy=schedule.policy,
        group_size=schedule.group_size,
        oversample=schedule.oversample,
        groups_per_step=schedule.groups_per_step,
        phi=phi if schedule.phi is None else schedule.phi,
        mu=mu if schedule.mu is None else schedule.mu,
        dispatch=schedule.dispatch,
        steps=schedule.steps,
        cells=(schedule.concurrency,) * config.cells.count,
        training_cells=schedule.training_cells,
        streaming=schedule.streaming,
        launch_order=schedule.launch_order,
    )


def _cells(config: RunConfig, model: Path) -> CellSettings:
    training, cells = config.training, config.cells
    return CellSettings(
        model=model,
        threads=cells.threads,
        objective=ObjectiveSettings(
            training.clip_low, training.clip_high, training.token_weight_cap, config.sampling.temperature
        ),
        adam=AdamSettings(
            training.lr, training.betas, training.eps, training.weight_decay, training.clip_grad
        ),
        engine=EngineSettings(
            max_running=cells.max_running_requests, context_length=cells.context_length, threads=cells.threads
        ),
        start_timeout_s=cells.start_timeout_s,
        operation_timeout_s=cells.operation_timeout_s,
    )


def _run_dir(config: RunConfig) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.schedule.policy}-seed{config.seed}"
    run_dir = _resolved(config.run_dir or Path("runs") / name, "run directory")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if any(run_dir.iterdir()):
            raise MisuseError(f"{run_dir} already holds something; name a new or empty folder with --run-dir")
        (run_dir / "config.toml").write_text(to_toml(config.dump()))
        for part in ("logs", "executions"):
            (run_dir / part).mkdir()
    except OSError as error:
        raise MisuseError(f"run directory {run_dir} cannot be written: {error.strerror}") from None
    return run_dir
