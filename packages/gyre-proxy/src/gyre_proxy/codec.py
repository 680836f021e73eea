"""Owns the tokenizer directory: text to token ids and back, prompts from conversations.

Invariants: only template text yields control tokens; the same strings inside a user's or a tool's text, a tool's
schema or a call's arguments are encoded as plain text. Nothing is added to an encoded text (the template writes
its own BOS). The tokens of a suffix never depend on the tokens before it, but for the end of turn, which is not repeated.
"""

import copy
import hashlib
import re
import unicodedata
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from gyre_proxy.answers import closing_of, notices_of, reasoning_of, tools_of
from gyre_proxy.conversation import Message, ToolCall, strings, texts
from gyre_proxy.errors import BadRequest, ContextOverflow, TokenizerError
from gyre_proxy.parsers import TOOL_PARSERS, AnswerFormat, Types, tool_types
from gyre_proxy.proof import Proof, prove, roles_of
from gyre_proxy.template import ChatTemplate
from gyre_proxy.tokenizer_files import read_directory

_TAG = re.compile(r"<\S*[|｜_]\S*>|</?think>|\[/?[A-Z_]+\]")
_BRACKETED = re.compile(r"[<\[].*[>\]]")
_TAG_ROLES = frozenset(("system", "user", "tool"))

_OPENING_TOKENS = 16
"""Tokens at the end of a prompt that may open thinking."""

VARIANTS = 16
"""Sets of template arguments whose codec is kept."""


