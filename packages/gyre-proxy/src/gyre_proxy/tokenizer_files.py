"""Owns reading a Hugging Face tokenizer directory.

Invariant: what is wrong with a directory is one line that names the file and says what to do.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, normalizers

from gyre_proxy.errors import TokenizerError

_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a directory says."""

    tokenizer: Tokenizer
    template: str
    specials: dict[str, str]
    """Variables of the template: bos_token, eos_token, ..."""
    stop_ids: tuple[int, ...]
    context_length: int | None
    """Tokens; None when the directory does not say."""
    vocabulary_size: int
    """One more than the largest id that an engine takes: the model's, or the tokenizer's where config.json does not say."""
    longest_token: int
    """The most bytes of text that one token stands for."""


def read_directory(directory: Path) -> TokenizerFiles:
    """Read tokenizer.json, the chat template and the configurations. Raises TokenizerError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{directory}: holds no tokenizer.json; give a Hugging Face tokenizer directory")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config, model = _json(directory / "tokenizer_config.json"), _json(directory / "config.json")
    given = {**_json(directory / "special_tokens_map.json"), **config}
    specials = {name: given[name] for name in _SPECIALS if given.get(name)}
    specials = {
        name: value.get("content", "") if isinstance(value, dict) else str(value)
        for name, value in specials.items()
    }
    return TokenizerFiles(
        tokenizer,
        _template(directory, config),
        specials,
        _stop_ids(directory, model, tokenizer, specials),
        _context_length(model, config),
        _vocabulary_size(directory, model, tokenizer),
        _longest_token(tokenizer),
    )


def _of_text(model: dict, name: str) -> object:
    """A field of config.json; models that also see keep it under text_config."""
    inner = model.get("text_config")
    return model[name] if name in model else inner.get(name) if isinstance(inner, dict) else None


def _vocabulary_size(directory: Path, model: dict, tokenizer: Tokenizer) -> int:
    """One more than the largest id an engine takes. Raises TokenizerError when the tokenizer has larger ones."""
    own = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    size = _of_text(model, "vocab_size")
    if not isinstance(size, int):
        return own
    if size < own:
        raise TokenizerError(
            f"{directory}: tokenizer.json has ids up to {own - 1} but vocab_size in config.json is {size}; "
            "take both files from the same model"
        )
    return size


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of NFC text. A byte-level vocabulary writes each byte as one character; normalizers may shorten."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        added = tokenizer.get_added_tokens_decoder().values()
        lengths = [*map(len, tokenizer.get_vocab()), *(len(token.content.encode()) for token in added)]
    else:
        lengths = [len(token.encode()) for token in tokenizer.get_vocab()]
    plain = tokenizer.normalizer is None or isinstance(tokenizer.normalizer, normalizers.NFC)
    return max(lengths) if plain else 3 * max(lengths)


def _json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _template(directory: Path, config: dict) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str) or not template:
        raise TokenizerError(
            f"{directory}: no chat template; add chat_template.jinja or give an instruct model's tokenizer"
        )
    return template


def _stop_ids(
    directory: Path, model: dict, tokenizer: Tokenizer, specials: dict[str, str]
) -> tuple[int, ...]:
    """Every id that ends an answer: generation_config.json's, config.json's, the tokenizer's eos_token."""
    given = [
        _json(directory / "generation_config.json").get("eos_token_id"),
        _of_text(model, "eos_token_id"),
        tokenizer.token_to_id(specials["eos_token"]) if "eos_token" in specials else None,
    ]
    ids = [i for value in given for i in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool)))


def _context_length(model: dict, config: dict) -> int | None:
    """Tokens the model can attend to, None when the directory does not say."""
    length = _of_text(model, "max_position_embeddings")
    if length is None:
        length = config.get("model_max_length")
    return int(length) if length is not None and length < 1e9 else None
