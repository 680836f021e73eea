"""Qwen3 (dense) for inference, straight from a Hugging Face directory.

Owns the weights, the forward pass and the memory of the KV cache; knows nothing of requests or sampling.
Invariant: a row of a batch sees exactly the KV rows `[0, position]` of its own slot, so the logits of a
token do not depend on what else is in the batch. Imports torch and safetensors only, so that a process
starts in seconds.

Layouts that make the forward pass short, both invisible outside:
- the halves of every query and key head are interleaved at load, so that RoPE is one complex product;
- one KV row of a token is `[key heads | value heads]`, so that a layer writes and gathers it once.
"""

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from gyre_trainer.errors import EngineError, ModelError
from gyre_trainer.model_folder import Qwen3Config, locate_weights, read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache:
    """KV rows of `slots` sequences of at most `context` tokens each: `pool[layer]` is `[slots * context,
    kv_width]`.

    On CPU the pages are touched only as sequences grow into them. Rows past a sequence's length hold stale
    but finite numbers: masked attention multiplies them by zero.
    """

    def __init__(
        self, config: Qwen3Config, slots: int, context: int, device: torch.device, dtype: torch.dtype
    ):
        self.slots, self.context = slots, context
        shape = (config.layers, slots * context, config.kv_width)
        size = math.prod(shape) * dtype.itemsize
        try:
            if device.type == "cpu":
                self.pool = torch.frombuffer(_lazy_zeros(size), dtype=dtype).view(shape)
            else:
                self.pool = torch.zeros(shape, device=device, dtype=dtype)
        except (OSError, torch.OutOfMemoryError):
            raise EngineError(
                f"no memory for a KV cache of {size / 1e9:.1f} GB: lower --max-running or --context-length"
            ) from None

    def layer(self, index: int) -> torch.Tensor:
        """The rows of one layer as `[slots, context, kv_width]`."""
        return self.pool[index].view(self.slots, self.context, -1)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` rows of slot `source` to slot `target` in every layer."""
        begin, end = source * self.context, target * self.context
        self.pool[:, end : end + length] = self.pool[:, begin : begin + length]


def _lazy_zeros(size: int) -> mmap.mmap:
    """Zero pages that take no memory until written. Small pages: a huge one would span several slots'
    beginnings, so that short sequences would commit nearly the whole pool.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


@dataclass(frozen=True)
class Segment:
    """Several new tokens of one sequence: `count` batch rows from `row` on, after `cached` KV rows of
    `slot`.
    """

    row: int
    slot: int
    cached: int
    count: int


@dataclass(frozen=True)
class Batch:
    """One forward pass: first one row for each decoding sequence, then the segments, all rows concatenated.

    `tokens`, `positions`, `rows` (flat KV row that the token writes): int64 `[T]`; `decode_slots`,
    `decode_lengths` (KV rows seen, own one included): int64 `[D]`; `wanted`: int64, batch rows whose logits
    are asked for.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    decode_slots: torch.Tensor
    decode_lengths: torch.Tensor
    span: int
    segments: list[Segment]
    wanted: torch.Tensor


@dataclass
class _Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qk_norm: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass
class Qwen3:
    """Weights of one model. `load` is the constructor; instances are never changed (an update makes a new
    one).
    """

    config: Qwen3Config
    device: torch.device
    dtype: torch.dtype
    embed: torch.Tensor
    layers: list[_Layer]
    norm: torch.Tensor
    head: torch.Tensor
    rotations: torch.Tensor

    @staticmethod
    def load(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> "Qwen3":
        """Load `directory` (config.json and *.safetensors). Raises ModelError for anything missing or
        misshapen.
        """
        directory = Path(directory)
        config = read_config(directory)
        weights = _Weights(locate_weights(directory, config), torch.device(device), dtype)
        embed = weights.take("model.embed_tokens.weight")
        head = embed if config.tied else weights.take("lm_head.weight")
        layers = [_load_layer(weights, config, f"model.layers.{i}.") for i in range(config.layers)]
        norm = weights.take("model.norm.weight")
        return Qwen3(config, weights.device, dtype, embed, layers, norm, head, _rotations(config).to(device))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every tensor held, under SGLang's fused names (query and key rows in the interleaved order)."""
        named = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if not self.config.tied:
            named["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            named |= {
                prefix + "input_layernorm.weight": layer.attention_norm,
                prefix + "self_attn.qkv_proj.weight": layer.qkv,
                prefix + "self_attn.qk_norm.weight": layer.qk_norm,
                prefix + "self_attn.o_proj.weight": layer.out,
                prefix + "post_attention_layernorm.weight": layer.mlp_norm,
                prefix + "mlp.gate_up_proj.weight": layer.gate_up,
                prefix + "mlp.down_proj.weight": layer.down,
            }
        return named

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Run `batch`, write its KV rows, return float32 logits `[len(batch.wanted), vocab]`."""
        c = self.config
        x = F.embedding(batch.tokens, self.embed)
        rotations = F.embedding(batch.positions, self.rotations).unsqueeze(1)
        masks = _Masks(batch, self.device, self.dtype)
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(x, (c.hidden,), layer.attention_norm, c.eps)
            x = x + self._attention(layer, normed, batch, rotations, masks, cache, index)
            hidden = F.linear(F.rms_norm(x, (c.hidden,), layer.mlp_norm, c.eps), layer.gate_up)
            gate, up = hidden.split(c.intermediate, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        x = F.rms_norm(x[batch.wanted], (c.hidden,), self.norm, c.eps)
        return F.linear(x, self.head).float()

    def _attention(self, layer, x, batch: Batch, rotations, masks: "_Masks", cache: KVCache, index: int):
        c = self.config
        total, turned = x.shape[0], c.heads + c.kv_heads
        qkv = F.linear(x, layer.qkv).view(total, turned + c.kv_heads, c.head_dim)
        qk, v = qkv[:, :turned], qkv[:, turned:]
        qk = F.rms_norm(qk, (c.head_dim,), None, c.eps) * layer.qk_norm
        pairs = torch.view_as_complex(qk.float().view(total, turned, c.head_dim // 2, 2))
        qk = torch.view_as_real(pairs * rotations).view(total, turned, c.head_dim).to(self.dtype)
        q = qk[:, : c.heads].view(total, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        rows = torch.cat((qk[:, c.heads :], v), dim=1).view(total, c.kv_width)
        cache.pool[index].index_copy_(0, batch.rows, rows)
        kv = cache.layer(index)
        mixed = []
        decoding = batch.decode_slots.shape[0]
        if decoding:
            # the query heads of a group share their keys, so they become the query positions of one kv head
            k, v = self._split(kv[:, : batch.span].index_select(0, batch.decode_slots))
            mixed.append(
                F.scaled_dot_product_attention(
                    q[:decoding], k.transpose(1, 2), v.transpose(1, 2), masks.decode
                )
            )
        for segment, mask in zip(batch.segments, masks.segments, strict=True):
            mixed.append(self._segment(q, kv, segment, mask))
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return F.linear(joined.reshape(total, -1), layer.out)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        return rows.view(*rows.shape[:-1], 2, c.kv_heads, c.head_dim).unbind(-3)

    def _segment(self, q, kv, segment: Segment, mask):
        end = segment.cached + segment.count
        k, v = (part.transpose(0, 1).unsqueeze(1) for part in self._split(kv[segment.slot, :end]))
        q = q[segment.row : segment.row + segment.count].permute(1, 2, 0, 3)
        shape = (-1, q.shape[1], -1, -1)
        causal = segment.cached == 0
        mixed = F.scaled_dot_product_attention(q, k.expand(shape), v.expand(shape), mask, is_causal=causal)
        return mixed.permute(2, 0, 1, 3)


class _Masks:
    """Additive attention masks of one batch, shared by its layers (None where none is needed)."""

    def __init__(self, batch: Batch, device: torch.device, dtype: torch.dtype):
        self.decode = None
        if batch.decode_slots.shape[0] > 1:
            beyond = torch.arange(batch.span, device=device) >= batch.decode_lengths.unsqueeze(1)
            mask = torch.zeros(beyond.shape, device=device, dtype=dtype)
            self.decode = mask.masked_fill_(beyond, float("-inf")).view(-1, 1, 1, batch.span)
        self.segments = [self._causal(s, device, dtype) for s in batch.segments]

    @staticmethod
    def _causal(segment: Segment, device, dtype) -> torch.Tensor | None:
        if segment.cached == 0:
            return None
        mask = torch.full(
            (segment.count, segment.cached + segment.count), float("-inf"), device=device, dtype=dtype
        )
        return mask.triu_(segment.cached + 1)


class _Weights:
    """The tensors of a directory's safetensors files by name."""

    def __init__(self, files: dict[str, Path], device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._files = files
        self._open = {file: _open(file) for file in set(files.values())}

    def take(self, name: str) -> torch.Tensor:
        file = self._files[name]
        tensor = self._open[file].get_tensor(name).to(self.device, self.dtype)
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{file}: {name} has numbers that are not finite")
        return tensor


def _open(file: Path):
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None


def _load_layer(weights: _Weights, c: Qwen3Config, prefix: str) -> _Layer:
    def attention(part: str) -> torch.Tensor:
        return weights.take(f"{prefix}self_attn.{part}_proj.weight")

    def mlp(part: str) -> torch.Tensor:
        return weights.take(f"{prefix}mlp.{part}_proj.weight")

    q, k = (_interleave(attention(part), c.head_dim) for part in "qk")
    norms = [
        _interleave(weights.take(f"{prefix}self_attn.{p}_norm.weight"), c.head_dim).expand(n, -1)
        for p, n in (("q", c.heads), ("k", c.kv_heads))
    ]
    return _Layer(
        attention_norm=weights.take(prefix + "input_layernorm.weight"),
        qkv=torch.cat([q, k, attention("v")]),
        qk_norm=torch.cat(norms),
        out=weights.take(prefix + "self_attn.o_proj.weight"),
        mlp_norm=weights.take(prefix + "post_attention_layernorm.weight"),
        gate_up=torch.cat([mlp("gate"), mlp("up")]),
        down=weights.take(prefix + "mlp.down_proj.weight"),
    )


def _interleave(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of every head from `[first half | second half]` to pairs `(i, i + head_dim / 2)`."""
    shape = tensor.shape
    return tensor.reshape(-1, 2, head_dim // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def _rotations(c: Qwen3Config) -> torch.Tensor:
    """RoPE as unit complex numbers, `[max_positions, head_dim / 2]`, angles in float32 as Hugging Face
    does.
    """
    inverse = 1.0 / (c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.int64).float() / c.head_dim))
    angles = torch.outer(torch.arange(c.max_positions).float(), inverse)
    return torch.polar(torch.ones_like(angles), angles)