class Codec:
    """Encodes conversations for one model, and knows how its answers are written.

    `mode` is "suffix" when new messages are encoded alone, "full" when whole prompts are; `mode_reason` says why it is
    "full", or for which messages it is. `turn_end` is the id that ends an answer before a user message. `answers` is
    how answers are written. `notices` are lines for whoever starts the proxy. `longest_token` is the most bytes of
    text that one token stands for. Every id given out is below `vocabulary_size`.
    """

    def __init__(
        self,
        directory: str | Path,
        template_arguments: Mapping[str, object] | None = None,
        tool_parser: str = "auto",
    ) -> None:
        """`tool_parser`: a name of TOOL_PARSERS, or "auto" for the one that reads the template's own calls."""
        try:
            files = read_directory(Path(directory))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{directory}: its files are not as Hugging Face writes them: {error!r}"
            ) from error
        odd = [i for i in files.stop_ids if not 0 <= i < files.vocabulary_size]
        if odd:
            raise TokenizerError(f"{directory}: eos_token_id {odd[0]} is outside the vocabulary; correct it")
        content = (Path(directory) / "tokenizer.json").read_bytes()
        self.digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        """Identity of the tokenizer: ids of another mean something else."""
        self._tokenizer = files.tokenizer
        self.context_length = files.context_length
        self.vocabulary_size = files.vocabulary_size
        self.longest_token = files.longest_token
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls = frozenset(added)
        special = [t.content for t in added.values() if t.special and len(t.content) > 1]
        tags = [t.content for t in added.values() if _structural(t.content, files.template)]
        self._special_pattern = _alternatives(special)
        self._tag_pattern = _alternatives({*special, *tags})
        self._lead = _lead(self._tokenizer)
        self._open_ids = _open_ids(self._tokenizer)
        self._variants: OrderedDict[bytes, Codec] = OrderedDict()
        self._parser, self._files_stop_ids = tool_parser, files.stop_ids
        try:
            self._adopt(ChatTemplate(files.template, {**files.specials, **(template_arguments or {})}))
        except BadRequest as error:
            raise TokenizerError(
                f"{directory}: {error}; not even one user message can be rendered"
            ) from error
        if not self.stop_ids:
            raise TokenizerError(f"{directory}: no end-of-turn token; set eos_token in tokenizer_config.json")

    def _adopt(self, template: ChatTemplate) -> None:
        """Find out everything that depends on the template and its arguments."""
        self.template = template
        proof = prove(template)
        ends, problem = self._turn_ends(proof)
        self._roles = frozenset() if problem else proof.roles
        self.mode = "suffix" if self._roles else "full"
        self.mode_reason = problem or proof.reason
        self.turn_end = ends[0] if ends else None
        self.stop_ids = tuple(dict.fromkeys((*self._files_stop_ids, *ends)))
        reasoning, parser = reasoning_of(template), self._parser
        self._thinking_end = reasoning and self._tokenizer.token_to_id(reasoning.closing)
        opened = template.render((Message("user", "q"),)).rstrip()
        self.opens_reasoning = reasoning is not None and opened.endswith(reasoning.opening.rstrip())
        tools = tools_of(template) if parser == "auto" else TOOL_PARSERS[parser]
        self.answers = AnswerFormat(reasoning, self.opens_reasoning, tools)
        self.notices = tuple(notices_of(template, tools))

    def for_arguments(self, arguments: Mapping[str, object]) -> "Codec":
        """The codec of a request that brings template arguments of its own, which override the fixed ones.

        A new set of arguments costs a proof of its suffixes (tens to hundreds of milliseconds); the last VARIANTS sets are
        kept. Raises BadRequest for names that rendering sets itself, or when the template refuses the arguments.
        """
        known = self.known_for(arguments)
        if known is not None:
            return known
        if self._tag_pattern and any(self._tag_pattern.search(text) for text in strings(arguments)):
            raise BadRequest("field 'chat_template_kwargs' holds a control token of the model; remove it")
        variant = copy.copy(self)
        variant._variants = OrderedDict()
        variant._adopt(self.template.with_arguments(arguments))
        self._variants[_variant_key(arguments)] = variant
        while len(self._variants) > VARIANTS:
            self._variants.popitem(last=False)
        return variant

    def known_for(self, arguments: Mapping[str, object]) -> "Codec | None":
        """What `for_arguments` gives without any work, None when it has to find out."""
        if not arguments:
            return self
        key = _variant_key(arguments)
        variant = self._variants.get(key)
        if variant is not None:
            with suppress(KeyError):  # another thread may have dropped it by now
                self._variants.move_to_end(key)
        return variant

    @property
    def tool_parser(self) -> str | None:
        """Name of the format in which tool calls are looked for, None when they stay text."""
        return self.answers.tools.name if self.answers.tools else None

    def extends(self, messages: Sequence[Message]) -> bool:
        """Whether these messages may follow a recorded answer as `encode_suffix` encodes them."""
        return roles_of(messages) <= self._roles

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
        self._check_length("".join(_split(text, mark)), 0, limit)
        return self._encode(text, mark)

    def encode_suffix(
        self, messages: Sequence[Message], last: int, known: int = 0, limit: int | None = None
    ) -> list[int]:
        """Token ids between a recorded answer and the next one; only for messages that `extends` accepts.

        `last` is the answer's last id: when it is the end of the turn it is not repeated, otherwise (cut by length, ended by
        another token) the suffix ends the turn. Raises ContextOverflow when the text cannot fit into `limit` tokens after
        the `known` ones.
        """
        mark = _free_mark(messages)
        text = self.template.suffix(self._guarded(messages, mark))
        self._check_length("".join(_split(text, mark)), known, limit)
        ids = self._encode(text, mark)
        return ids[1:] if ids[0] == last else ids

    def answers_after(self, prompt: Sequence[int]) -> AnswerFormat:
        """How answers to a prompt are written: some templates open the thinking after some messages only."""
        if self.answers.reasoning is None or not len(prompt):
            return self.answers
        opened = (
            self.text(prompt[-_OPENING_TOKENS:]).rstrip().endswith(self.answers.reasoning.opening.rstrip())
        )
        return replace(self.answers, in_reasoning=opened)

    def encode_prefill(
        self, text: str, prompt: Sequence[int], known: int = 0, limit: int | None = None
    ) -> list[int]:
        """Token ids with which the client begins an answer to the prompt; its tags are plain text.

        Thinking that the prompt opened is closed first. Raises ContextOverflow as `encode_suffix` does.
        """
        self._check_length(text, known, limit)
        mark = _free_mark((Message("assistant", text),))
        return self._encode_begun(_guard_text(text, self._tag_pattern, mark), prompt, mark)

    def encode_forced_call(
        self, tool: str, prompt: Sequence[int], known: int = 0, limit: int | None = None
    ) -> list[int]:
        """Token ids with which a call of the tool ("" for any) begins, in the model's own words around a client's name."""
        self._check_length(tool, known, limit)
        mark = _free_mark((Message("assistant", tool),))
        return self._encode_begun(
            self.answers.tools.started(_guard_text(tool, self._tag_pattern, mark)), prompt, mark
        )

    def _encode_begun(self, guarded: str, prompt: Sequence[int], mark: str) -> list[int]:
        answers = self.answers_after(prompt)
        closing = closing_of(self.template, answers.reasoning) if answers.in_reasoning else ""
        return self._encode(mark + closing + guarded, mark)

    def thinking_tokens(self, ids: Sequence[int]) -> int:
        """How many ids of an answer that thinks are thinking, its end included; 0 where no token of its own ends it."""
        if self._thinking_end is None:
            return 0
        return ids.index(self._thinking_end) + 1 if self._thinking_end in ids else len(ids)

    def types_of(self, tools: Sequence[dict]) -> Types | None:
        """What `parsers.parse` wants to know of the tools on offer."""
        return tool_types(tools) if tools else None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids without the stop token at their end; control tokens inside stay visible."""
        return self.text(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, every control token visible."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def leaves_open(self, last: int) -> bool:
        """Whether ids that follow `last` may change the text up to it, or take it away (a stop token at the end)."""
        return last in self._open_ids or last in self.stop_ids

    def _check_length(self, text: str, known: int, limit: int | None) -> None:
        """Refuse by length what cannot fit: encoding takes seconds and a gigabyte for ten megabytes."""
        if limit is None:
            return
        least = known + len(unicodedata.normalize("NFC", text).encode()) // self.longest_token
        if least > limit:
            raise ContextOverflow(least, limit, counted=False)

    def _encode(self, text: str, mark: str) -> list[int]:
        """Ids of the text without its marks. Only a batch is encoded without the interpreter's lock."""
        first, *rest = _split(text, mark)
        if self._lead is None:
            encodings = self._tokenizer.encode_batch_fast([first, *rest], add_special_tokens=False)
            return [i for encoding in encodings for i in encoding.ids]
        pieces = [first, *(self._lead + piece for piece in rest if piece)]
        encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [*encodings[0].ids, *(i for encoding in encodings[1:] for i in encoding.ids[1:])]

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

    def _turn_ends(self, proof: Proof) -> tuple[list[int], str | None]:
        """(ids with which suffixes begin, the user message's first), or why suffixes cannot be used."""
        ends: dict[int, None] = {}
        for text in proof.suffixes:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if not ids or ids[0] not in self._controls:
                return [], f"turns do not end with a token of their own but with {text[:20]!r}"
            ends[ids[0]] = None
        return list(ends), None


