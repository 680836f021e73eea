"""Tiny random Qwen3 directories with the tokenizer of the proxy's tests: all three engines and a proxy can use them.

They sample plain text only, and never end a turn by themselves: a test says how long an answer is.
"""

import json
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
        plain = [id for text, id in _vocabulary(directory).items() if not text.startswith("<")]
        model.lm_head.weight *= 3
        model.lm_head.weight *= torch.isin(torch.arange(VOCABULARY), torch.tensor(plain)).unsqueeze(1)
    model.save_pretrained(directory)
    return directory


def _vocabulary(directory: Path) -> dict[str, int]:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    added = {token["content"] for token in tokenizer["added_tokens"]}
    return {text: id for text, id in tokenizer["model"]["vocab"].items() if text not in added}


class Reference:
    """Log-probs by transformers: the independent truth."""

    def __init__(self, directory: Path) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], output: list[int]) -> list[float]:
        """Of every output token, given all before it, at temperature 1."""
        logits = self._model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return (
            torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1).tolist()
        )
