"""The training actor of one cell: a Megatron model, its summed gradients, and on the core the optimizer.

Invariant: between `zero_gradients` and `optimizer_step` the weights are fixed and the gradient buffer holds
the plain fp32 SUM over the micro-steps trained here. Nothing is averaged: the one global scale 1/|E| comes
with the step. Only the core steps; satellites take its weights by transfer or broadcast. A cell is one rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gyre_trainer import cpu
from gyre_trainer import model as qwen3
from gyre_trainer.errors import GradientError, RowError, TrainerError
from gyre_trainer.megatron_core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    PackedSeqParams,
    get_megatron_optimizer,
    parallel_state,
)
from gyre_trainer.objective import gspo_loss
from gyre_trainer.rows import MicroStep, TrainingRow
from gyre_trainer.settings import AdamSettings, ObjectiveSettings
from gyre_trainer.statistics import TrainStatistics

LOOPBACK = "lo"
"""Linux's loopback interface."""
GROUP_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Settings by which newer releases of megatron-core recognise a parameter group; a saved state has those of its run."""


class TrainingActor:
    """One cell's model and gradients. `version` is the number of optimizer steps its weights have seen."""

    def __init__(
        self, directory: Path, version: int, objective: ObjectiveSettings, adam: AdamSettings | None = None
    ):
        """Load `directory`. `adam` is given on the core only. Raises ModelError."""
        self.version = version
        self.objective = objective
        self.device = _device()
        self._on_device = contextlib.nullcontext if self.device.type == "cuda" else cpu.CudaCallsOnCpu
        _own_world(self.device)
        self.shape = qwen3.read_shape(directory)
        with self._on_device():
            self.model = qwen3.build(self.shape).to(self.device)
            qwen3.load_weights(self.model, self.shape, directory)
            self._ddp = DistributedDataParallel(
                self.model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model
            )
            self._optimizer = get_megatron_optimizer(_optimizer_config(adam), [self._ddp]) if adam else None
        self._adam = adam
        self._set_rates()
        self.resident = True
        """Whether gradients, and on a satellite weights, are in memory."""
        storages = [gradient.untyped_storage() for gradient in self.gradients]
        self._gradient_storages = [(storage, storage.size()) for storage in storages]
        self._parameter_shapes = {name: value.shape for name, value in self.weights.items()}
        self._predictors: torch.Tensor | None = None
        self.model.output_layer.register_forward_pre_hook(self._only_predictors)

    # -- training
    def train(self, micro_step: MicroStep) -> TrainStatistics:
        """Forward and backward of one micro-step; its gradient is added to the sum.

        Raises RowError for a token outside the vocabulary, GradientError when the loss is not finite; the sum
        is then unchanged.
        """
        self._need_resident()
        started = time.perf_counter()
        rows, device = micro_step.rows, self.device
        log_pi, entropy = self._target_log_probs(rows)
        log_b = torch.from_numpy(np.concatenate([row.logprobs[row.targets] for row in rows])).to(device)
        index = {execution.id: i for i, execution in enumerate(micro_step.executions)}
        owner = np.repeat([index[row.execution] for row in rows], [row.target_count for row in rows])
        advantages = torch.tensor(
            [e.advantage for e in micro_step.executions], dtype=torch.float32, device=device
        )
        loss, statistics = gspo_loss(
            log_pi, log_b, torch.from_numpy(owner).to(device), advantages, self.objective
        )
        if not math.isfinite(statistics.loss):
            raise GradientError(
                f"micro-step {micro_step.id}: the loss of {', '.join(index)} is {statistics.loss}"
            )
        loss.backward()
        versions = np.concatenate([row.versions[row.targets] for row in rows])
        same = torch.from_numpy(versions == self.version).to(device)
        mismatch = (log_pi.detach() - log_b).abs()[same]
        return statistics + TrainStatistics(
            tokens=micro_step.token_count,
            rows=len(rows),
            entropy_sum=entropy,
            same_version_targets=int(same.sum()),
            mismatch_max=mismatch.max().item() if len(mismatch) else 0.0,
            seconds=time.perf_counter() - started,
        )

    @torch.no_grad()
    def log_probs(self, rows: list[TrainingRow]) -> torch.Tensor:
        """Log-probs [T] of all targets of the rows, in order, under the actor's weights."""
        return self._target_log_probs(rows)[0]

    # -- gradients and weights
    @property
    def gradients(self) -> list[torch.Tensor]:
        """The flat fp32 gradient buffers, in place."""
        self._need_resident()
        return [buffer.grad_data for buffer in self._ddp.buffers]

    def zero_gradients(self) -> None:
        self._ddp.zero_grad_buffer()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Megatron parameter name -> the parameter's own storage."""
        if self._optimizer is None:
            self._need_resident()
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def optimizer_step(self, scale: float) -> float:
        """Scale the gradient sum by 1/|E|, clip, update, and become the next version. Core only.

        Returns the gradient norm before clipping. Raises GradientError when it is not finite: weights,
        optimizer state, version and gradient sum are then as before.
        """
        squares = sum(buffer.double().square().sum().item() for buffer in self.gradients)
        if not math.isfinite(squares):
            raise GradientError(f"step {self.version + 1}: the gradient is not finite; no update was made")
        for buffer in self.gradients:
            buffer.mul_(scale)
        with self._on_device():
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.zero_gradients()
        self.version += 1
        return math.sqrt(squares) * scale

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights as host arrays; on CPU they share memory with the weights."""
        return {name: value.cpu().numpy() for name, value in self.weights.items()}

    @torch.no_grad()
    def take(self, arrays: dict[str, np.ndarray], version: int) -> None:
        """Become `version` with the weights in `arrays`, which came from `arrays()`."""
        if self.device.type != "cpu":
            for name, value in self.weights.items():
                value.copy_(torch.from_numpy(arrays[name]))
        self.version = version

    # -- memory
    def offload(self) -> None:
        """Free the gradient buffer, and on a satellite the weights, which it pulls again when it joins."""
        for storage, _ in self._gradient_storages:
            storage.resize_(0)
        if self._optimizer is None:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.new_empty(0)
        self.resident = False

    def onload(self) -> None:
        """Take the memory back. Gradients, and on a satellite the weights, hold garbage until set."""
        for storage, size in self._gradient_storages:
            storage.resize_(size)
        if self._optimizer is None:
            for name, parameter in self.model.named_parameters():
                parameter.data = parameter.data.new_empty(self._parameter_shapes[name])
        self.resident = True

    def _need_resident(self) -> None:
        if not self.resident:
            raise TrainerError("the training actor is offloaded: the cell is in rollout")

    # -- files
    def save_weights(self, path: Path) -> None:
        """Write the weights with Hugging Face names as one safetensors file."""
        qwen3.save_weights(self.model, self.shape, path)

    def optimizer_state(self) -> dict:
        """State dict of the core's Megatron optimizer."""
        return self._optimizer.state_dict()

    def load_optimizer_state(self, state: dict) -> None:
        """Continue from a saved state; rates are those of this run's settings."""
        groups = [
            {**saved, **{name: now[name] for name in GROUP_RATES if name in now}}
            for saved, now in zip(state["param_groups"], self._optimizer.param_groups, strict=True)
        ]
        with self._on_device():
            self._optimizer.load_state_dict({**state, "param_groups": groups})
        self._set_rates()

    def _set_rates(self) -> None:
        """Constant rates. Without megatron-core's scheduler nobody else applies its decay multipliers, which
        exempt norms from weight decay."""
        for group in self._optimizer.param_groups if self._optimizer else ():
            group["lr"], group["betas"], group["eps"] = self._adam.lr, self._adam.betas, self._adam.eps
            group["weight_decay"] = self._adam.weight_decay * group["wd_mult"]

    # -- forward
    def _target_log_probs(self, rows: list[TrainingRow]) -> tuple[torch.Tensor, float]:
        """Log-probs [T] of the rows' targets with gradient, and the summed entropy of their distributions."""
        ids = np.concatenate([row.ids for row in rows]).astype(np.int64)
        if ids.max() >= self.shape.vocabulary:
            raise RowError(f"token id {ids.max()} is outside the vocabulary of {self.shape.vocabulary}")
        positions = np.flatnonzero(np.concatenate([row.targets for row in rows]))
        self._predictors = torch.from_numpy(positions - 1).to(self.device)
        lengths = [len(row) for row in rows]
        bounds = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(self.device)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        tokens = torch.from_numpy(ids).to(self.device)
        logits = self._ddp(tokens[None], None, None, packed_seq_params=packed)[0]
        log_probs = torch.log_softmax(logits.float() / self.objective.temperature, -1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum().item()
        chosen = tokens[torch.from_numpy(positions).to(self.device)]
        return log_probs.gather(-1, chosen[:, None])[:, 0], entropy

    def _only_predictors(self, layer, args):
        """Logits only where a target is predicted: a vocabulary is too wide for every token of a context."""
        return (args[0].index_select(0, self._predictors),)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    cpu.install()
    return torch.device("cpu")


def _own_world(device: torch.device) -> None:
    """The cell's own Megatron world of one rank; groups across cells are raw and live in `membership`."""
    if not dist.is_initialized():
        # gloo listens also for a world of one, and by default wherever the host's name leads
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def _optimizer_config(adam: AdamSettings) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_eps=adam.eps,
        clip_grad=adam.clip_grad,
        params_dtype=torch.float32,
    )
