"""A Hugging Face folder of a dense Qwen3, read and checked without torch: the one reader of its config.json.

Owns what the JSON files and the headers of the weights must say. Invariant: what a function here returns can be
served and trained; everything else raises ModelError with one line that names the file. No torch here.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_trainer.errors import ModelError

INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 100 * 2**20
"""Longest JSON read, also as a header of weights; safetensors has the same bound."""
MAX_POSITIONS = 2**21
"""Most positions: the engine keeps a table of rotations, half a kilobyte each."""
MAX_SIZE = 2**31 - 1
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Qwen3Config:
    """The part of `config.json` (and of `generation_config.json`: `eos`) that training and inference need."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    eos: frozenset[int]

    @property
    def kv_width(self) -> int:
        """Numbers in one KV row (keys and values of one token in one layer)."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelFacts:
    """What a driver must know of a model that it does not load."""

    vocabulary: int
    """Number of token ids."""
    context: int
    """Most tokens of prompt and output together."""


def check(directory: Path) -> ModelFacts:
    """Read everything of a model folder but the weights' numbers. Raises ModelError.

    Checks the architecture, types and ranges, stop tokens, and that every weight is there in its shape.
    """
    config = read_config(directory)
    locate_weights(directory, config)
    return ModelFacts(config.vocab, config.max_positions)


def read_config(directory: Path) -> Qwen3Config:
    """Read and check a model folder's configuration. Raises ModelError with the reason."""
    path = Path(directory) / "config.json"
    raw = _read_object(path)
    kind = raw.get("model_type")
    if kind != "qwen3":
        raise ModelError(f"{path}: model_type is {kind!r:.60}; only dense 'qwen3' is supported")
    # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{path}: the rope parameters must be an object, not {rope!r:.60}")
    _refuse_variants(path, raw, rope)
    heads = _integer(path, raw, "num_attention_heads")
    hidden = _integer(path, raw, "hidden_size")
    vocab = _integer(path, raw, "vocab_size")
    config = Qwen3Config(
        vocab=vocab,
        hidden=hidden,
        layers=_integer(path, raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=_integer(path, raw, "num_key_value_heads", default=heads),
        head_dim=_integer(path, raw, "head_dim", default=hidden // heads),
        intermediate=_integer(path, raw, "intermediate_size"),
        eps=_positive(path, raw, "rms_norm_eps", 1e-6),
        rope_theta=_positive(path, rope, "rope_theta", _positive(path, raw, "rope_theta", 10000.0)),
        max_positions=_integer(path, raw, "max_position_embeddings", MAX_POSITIONS, 32768),
        tied=_boolean(path, raw, "tie_word_embeddings"),
        eos=_eos_ids(path, raw, vocab),
    )
    if config.heads % config.kv_heads:
        raise ModelError(f"{path}: {heads} attention heads cannot share {config.kv_heads} key-value heads")
    if config.head_dim % 2 or not config.head_dim:
        raise ModelError(f"{path}: head_dim is {config.head_dim}, but rotary positions need an even number")
    return config


def locate_weights(directory: Path, config: Qwen3Config) -> dict[str, Path]:
    """The safetensors file that holds each weight of `config`. Raises ModelError if one is missing or misshapen.

    Reads the headers alone.
    """
    directory = Path(directory)
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in _weight_files(directory):
        found |= {name: (file, shape) for name, shape in _read_header(file).items()}
    located = {}
    for name, shape in _expected(config):
        if name not in found:
            raise ModelError(
                f"{directory}: no tensor {name} in its *.safetensors, but config.json asks for it"
            )
        file, got = found[name]
        if got != shape:
            raise ModelError(f"{file}: {name} is {got}, config.json asks for {shape}")
        located[name] = file
    return located


def _refuse_variants(path: Path, raw: dict[str, Any], rope: dict[str, Any]) -> None:
    unsupported = {
        "rope scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "sliding window attention": raw.get("use_sliding_window", False),
        "attention bias": raw.get("attention_bias", False),
        f"activation {raw.get('hidden_act')!r:.60}": raw.get("hidden_act", "silu") != "silu",
    }
    for what, present in unsupported.items():
        if present:
            raise ModelError(f"{path}: {what} is not supported, only plain dense Qwen3")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ModelError(f"{path} does not exist: give a Hugging Face model directory")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is too large to be a model's")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _integer(
    path: Path, raw: dict[str, Any], name: str, most: int = MAX_SIZE, default: int | None = None
) -> int:
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ModelError(f"{path} has no {name!r}")
    if type(value) is not int or not 1 <= value <= most:
        raise ModelError(f"{path}: {name} must be an integer from 1 to {most}, not {value!r:.60}")
    return value


def _positive(path: Path, raw: dict[str, Any], name: str, default: float) -> float:
    value = default if raw.get(name) is None else raw[name]
    if type(value) not in (int, float) or not 0 < value < 1e18:
        raise ModelError(f"{path}: {name} must be a positive number, not {value!r:.60}")
    return float(value)


def _boolean(path: Path, raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if type(value) is not bool:
        raise ModelError(f"{path}: {name} must be true or false, not {value!r:.60}")
    return value


def _eos_ids(path: Path, config: dict[str, Any], vocab: int) -> frozenset[int]:
    """Those of generation_config.json, or else of config.json; a model may have none."""
    ids = _checked_eos(path, config, vocab)
    generation = path.with_name("generation_config.json")
    if os.path.lexists(generation):
        ids = _checked_eos(generation, _read_object(generation), vocab) or ids
    return ids


def _checked_eos(path: Path, raw: dict[str, Any], vocab: int) -> frozenset[int]:
    eos = raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab:
            raise ModelError(
                f"{path}: eos_token_id must lie in the vocabulary, 0 to {vocab - 1}, not {id!r:.60}"
            )
    return frozenset(ids)


def _weight_files(directory: Path) -> list[Path]:
    """The files that the index names, or else every *.safetensors."""
    index = directory / INDEX
    if not os.path.lexists(index):
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{directory}: no *.safetensors file")
        return files
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index}: weight_map must name a file for each weight")
    for name in names.values():
        if Path(name).name != name:
            raise ModelError(f"{index}: {name!r:.60} is not the name of a file in this folder")
    return [directory / name for name in sorted(set(names.values()))]


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a safetensors file, whose bytes are all there."""
    try:
        if not file.is_file():
            raise ModelError(f"{file} does not exist, but the folder's index names it")
        size = file.stat().st_size
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size - 8, MAX_JSON_BYTES):
                raise ModelError(f"{file} cannot be read: it is cut off, or no safetensors file")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        shapes = {name: _tensor_shape(file, name, about, size - 8 - length) for name, about in header.items()}
    except (OSError, struct.error, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}") from None
    return shapes


def _tensor_shape(file: Path, name: str, about: dict[str, Any], held: int) -> tuple[int, ...]:
    """`held`: bytes of numbers in the file. What is not of the format raises one of Python's errors."""
    if about["dtype"] not in ELEMENT_BYTES:
        raise ModelError(f"{file}: {name} has numbers of {about['dtype']!r:.20}, which are not supported")
    shape, (begin, end) = tuple(about["shape"]), about["data_offsets"]
    if set(map(type, (*shape, begin, end))) - {int} or min((*shape, begin)) < 0:
        raise ValueError(f"{name} has a shape or place that is not of whole numbers")
    if end - begin != math.prod(shape) * ELEMENT_BYTES[about["dtype"]] or end > held:
        raise ModelError(f"{file} cannot be read: it is cut off, the numbers of {name} are not all there")
    return shape


def _expected(c: Qwen3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight's name and shape."""
    yield "model.embed_tokens.weight", (c.vocab, c.hidden)
    if not c.tied:
        yield "lm_head.weight", (c.vocab, c.hidden)
    yield "model.norm.weight", (c.hidden,)
    for index in range(c.layers):
        prefix = f"model.layers.{index}."
        for part, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            yield f"{prefix}self_attn.{part}_proj.weight", (heads * c.head_dim, c.hidden)
        for part in "qk":
            yield f"{prefix}self_attn.{part}_norm.weight", (c.head_dim,)
        yield prefix + "self_attn.o_proj.weight", (c.hidden, c.heads * c.head_dim)
        for part in ("gate", "up"):
            yield f"{prefix}mlp.{part}_proj.weight", (c.intermediate, c.hidden)
        yield prefix + "mlp.down_proj.weight", (c.hidden, c.intermediate)
        for part in ("input", "post_attention"):
            yield f"{prefix}{part}_layernorm.weight", (c.hidden,)
