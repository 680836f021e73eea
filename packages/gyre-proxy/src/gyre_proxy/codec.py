"""Owns the tokenizer directory: text to token ids and back, prompts from conversations.

Invariants: only template text yields control tokens; the same strings inside a user's or a tool's text, a tool's
schema or a call's arguments are encoded as plain text. Nothing is added to an encoded text (the template writes
its own BOS). The tokens of a suffix never depend on the tokens before it.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
from tokenizers import Tokenizer, decoders, normalizers

from gyre_proxy.conversation import Message, ToolCall, texts
from gyre_proxy.errors import ContextOverflow, TokenizerError
from gyre_proxy.template import ChatTemplate

# Added tokens that mark structure although their tokenizer does not call them special, such as <tool_call>.
_TAG = re.compile(r"</?[\w|]+>|<\|.*\|>")
_TAG_ROLES = frozenset(("system", "user", "tool"))


@dataclass(frozen=True, slots=True)
class _Files:
    tokenizer: Tokenizer
    template: str
    specials: dict[str, str]
    stop_ids: tuple[int, ...]
    context_length: int | None


class Codec:
    """Encodes conversations for one model.

    `mode` is "suffix" or "full"; `mode_reason` says why it is "full". `longest_token` is the most bytes of text
    that one token stands for.
    """

    def __init__(self, directory: str | Path, template_arguments: Mapping[str, object] | None = None) -> None:
        files = _read(Path(directory))
        content = (Path(directory) / "tokenizer.json").read_bytes()
        self.digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        """Identity of the tokenizer: ids of another mean something else."""
        self._tokenizer = files.tokenizer
        self.template = ChatTemplate(files.template, {**files.specials, **(template_arguments or {})})
        self.context_length = files.context_length
        self.longest_token = _longest_token(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        special = [t.content for t in added.values() if t.special and len(t.content) > 1]
        tags = [t.content for t in added.values() if _TAG.fullmatch(t.content)]
        self._special_pattern = _alternatives(special)
        self._tag_pattern = _alternatives({*special, *tags})
        self.turn_end, self.mode_reason = self._prove()
        self.mode = "full" if self.mode_reason else "suffix"
        ends = () if self.turn_end is None else (self.turn_end,)
        self.stop_ids = tuple(dict.fromkeys((*files.stop_ids, *ends)))
        if not self.stop_ids:
            raise TokenizerError(f"{directory}: no end-of-turn token; set eos_token in tokenizer_config.json")
        tail = self.template.render((Message("user", "q"),)).rstrip()
        self.opens_reasoning = tail.endswith("<think>")

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[dict] = (), limit: int | None = None
    ) -> list[int]:
        """Token ids of the whole prompt.

        Raises BadRequest when the template refuses the messages, ContextOverflow when the text cannot fit into
        `limit` tokens (one that might is encoded, and may still turn out longer).
        """
        mark = _free_mark(messages, tools)
        guarded = [_guard_value(tool, self._tag_pattern, mark) for tool in tools]
        text = self.template.render(self._guarded(messages, mark), guarded)
        self._check_length(text.replace(mark, ""), 0, limit)
        return self._encode(text, mark)

    def encode_suffix(
        self, messages: Sequence[Message], ended: bool, known: int = 0, limit: int | None = None
    ) -> list[int]:
        """Token ids between a recorded answer and the next one; only in mode "suffix".

        `ended` tells whether the recorded answer holds its own turn end; otherwise the suffix closes the
        turn. Raises ContextOverflow when the text cannot fit into `limit` tokens after the `known` ones.
        """
        mark = _free_mark(messages)
        text = self.template.suffix(self._guarded(messages, mark))
        self._check_length(text.replace(mark, ""), known, limit)
        ids = self._encode(text, mark)
        return ids[1:] if ended else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids without the stop token at their end; control tokens inside stay visible."""
        ids = list(ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _check_length(self, text: str, known: int, limit: int | None) -> None:
        """Refuse by length what cannot fit: encoding takes seconds and a gigabyte for ten megabytes."""
        if limit is None:
            return
        least = known + len(unicodedata.normalize("NFC", text).encode()) // self.longest_token
        if least > limit:
            raise ContextOverflow(least, limit, counted=False)

    def _encode(self, text: str, mark: str) -> list[int]:
        """Ids of the text without its marks. Only a batch is encoded without the interpreter's lock."""
        encodings = self._tokenizer.encode_batch_fast(text.split(mark), add_special_tokens=False)
        return [i for encoding in encodings for i in encoding.ids]

    def _guarded(self, messages: Sequence[Message], mark: str) -> Sequence[Message]:
        """Messages whose control-token strings are split by `mark`, so that no piece is a control token."""
        return [self._guard(message, mark) for message in messages]

    def _guard(self, message: Message, mark: str) -> Message:
        pattern = self._tag_pattern if message.role in _TAG_ROLES else self._special_pattern
        return replace(
            message,
            text=_guard_text(message.text, pattern, mark),
            reasoning=_guard_text(message.reasoning, pattern, mark),
            tool_calls=tuple(self._guard_call(call, mark) for call in message.tool_calls),
            call_id=_guard_text(message.call_id, self._tag_pattern, mark),
        )

    def _guard_call(self, call: ToolCall, mark: str) -> ToolCall:
        """Arguments are guarded as the values they stand for: JSON escapes can hide a control token's string."""
        value = call.parsed()
        guarded = _guard_value(value, self._tag_pattern, mark)
        if guarded == value:
            arguments = call.arguments
        else:
            plain = value == call.arguments  # no JSON
            arguments = guarded if plain else orjson.dumps(guarded).decode()
        return ToolCall(
            _guard_text(call.id, self._tag_pattern, mark),
            _guard_text(call.name, self._tag_pattern, mark),
            arguments,
        )

    def _prove(self) -> tuple[int | None, str | None]:
        """(turn-end id, None) when suffixes are stable, (None, reason) otherwise."""
        difference = self.template.prove()
        if difference is not None:
            return None, difference
        text = self.template.suffix((Message("user", "q"),))
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if ids and ids[0] in self._tokenizer.get_added_tokens_decoder():
            return ids[0], None
        return None, f"turns do not end with a token of their own but with {text[:20]!r}"


class Detokenizer:
    """Turns a growing list of ids into text, piece by piece; never splits a character."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._shown = 0
        self._base = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Text that the new ids complete. Cost is that of the new ids."""
        self._ids += [i for i in ids if i not in self._codec.stop_ids]
        before = self._codec.decode(self._ids[self._base : self._shown])
        after = self._codec.decode(self._ids[self._base :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._base, self._shown = self._shown, len(self._ids)
        return after[len(before) :]


def _alternatives(strings: Sequence[str] | set[str]) -> re.Pattern | None:
    ordered = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _guard_text(text: str, pattern: re.Pattern | None, mark: str) -> str:
    if pattern is None or not text:
        return text
    return pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)


def _guard_value(value: object, pattern: re.Pattern | None, mark: str) -> object:
    """A JSON value with every string in it guarded, keys included."""
    if isinstance(value, str):
        return _guard_text(value, pattern, mark)
    if isinstance(value, list):
        return [_guard_value(inner, pattern, mark) for inner in value]
    if isinstance(value, dict):
        return {
            _guard_text(key, pattern, mark): _guard_value(inner, pattern, mark)
            for key, inner in value.items()
        }
    return value


def _free_mark(messages: Sequence[Message], tools: Sequence[dict] = ()) -> str:
    """A noncharacter that none of the texts holds."""
    held = list(texts(messages, tools))
    for mark in map(chr, range(0xFDD2, 0xFDF0)):
        if not any(mark in text for text in held):
            return mark
    return "\ufdd0"


def _read(directory: Path) -> _Files:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{directory}: no tokenizer.json; give a Hugging Face tokenizer directory")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _json(directory / "tokenizer_config.json")
    specials = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name in ("bos_token", "eos_token", "pad_token", "unk_token") and value
    }
    return _Files(
        tokenizer,
        _template(directory, config),
        specials,
        _stop_ids(directory, tokenizer, specials),
        _context_length(directory, config),
    )


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


def _stop_ids(directory: Path, tokenizer: Tokenizer, specials: dict[str, str]) -> tuple[int, ...]:
    given = _json(directory / "generation_config.json").get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    eos = tokenizer.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    return tuple(dict.fromkeys([*ids, *([] if eos is None else [eos])]))


def _context_length(directory: Path, config: dict) -> int | None:
    """Tokens the model can attend to, None when the directory does not say."""
    length = _json(directory / "config.json").get("max_position_embeddings")
    if length is None:
        length = config.get("model_max_length")
    return int(length) if length is not None and length < 1e9 else None
