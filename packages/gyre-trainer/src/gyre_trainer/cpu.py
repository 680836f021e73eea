"""megatron-core on CPU: the few CUDA calls it makes unconditionally, answered by the CPU.

Invariant: nothing here is installed where a GPU is present. Two parts: `install` replaces module-level
functions of torch.cuda once for the process; `CudaCallsOnCpu` is a context in which `device="cuda"` means the
CPU. The context is thread-local and costs a little for every tensor operation, so only building and the
optimizer run inside it.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from gyre_trainer.errors import TrainerError


class CudaCallsOnCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU, and fp32 gradients pass megatron-core's checks."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class _Stream:
    """Stands for the CUDA stream of a machine without one: everything has happened already."""

    def wait_stream(self, stream) -> None: ...

    def wait_event(self, event) -> None: ...

    def synchronize(self) -> None: ...


def install() -> None:
    """Answer torch.cuda's device, stream, synchronize and random-state calls by the CPU. Idempotent.

    Raises TrainerError where a GPU is present: there megatron-core needs no help.
    """
    if torch.cuda.is_available():
        raise TrainerError("a GPU is present: megatron-core must not be redirected to the CPU")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *args, **kwargs: _Stream()
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
