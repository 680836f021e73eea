"""Settings of training and of cells: frozen dataclasses that travel to the cells. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gyre_trainer.errors import TrainerError


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
        if not 0 < self.clip_low <= 1 <= self.clip_high:
            raise TrainerError(
                f"clip bounds must satisfy 0 < low <= 1 <= high, got {self.clip_low}, {self.clip_high}"
            )
        if self.token_weight_cap <= 0 or self.temperature <= 0:
            raise TrainerError("token_weight_cap and temperature must be positive")


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The core's optimizer: Adam with decoupled weight decay, constant learning rate. Paper defaults."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-15
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """Bound of the global gradient norm after the 1/|E| scale; 0 turns clipping off."""


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
