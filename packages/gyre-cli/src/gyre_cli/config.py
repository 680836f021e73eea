"""The configuration of a run: defaults, one TOML file, environment `GYRE_*`, and `--set a.b=c`, in rising priority.

Every default is the quickstart's: a tiny model, two cells, two CPU cores. The resolved configuration is written to the
run directory, so a run directory is self-contained and `gyre train --config RUN_DIR/config.toml` repeats it.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from gyre_scheduler.evaluation_settings import JudgeSettings, checked_url, is_url
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from gyre_cli.errors import MisuseError


def _printable(value: Any) -> Any:
    """The value itself; refuses text that no path, argument or file could hold."""
    if isinstance(value, str) and any(
        character == "\0" or "\ud800" <= character <= "\udfff" for character in value
    ):
        raise ValueError(f"{value[:40]!r} holds characters that cannot be written")
    if isinstance(value, dict):
        value = {_printable(key): _printable(item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_printable(item) for item in value]
    return value


class Section(BaseModel):
    """One table of the configuration file. Unknown keys are refused, so a typing error never passes silently."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, values: Any) -> Any:
        return _printable(values)


class ModelSection(Section):
    path: Path | None = None
    """Hugging Face directory of the policy; the built-in tiny model when absent."""


def _kind_of_evaluator(given: Any) -> str:
    """Which of the forms is meant, so that a fault is told of that one alone."""
    kinds = {list: "command", tuple: "command", dict: "judge", JudgeSettings: "judge"}
    return kinds.get(type(given), "text")


EvaluatorSetting = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("command")]
    | Annotated[JudgeSettings, Tag("judge")],
    Discriminator(_kind_of_evaluator),
]


class TaskSection(Section):
    source: str = "gyre_cli.quickstart.tasks:make_tasks"
    """`module:function` called with the seed, giving an endless iterator of task objects, or a JSON Lines file."""
    evaluator: EvaluatorSetting = "gyre_cli.quickstart.tasks:evaluate"
    """`module:function` of (workspace, task) giving a score in [0, 1]; a command that reads the task on standard input and
    whose last line is {"score": x}; the URL of a service that is posted the task; or a table of `JudgeSettings`."""
    evaluation_workers: int = Field(default=2, ge=1)
    """Evaluations that run at a time."""
    evaluation_attempts: int = Field(default=2, ge=1)
    evaluation_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds of one attempt; a model as judge needs minutes."""

    @field_validator("evaluator")
    @classmethod
    def _check_evaluator(cls, given: Any) -> Any:
        return checked_url(given) if isinstance(given, str) and is_url(given) else given


class HarnessSection(Section):
    preset: Literal["claude-code", "codex", "qwen-code", "opencode", "pi", "mini-swe-agent"] | None = None
    """A known harness: its command, environment and files. The quickstart's harness when absent."""
    program: list[str] = []
    """What starts the preset's harness, where that is not its usual name on PATH."""
    model: str = "gyre"
    """What the harness calls the model."""
    command: list[str] = []
    """Command of one execution, instead of the preset's or the quickstart's. It runs in its workspace. Placeholders:
    {python} {quickstart_harness} {workspace} {home} {base_url} {key} {model} {task_file} {prompt} {name}."""
    env: dict[Annotated[str, Field(pattern=r"^[^=\x00]+$")], str] = {}
    """Further environment of the harness, with the same placeholders. Nothing else of ours reaches it."""
    files: dict[str, str] = {}
    """Further files in the HOME of the harness: path below it and text, with the same placeholders."""
    prefix: list[str] = []
    """Command of a sandbox or container, put in front of the harness's; `{env}` in it names the environment to docker."""
    stop: list[str] = []
    """Command that runs when every process of the harness is gone, to end what is none: a container that a daemon runs."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a harness may run. What it leaves behind then is evaluated as always."""
    budget_s: float | None = Field(default=None, gt=0)
    """Seconds of one execution in all: launch, harness, evaluation, every retry. One evaluation's time is kept free of the
    harness. When absent, timeout_s and all attempts of task.evaluation_timeout_s."""
    keep_workspaces: bool = False

    @model_validator(mode="after")
    def _check_program(self) -> HarnessSection:
        if self.program and self.preset is None:
            raise ValueError("program starts a preset's harness; set preset, or command instead")
        return self


