"""The one place that imports megatron-core: quietly, and on CPU without the compiler.

megatron-core warns about every optional CUDA package it does without, and decorates its fused kernels with
torch.compile, which loads the whole compiler at import. None of these kernels is used on CPU, so there the
decorator does nothing, which saves seconds and about 80 MB in every cell.
"""

import warnings

import torch


def _uncompiled(function=None, **options):
    """Takes the place of torch.compile, with or without options."""
    return function if function is not None else _uncompiled


warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")

_compiler = torch.compile
if not torch.cuda.is_available():
    torch.compile = _uncompiled
try:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig
finally:
    torch.compile = _compiler

__all__ = [
    "AttnBackend",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "OptimizerConfig",
    "PackedSeqParams",
    "TransformerConfig",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "parallel_state",
]
