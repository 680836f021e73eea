"""What SGLang refuses of a /generate body, in its three shapes of errors. Pure.

    MALFORMED  {"object": "error", "message", "type", "param", "code"}   no JSON, or a field of a wrong type
    CONTRACT   {"error": text}                                          a sampling field that is unknown or of a wrong type
    VALUE      {"error": {"message": text}}                             all types fit and a value does not

Only a refused VALUE reaches a client that asked for a stream as an event; the other two come before the stream.
"""

import math

import orjson

MALFORMED, CONTRACT, VALUE = "malformed", "contract", "value"

RESERVED = 6
"""Tokens of the context that no prompt may take: it must be shorter than the context less these."""

_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_WHOLE = ("max_new_tokens", "top_k", "min_new_tokens", "n", "sampling_seed")
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_LISTS = ("stop_token_ids",)
_OTHERS = (
    *(
        "stop",
        "stop_regex",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "stream_interval",
        "logit_bias",
    ),
    *("custom_params", "beam_width", "watermark", "choice"),
)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_RANGES = {
    "temperature": (lambda x: math.isfinite(x) and x >= 0, "a non-negative finite number"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "top_k": (lambda x: x == -1 or x >= 1, "-1 (disable) or at least 1"),
    "max_new_tokens": (lambda x: x >= 0, "at least 0"),
    "min_new_tokens": (lambda x: x >= 0, "in [0, max_new_tokens]"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "repetition_penalty": (lambda x: 0 < x <= 2, "in (0, 2]"),
}


class Refused(Exception):
    """A body that SGLang answers with status 400."""

    def __init__(self, shape: str, message: str) -> None:
        super().__init__(message)
        self.shape = shape

    def body(self) -> dict:
        if self.shape == MALFORMED:
            return {
                "object": "error",
                "message": str(self),
                "type": "Bad Request",
                "param": None,
                "code": 400,
            }
        return {"error": str(self) if self.shape == CONTRACT else {"message": str(self)}}

    def event(self) -> dict:
        """A refused VALUE in a stream."""
        detail = {"type": "invalid_request_error", "code": 400, "retryable": False}
        return {"error": {"message": str(self), **detail}}


def read(body: bytes) -> dict:
    """The JSON object in a body. Raises Refused."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(MALFORMED, f"JSON decode error: {error}") from None
    if not isinstance(value, dict):
        raise Refused(MALFORMED, "Input should be a dictionary")
    return value


def check_types(given: dict) -> None:
    """Raises Refused for the first field of a /generate body that has a wrong type."""
    for name, kind in (("rid", str), ("extra_key", str), ("cache_salt", str), ("sampling_params", dict)):
        if given.get(name) is not None and type(given[name]) is not kind:
            raise Refused(MALFORMED, f"{name}: Input should be a valid {kind.__name__}")
    for name, kind in (("return_logprob", bool), ("logprob_start_len", int)):
        if given.get(name) is not None and type(given[name]) is not kind:
            raise Refused(MALFORMED, f"{name}: Input should be a valid {kind.__name__}")
    ids = given.get("input_ids")
    if ids is not None and not isinstance(ids, list):
        raise Refused(MALFORMED, "input_ids: must be list or null")
    kinds = set(map(type, ids or ()))  # prompts are long
    if not all(issubclass(kind, int) for kind in kinds):
        raise Refused(MALFORMED, "input_ids: elements must be int or list")
    if bool in kinds:
        raise Refused(CONTRACT, "invalid type: boolean, expected an integer")
    if type(given.get("stream", False)) is not bool:
        raise Refused(CONTRACT, "stream: invalid type, expected a boolean")
    for name, value in (given.get("sampling_params") or {}).items():
        _check_sampling_type(name, value)


def _check_sampling_type(name: str, value: object) -> None:
    if name in _OTHERS or value is None:
        if name == "stop" and isinstance(value, list) and not all(isinstance(text, str) for text in value):
            raise Refused(CONTRACT, "stop: invalid type, expected a string")
        return
    if name in _NUMBERS:
        fits = type(value) in (int, float)
    elif name in _WHOLE:
        fits = type(value) is int
    elif name in _FLAGS:
        fits = type(value) is bool
    elif name in _LISTS:
        fits = isinstance(value, list) and all(type(token) is int for token in value)
    else:
        raise Refused(CONTRACT, f"unknown field `{name}`")
    if not fits:
        raise Refused(CONTRACT, f"invalid type for {name}: {value!r}")


def check_values(given: dict, context: int | None, vocabulary: int | None, grammar: bool) -> None:
    """Raises Refused for a body whose values no server of this context length and vocabulary serves (None: any). What
    would end a real server, a token outside its vocabulary or a logprob_start_len below -1, is refused too.
    `grammar`: whether it has a grammar backend.
    """
    ids, sampling = given.get("input_ids"), given.get("sampling_params") or {}
    if not grammar and any(sampling.get(name) for name in _GRAMMARS):
        raise Refused(
            VALUE, f"Grammar-based generation ({', '.join(_GRAMMARS)}) is not supported by this server."
        )
    if ids is None:
        raise Refused(VALUE, "Either text, input_ids or input_embeds should be provided.")
    if not ids:
        raise Refused(VALUE, "input_ids cannot be empty.")
    for name, (fits, range_) in _RANGES.items():
        if sampling.get(name) is not None and not fits(sampling[name]):
            raise Refused(VALUE, f"{name} must be {range_}, got {sampling[name]}.")
    new, least = sampling.get("max_new_tokens", 128), sampling.get("min_new_tokens") or 0
    if new is not None and least > new:
        raise Refused(VALUE, f"min_new_tokens must be in [0, max_new_tokens({new})], got {least}.")
    if sampling.get("stop"):
        raise Refused(VALUE, "stop is unavailable when skip_tokenizer_init=True")
    if not -1 <= (given.get("logprob_start_len") or -1) <= len(ids):
        raise Refused(VALUE, "logprob_start_len must be -1 or lie in the prompt")
    if vocabulary is not None and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise Refused(VALUE, "input_ids must lie in the vocabulary")
    if context is not None:
        _check_length(len(ids), new, context)


def _check_length(length: int, new: int | None, context: int) -> None:
    if length >= context:
        text = f"The input ({length} tokens) is longer than the model's context length ({context} tokens)."
        raise Refused(VALUE, text)
    if new is not None and length + new > context:
        text = f"Requested token count exceeds the model's maximum context length of {context} tokens."
        raise Refused(VALUE, text)
    if length >= context - RESERVED:
        longest = context - RESERVED
        raise Refused(
            VALUE, f"Input length ({length} tokens) exceeds the maximum allowed length ({longest} tokens)."
        )


def room(length: int, new: int | None, context: int | None) -> int | None:
    """How many tokens a request gets: SGLang keeps two positions of the context for itself."""
    if context is None:
        return new
    most = context - 2 - length
    return most if new is None else min(new, most)