class ScheduleSection(Section):
    policy: Literal["elastic", "async", "colocate"] = "elastic"
    steps: int = Field(default=24, ge=1)
    group_size: int = Field(default=8, ge=2)
    """N: executions of one group."""
    oversample: int = Field(default=0, ge=0, le=1024)
    """Executions of a group beyond N. The first N with a reward train, the rest is cancelled: long ones train less often."""
    groups_per_step: int = Field(default=6, ge=1)
    """B: groups that one training step consumes."""
    phi: float | None = Field(default=None, ge=0)
    """Extra dispatch in units of B groups; None takes the policy's own (elastic 0.5, async 1.5, colocate 0)."""
    mu: int | None = Field(default=None, ge=1)
    """Training steps of one burst; None takes the policy's own (elastic 3, async 1, colocate 4)."""
    dispatch: Literal["boundary", "continuous"] = "boundary"
    """When groups follow those that were consumed: after each publication, or after each step at the version published by
    then."""
    concurrency: int = Field(default=24, ge=1)
    """Executions that one cell serves at once (c_j)."""
    training_cells: int = Field(default=1, ge=1)
    """Cells that always train under the async policy."""
    streaming: bool = True
    """Train on each group as soon as it is ready; otherwise on all groups of a burst once they are."""
    launch_order: Literal["fifo", "longest"] = "fifo"
    """Within a version: as dispatched, or first the tasks whose executions took longest so far."""


class CellSection(Section):
    count: int = Field(default=2, ge=1, le=1024)
    threads: int = Field(default=1, ge=1)
    """CPU threads of a training actor and of an engine."""
    max_running_requests: int = Field(default=32, ge=1)
    context_length: int = Field(default=1024, ge=16)
    start_timeout_s: float = Field(default=120.0, gt=0)
    operation_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that one operation of a cell may take, a micro-step or a change of role among them."""


class SamplingSection(Section):
    """No nucleus or top-k: the objective's ratios need log-probs of the whole distribution that was sampled from."""

    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=32, ge=1)


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainingSection(Section):
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, gt=0)
    clip_low: float = Field(default=0.95, gt=0, le=1)
    """Execution-level bound: with a negative advantage, s_i below it contributes nothing."""
    clip_high: float = Field(default=1.05, ge=1)
    """Execution-level bound: with a positive advantage, s_i above it contributes nothing."""
    token_weight_cap: float = Field(default=5.0, gt=0)
    advantages: Literal["mean", "mean_std"] = "mean"
    j_max: int = Field(default=5, ge=0)
    """Trajectories sampled of one execution at most (J_max); 0 for all."""
    tokens_per_micro_step: int = Field(default=4096, ge=1)


