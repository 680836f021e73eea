"""Qwen3 between a Hugging Face directory and megatron-core's GPTModel, exactly, both ways.

Owns the configuration, the layer spec and the weight names. Megatron fuses q, k, v (grouped by key-value
head) and gate, up; `to_megatron` and `to_hugging_face` are inverse of each other bit for bit. Local layer
norms, fp32 by default.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gyre_trainer.attention import PackedAttention
from gyre_trainer.errors import ModelError
from gyre_trainer.megatron_core import AttnBackend, GPTModel, TransformerConfig, get_gpt_layer_local_spec
from gyre_trainer.model_folder import Qwen3Config, locate_weights, read_config


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of config.json that the weights depend on."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    feed_forward: int
    vocabulary: int
    rope_base: float
    epsilon: float
    tied: bool


def read_shape(directory: Path) -> Shape:
    """Read config.json. Raises ModelError when it is missing or not a dense Qwen3."""
    return _shape(read_config(directory))


def _shape(config: Qwen3Config) -> Shape:
    return Shape(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        groups=config.kv_heads,
        head=config.head_dim,
        feed_forward=config.intermediate,
        vocabulary=config.vocab,
        rope_base=config.rope_theta,
        epsilon=config.eps,
        tied=config.tied,
    )


def build(shape: Shape) -> GPTModel:
    """An uninitialised fp32 GPTModel of one rank. megatron-core's parallel state must exist."""
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head,
        ffn_hidden_size=shape.feed_forward,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        layernorm_epsilon=shape.epsilon,
        perform_initialization=False,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        attention_backend=AttnBackend.local,
        # Gradients stay plain sums over tokens: paper appendix B has one global scale.
        calculate_per_token_loss=True,
    )
    spec = copy.deepcopy(get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"))
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=1,  # unused: positions are rotary
        position_embedding_type="rope",
        rotary_base=shape.rope_base,
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=False,
    )


_LAYER_NAMES = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_QKV = "self_attention.linear_qkv.weight"
_GATE_UP = "mlp.linear_fc1.weight"


def _split(name: str) -> tuple[str, str]:
    """Megatron parameter name -> (Hugging Face layer prefix or "", rest)."""
    if not name.startswith("decoder.layers."):
        return "", name
    _, _, index, rest = name.split(".", 3)
    return f"model.layers.{index}.", rest


def to_megatron(name: str, weights: dict[str, torch.Tensor], shape: Shape) -> torch.Tensor:
    """The value of one Megatron parameter from Hugging Face weights."""
    prefix, rest = _split(name)
    if rest == _QKV:
        grouped = [
            weights[f"{prefix}self_attn.{part}_proj.weight"].view(shape.groups, -1, shape.hidden)
            for part in "qkv"
        ]
        return torch.cat(grouped, 1).reshape(-1, shape.hidden)
    if rest == _GATE_UP:
        return torch.cat([weights[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    return weights[prefix + (_LAYER_NAMES[rest] if prefix else _NAMES[rest])]


def to_hugging_face(name: str, value: torch.Tensor, shape: Shape) -> dict[str, torch.Tensor]:
    """The Hugging Face weights that one Megatron parameter holds."""
    prefix, rest = _split(name)
    if rest == _QKV:
        per_group = shape.heads // shape.groups * shape.head
        parts = value.view(shape.groups, -1, shape.hidden).split([per_group, shape.head, shape.head], 1)
        return {
            f"{prefix}self_attn.{part}_proj.weight": w.reshape(-1, shape.hidden)
            for part, w in zip("qkv", parts, strict=True)
        }
    if rest == _GATE_UP:
        return dict(
            zip((f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"), value.chunk(2), strict=True)
        )
    return {prefix + (_LAYER_NAMES[rest] if prefix else _NAMES[rest]): value}


@torch.no_grad()
def load_weights(model: GPTModel, shape: Shape, directory: Path) -> None:
    """Fill the model from a Hugging Face directory. Raises ModelError on missing or misshapen weights."""
    config = read_config(directory)
    if _shape(config) != shape:
        raise ModelError(f"{directory}: config.json is another than the one that the model was built from")
    weights = _read_weights(locate_weights(directory, config))
    for name, parameter in model.named_parameters():
        parameter.copy_(to_megatron(name, weights, shape))


@torch.no_grad()
def save_weights(model: GPTModel, shape: Shape, path: Path) -> None:
    """Write model.safetensors (Hugging Face names) at `path`."""
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parts = to_hugging_face(name, parameter.detach(), shape)
        weights.update({key: value.contiguous().cpu() for key, value in parts.items()})
    save_file(weights, path, metadata={"format": "pt"})


def _read_weights(located: dict[str, Path]) -> dict[str, torch.Tensor]:
    weights = {}
    for file in set(located.values()):
        try:
            with safe_open(file, framework="pt") as handle:
                weights |= {name: handle.get_tensor(name) for name, home in located.items() if home == file}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
    return weights
