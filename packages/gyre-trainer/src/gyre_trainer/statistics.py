"""What micro-steps measured: sums and extremes only, so any split adds up to the same. No torch here.

Executions with advantage 0 are counted but not computed: `targets` and `executions` hold them, every other
figure is about those that went through the model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class TrainStatistics:
    """Add two with `+`; the neutral element is `TrainStatistics()`."""

    tokens: int = 0
    """Tokens of the rows that went through the model, context included."""
    targets: int = 0
    """Targets trained, those of skipped executions included: their gradient is known to be 0."""
    rows: int = 0
    executions: int = 0
    """Executions with targets, skipped ones included."""
    skipped_targets: int = 0
    skipped_executions: int = 0
    """Executions whose advantage is exactly 0, for which neither forward nor backward was run."""
    micro_steps: int = 0
    loss: float = 0.0
    """Sum over executions; multiply by 1/|E| for the batch loss of appendix B."""
    clipped_high: int = 0
    """Executions masked because A_i > 0 and s_i > clip_high."""
    clipped_low: int = 0
    capped_targets: int = 0
    """Targets whose importance weight hit the cap."""
    ratio_sum: float = 0.0
    """Sum over executions of s_i."""
    ratio_min: float = float("inf")
    ratio_max: float = float("-inf")
    log_ratio_abs_sum: float = 0.0
    """Sum over targets of |log pi - log b|."""
    entropy_sum: float = 0.0
    """Sum over targets of the policy's entropy in nats."""
    same_version_targets: int = 0
    """Targets sampled by exactly the weights that were trained."""
    mismatch_max: float = 0.0
    """Largest |log pi - log b| over same-version targets: the difference between trainer and engine."""
    seconds: float = 0.0

    def __add__(self, other: TrainStatistics) -> TrainStatistics:
        merged = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "ratio_min":
                merged[field.name] = min(mine, theirs)
            elif field.name in ("ratio_max", "mismatch_max"):
                merged[field.name] = max(mine, theirs)
            else:
                merged[field.name] = mine + theirs
        return TrainStatistics(**merged)

    @property
    def clip_share(self) -> float:
        """Share of the computed executions that were masked."""
        return (self.clipped_high + self.clipped_low) / self._computed if self._computed else 0.0

    @property
    def ratio_mean(self) -> float:
        """Mean s_i of the computed executions."""
        return self.ratio_sum / self._computed if self._computed else 1.0

    @property
    def entropy(self) -> float:
        """Mean entropy of a computed target in nats."""
        targets = self.targets - self.skipped_targets
        return self.entropy_sum / targets if targets else 0.0

    @property
    def _computed(self) -> int:
        return self.executions - self.skipped_executions
