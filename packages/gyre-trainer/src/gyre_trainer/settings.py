"""Settings of training and of cells: frozen dataclasses that travel to the cells. No torch here."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from gyre_trainer.errors import SettingsError

LARGEST = sys.float_info.max
LONGEST_S = 1e9
"""Longest wait; the operating system's clocks take no more than a few times this."""
MOST_THREADS = 1024
MOST_RUNNING = 4096


def check_number(
    name: str, value: float, least: float, most: float = LARGEST, *, above: bool = False, whole: bool = False
) -> None:
    """Raise SettingsError unless `least <= value <= most`, with `above` even `least < value`. Nothing that is not
    finite fits.
    """
    fits = type(value) is not bool and isinstance(value, int if whole else (int, float))
    if fits and least <= value <= most and not (above and value == least):
        return
    kind = "a whole number" if whole else "a finite number"
    upper = "" if most == LARGEST else f" and at most {most:g}"
    raise SettingsError(
        f"{name} must be {kind} {'above' if above else 'of at least'} {least:g}{upper}, not {value!r}"
    )


def _check_waits(settings: object, *names: str) -> None:
    for name in names:
        check_number(name, getattr(settings, name), 0, LONGEST_S, above=True)


@dataclass(frozen=True, slots=True)
class ObjectiveSettings:
    """The adapted GSPO of paper appendix B. The paper's bounds suit its learning rate of 1e-6."""

    clip_low: float = 0.995
    """An execution with a negative advantage and a ratio s_i below this contributes nothing."""
    clip_high: float = 1.005
    """An execution with a positive advantage and a ratio s_i above this contributes nothing."""
    token_weight_cap: float = 5.0
    """Upper bound of the token importance weight w_t."""
    temperature: float = 1.0
    """Sampling temperature of the behaviour policy; the trainer's log-probs are computed at it too."""

    def __post_init__(self):
        check_number("clip_low", self.clip_low, 0, 1, above=True)
        check_number("clip_high", self.clip_high, 1)
        check_number("token_weight_cap", self.token_weight_cap, 0, above=True)
        check_number("temperature", self.temperature, 0, above=True)


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The core's optimizer: Adam with decoupled weight decay, constant learning rate. Paper defaults."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-15
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """Bound of the global gradient norm after the 1/|E| scale; 0 turns clipping off."""

    def __post_init__(self):
        check_number("lr", self.lr, 0, above=True)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise SettingsError(f"betas must be two numbers, not {self.betas!r}")
        for beta in self.betas:
            check_number("betas", beta, 0)
            if beta >= 1:
                raise SettingsError(f"betas must lie in [0, 1), not be {beta!r}")
        check_number("eps", self.eps, 0, above=True)
        check_number("weight_decay", self.weight_decay, 0)
        check_number("clip_grad", self.clip_grad, 0)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One cell's rollout engine and how long to wait for it (seconds)."""

    max_running: int = 32
    context_length: int = 1024
    threads: int = 1
    start_timeout_s: float = 120.0
    request_timeout_s: float = 60.0
    health_interval_s: float = 1.0
    """Time between two checks that the engine still answers."""
    module: str = "gyre_trainer.engine_server"
    """Python module started as the engine."""

    def __post_init__(self):
        check_number("max_running", self.max_running, 1, MOST_RUNNING, whole=True)
        check_number("context_length", self.context_length, 2, whole=True)
        check_number("threads", self.threads, 1, MOST_THREADS, whole=True)
        _check_waits(self, "start_timeout_s", "request_timeout_s", "health_interval_s")


@dataclass(frozen=True, slots=True)
class CellSettings:
    """What every cell of a run shares."""

    model: Path
    """Hugging Face directory of the policy at the start of the run."""
    threads: int = 1
    """CPU threads of the training actor."""
    version: int = 0
    """Weight version that `model` holds."""
    optimizer_state: Path | None = None
    """The core's optimizer state to continue from; `model` is then the checkpoint's directory."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    adam: AdamSettings = field(default_factory=AdamSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    start_timeout_s: float = 120.0
    """Seconds a cell may take from its start until model and engine are ready."""
    operation_timeout_s: float = 120.0
    """Seconds any later operation of a cell may go without progress; a cell that takes longer counts as dead."""
    collective_timeout_s: float = 30.0
    """Seconds a collective over a prefix of cells, or a weight transfer, may take."""

    def __post_init__(self):
        check_number("threads", self.threads, 1, MOST_THREADS, whole=True)
        check_number("version", self.version, 0, whole=True)
        _check_waits(self, "start_timeout_s", "operation_timeout_s", "collective_timeout_s")