class ProxySection(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port."""
    call_timeout_s: float = Field(default=60.0, gt=0)


class RunConfig(BaseSettings):
    """All settings of `gyre train`."""

    model_config = SettingsConfigDict(
        env_prefix="GYRE_", env_nested_delimiter="__", extra="forbid", allow_inf_nan=False
    )

    seed: int = Field(default=0, ge=0, lt=2**63)
    run_dir: Path | None = None
    """Where the run writes; `runs/<time>-<policy>-seed<seed>` when absent."""
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    harness: HarnessSection = HarnessSection()
    schedule: ScheduleSection = ScheduleSection()
    cells: CellSection = CellSection()
    sampling: SamplingSection = SamplingSection()
    training: TrainingSection = TrainingSection()
    proxy: ProxySection = ProxySection()

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, values: Any) -> Any:
        return _printable(values)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls, init_settings, env_settings, dotenv_settings, file_secret_settings
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = _TomlSource(settings_cls)
        return init_settings, env_settings, file

    @model_validator(mode="after")
    def _check_budget(self) -> RunConfig:
        budget, evaluation = self.harness.budget_s, self.task.evaluation_timeout_s
        if budget is not None and budget <= evaluation:
            raise ValueError(
                f"harness.budget_s {budget:g} leaves the harness no time: task.evaluation_timeout_s {evaluation:g} of it "
                "is kept for its evaluation"
            )
        return self

    @property
    def execution_budget_s(self) -> float:
        """Seconds that one execution may take in all."""
        evaluation = self.task.evaluation_timeout_s * self.task.evaluation_attempts
        return self.harness.budget_s or self.harness.timeout_s + evaluation

    def dump(self) -> dict[str, Any]:
        """The resolved configuration as plain JSON values, without None (TOML has no null) and the run's own folder."""
        return _without_none(json.loads(self.model_dump_json(exclude={"run_dir"})))


class _TomlSource(PydanticBaseSettingsSource):
    """The values of the TOML file of the load in progress (set by `load_config`)."""

    values: dict[str, Any] = {}

    def get_field_value(self, field, field_name):  # the whole mapping is given by __call__
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        return type(self).values


def load_config(
    path: Path | None = None, assignments: list[str] | None = None, **overrides: Any
) -> RunConfig:
    """Resolve a configuration.

    `assignments` are `a.b=c` strings whose right side is read as JSON where it is JSON, else as text. `overrides` are
    top-level values of dedicated options (None is no override). Raises MisuseError with one line for each fault.
    """
    explicit: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    for assignment in assignments or []:
        assign(explicit, assignment)
    _TomlSource.values = _read_toml(path) if path else {}
    try:
        return RunConfig(**explicit)
    except SettingsError:
        given = ", ".join(sorted(name for name in os.environ if name.startswith("GYRE_")))
        raise MisuseError(f"one of {given} is not JSON, which tables and lists have to be") from None
    except ValidationError as error:
        faults = "; ".join(
            ": ".join(filter(None, (".".join(map(str, e["loc"])), _said(e)))) for e in error.errors()
        )
        raise MisuseError(f"configuration refused: {faults}") from None
    finally:
        _TomlSource.values = {}


def _said(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return "there is no such setting; `gyre train --dry-run` lists all"
    return fault["msg"].removeprefix("Value error, ")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise MisuseError(f"configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise MisuseError(f"configuration file {path} cannot be read: {error}") from None


def assign(tree: dict[str, Any], assignment: str) -> None:
    """Put `a.b=value` into a tree of dictionaries; the value is read as JSON where it is JSON, else as text."""
    key, separator, text = assignment.partition("=")
    if not separator or not all(key.split(".")):
        raise MisuseError(f"--set takes a.b=value, not {assignment!r}")
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        value = text
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise MisuseError(f"--set {key}: {parent} is already set to a value")
    tree[leaf] = value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


NOT_SET = {
    "model": {"path": "a Hugging Face folder; the built-in tiny model where it is not set"},
    "harness": {
        "preset": "claude-code, codex, qwen-code, opencode, pi or mini-swe-agent; the quickstart's harness where not set",
        "budget_s": "seconds of a whole execution; timeout_s and all attempts of its evaluation where it is not set",
    },
    "schedule": {
        "phi": "extra dispatch; where it is not set elastic 0.5, async 1.5, colocate 0",
        "mu": "steps of a burst; where it is not set elastic 3, async 1, colocate 4",
    },
}
"""Settings without a value of their own, which a printed configuration mentions as comments."""


def to_toml(values: dict[str, Any]) -> str:
    """`RunConfig.dump()` as TOML text: top-level values first, then one table a section."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_toml_value(value)}" for key, value in table.items()]
            lines += [
                f"# {key} =    # {why}" for key, why in NOT_SET.get(name, {}).items() if key not in table
            ]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # TOML takes JSON's strings but for halves of characters and an unescaped DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
