"""The adapted GSPO objective of paper appendix B (formulas: token weights, execution-level clipping). Pure.

    rho_t = pi(y_t | c_t) / b_t          w_t = stop_gradient(min(rho_t, cap))
    s_i   = exp(mean over T_i of log rho_t)
    M_i   = 0 if (A_i > 0 and s_i > clip_high) or (A_i < 0 and s_i < clip_low), else 1
    loss  = - sum_i (1 / L_i) sum_{t in T_i} M_i w_t A_i log pi(y_t | c_t)

The result is a SUM over executions. The global scale 1/|E| is applied to the summed gradient, once, before
clipping; |E| counts every execution with a valid reward, also those without a target (L_i = 0), which have no
term here.
"""

from __future__ import annotations

import torch

from gyre_trainer.errors import RowError
from gyre_trainer.settings import ObjectiveSettings
from gyre_trainer.statistics import TrainStatistics


def gspo_loss(
    log_pi: torch.Tensor,
    log_b: torch.Tensor,
    owner: torch.Tensor,
    advantages: torch.Tensor,
    settings: ObjectiveSettings,
) -> tuple[torch.Tensor, TrainStatistics]:
    """Loss of whole executions, summed.

    log_pi: float32 [T], log-prob of each target under the trained weights, with gradient.
    log_b: float32 [T], behaviour log-prob recorded at sampling.
    owner: int64 [T], index of the execution in `advantages`; every target of an execution must be here.
    advantages: float32 [n], A_i.
    Returns the scalar loss and its statistics. Raises RowError when an execution has no target.
    """
    lengths = torch.bincount(owner, minlength=len(advantages))
    if bool((lengths == 0).any()):
        raise RowError("an execution without targets has no ratio and must not reach the objective")
    log_rho = log_pi.detach() - log_b
    weight = log_rho.exp().clamp(max=settings.token_weight_cap)
    mean_log_rho = torch.zeros(len(advantages), dtype=torch.float64).index_add_(
        0, owner.cpu(), log_rho.double().cpu()
    )
    ratio = (mean_log_rho / lengths.cpu()).exp()
    high = (advantages.cpu() > 0) & (ratio > settings.clip_high)
    low = (advantages.cpu() < 0) & (ratio < settings.clip_low)
    kept = (~(high | low)).to(advantages)
    coefficient = (advantages * kept / lengths)[owner] * weight
    loss = -(coefficient * log_pi).sum()
    return loss, TrainStatistics(
        targets=len(log_pi),
        executions=len(advantages),
        micro_steps=1,
        loss=loss.item(),
        clipped_high=int(high.sum()),
        clipped_low=int(low.sum()),
        capped_targets=int((log_rho.exp() > settings.token_weight_cap).sum()),
        ratio_sum=ratio.sum().item(),
        ratio_min=ratio.min().item(),
        ratio_max=ratio.max().item(),
        log_ratio_abs_sum=log_rho.abs().sum().item(),
    )