def _variant_key(arguments: Mapping[str, object]) -> bytes:
    return orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)


class Detokenizer:
    """Turns a growing list of ids into text, piece by piece; never splits a character.

    Invariant: the pieces join to a beginning of `Codec.decode` of all the ids.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._shown = 0
        self._base = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Text that the new ids complete. Cost is that of the new ids."""
        self._ids += ids
        if not self._ids or self._codec.leaves_open(self._ids[-1]):
            return ""
        before = self._codec.text(self._ids[self._base : self._shown])
        after = self._codec.text(self._ids[self._base :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._base, self._shown = self._shown, len(self._ids)
        return after[len(before) :]


def _structural(token: str, template: str) -> bool:
    """Whether an added token marks structure although its tokenizer may not call it special, as with <tool_call>.

    By its looks, or because the template uses it. Others stand for ordinary text, such as <h1> or blank lines.
    """
    return bool(_TAG.fullmatch(token) or (_BRACKETED.fullmatch(token) and token in template))


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
    """A noncharacter that none of the texts holds, as it is or escaped."""
    held = list(texts(messages, tools))
    for mark in map(chr, range(0xFDD2, 0xFDF0)):
        if not any(mark in text or _escaped(mark) in text for text in held):
            return mark
    return "\ufdd0"


def _escaped(mark: str) -> str:
    """The mark as JSON writes it in ASCII, which some templates ask for."""
    return f"\\u{ord(mark):04x}"


def _split(text: str, mark: str) -> list[str]:
    """The text without its marks, split where they were."""
    return [piece for part in text.split(mark) for piece in part.split(_escaped(mark))]


def _lead(tokenizer: Tokenizer) -> str | None:
    """A control token for tokenizers that put a space before a text unless one precedes it; None for others."""
    if (
        tokenizer.decode(tokenizer.encode("a", add_special_tokens=False).ids, skip_special_tokens=False)
        == "a"
    ):
        apart = [i for text in ("a", "b") for i in tokenizer.encode(text, add_special_tokens=False).ids]
        if tokenizer.decode(apart, skip_special_tokens=False) == "ab":
            return None
    added = tokenizer.get_added_tokens_decoder().values()
    return next((t.content for t in added if t.special and not (t.lstrip or t.rstrip or t.single_word)), None)


def _open_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of single bytes of a vocabulary that falls back to them: a run of them is text only as a whole."""
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)
