"""Tiny random Qwen3 directories with the tokenizer of the proxy's tests: all three engines and a proxy can use them."""

from pathlib import Path

import torch
from proxy_tokenizer import build_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512
TURN_END = 2  # <|im_end|> of that tokenizer


def build_models(root: Path) -> dict[str, Path]:
    """Directories by the name of their weights."""
    return {name: _build(root / name, seed) for seed, name in enumerate(("1", "2"))}


def _build(directory: Path, seed: int) -> Path:
    build_tokenizer(directory)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=TURN_END,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # wide, so that distributions are uneven and greedy choices clear
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(directory)
    return directory
