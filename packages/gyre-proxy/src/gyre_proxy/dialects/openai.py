"""Owns what the two OpenAI protocols have in common: fields, reasons to refuse, error bodies. Pure."""

from gyre_proxy.dialects.checks import (
    Check,
    flag,
    integer,
    mapping,
    name,
    number,
    refused_unless,
    strings_by_name,
    table,
    tagged,
    text,
)
from gyre_proxy.errors import ContextOverflow, ProxyError

TEXT_ONLY = "this model reads text only"
NO_HOSTED_TOOLS = "this proxy runs no hosted tools"
NO_LOGPROBS = "log-probs are recorded, not answered"

INERT: dict[str, Check] = {
    "metadata": strings_by_name,
    "store": flag,
    "user": text,
    "service_tier": text,
    "prompt_cache_key": text,
    "prompt_cache_retention": text,
    "safety_identifier": text,
}
"""Fields that concern neither the prompt nor the answer here."""

ANSWER: dict[str, Check] = {
    "stream": flag,
    "parallel_tool_calls": flag,
    "temperature": number,
    "top_p": number,
    "top_k": integer,
    "seed": integer,
    "presence_penalty": number,
    "frequency_penalty": number,
    "top_logprobs": refused_unless(0, NO_LOGPROBS),
}
"""Fields that say how the answer is made, with one meaning in both protocols."""

ASKED = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")

FORMAT_FIELDS: dict[str, Check] = {
    "name": name,
    "description": text,
    "schema": mapping,
    "strict": flag,
}
"""Fields of a JSON schema for the answer's text."""

FUNCTION_FIELDS: dict[str, Check] = {
    "name": name,
    "description": text,
    "parameters": mapping,
    "strict": flag,
}
"""Fields of a function on offer. `strict` is no promise here: arguments are sampled as the model writes them."""


def asked(body: dict, *more: str) -> dict:
    """What the client says of sampling and thinking."""
    found = {field: body[field] for field in (*ASKED, *more) if body.get(field) is not None}
    if body.get("parallel_tool_calls") is False:
        found["parallel_tool_calls"] = False
    return found


def text_format(json_schema: Check) -> Check:
    """The check of a format of the answer's text; the protocols place the schema differently."""
    plain = table({"type": text})
    return tagged({"text": plain, "json_object": plain, "json_schema": json_schema})


_ERROR_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    408: ("timeout_error", None),
    410: ("not_found_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def error(failure: ProxyError) -> dict:
    """The error body; an over-long prompt has the code "context_length_exceeded"."""
    default = "server_error" if failure.status >= 500 else "invalid_request_error"
    kind, code = _ERROR_TYPES.get(failure.status, (default, None))
    message = str(failure)
    if isinstance(failure, ContextOverflow):
        code = "context_length_exceeded"
        message = (
            f"This model's maximum context length is {failure.limit} tokens. "
            f"However, your messages resulted in {failure.tokens} tokens ({message})."
        )
    param = getattr(failure, "param", None)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
