"""Owns the OpenAI Chat Completions protocol: request to Conversation, Answer to JSON or chunks."""

from collections.abc import Mapping

from gyre_proxy.conversation import Answer, Conversation, Message, Request, ToolCall, merge_leading_system
from gyre_proxy.dialects.fields import (
    arguments_text,
    asked_sampling,
    check_known,
    flag_field,
    json_text,
    limit_field,
    list_field,
    mapping,
    sse,
    stop_field,
    text_field,
)
from gyre_proxy.errors import BadRequest, ContextOverflow, ProxyError

TOOL_ID_PREFIX = "call_"

_KNOWN = {
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "user",
    "metadata",
    "store",
    "service_tier",
    "reasoning_effort",
    "verbosity",
    "prompt_cache_key",
    "safety_identifier",
    "response_format",
    "prompt_cache_retention",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    503: "server_error",
    500: "server_error",
}


def parse(body: Mapping) -> Request:
    """The request of a /v1/chat/completions body. Raises BadRequest naming the field."""
    check_known(body, _KNOWN)
    if body.get("n") not in (None, 1):
        raise BadRequest("n > 1 is not supported: send one request for each answer", "n")
    response_format = mapping(body.get("response_format") or {}, "response_format")
    if response_format.get("type", "text") != "text":
        raise BadRequest("structured output (response_format) is not supported", "response_format")
    tools = tuple(_tool(tool) for tool in list_field(body, "tools"))
    if tool_choice(body.get("tool_choice")) == "none":
        tools = ()
    messages = [_message(mapping(m, "every entry of 'messages'")) for m in list_field(body, "messages")]
    if not messages:
        raise BadRequest("field 'messages' must hold at least one message", "messages")
    options = mapping(body.get("stream_options") or {}, "stream_options")
    return Request(
        conversation=Conversation(merge_leading_system(messages), tools),
        model=text_field(body, "model", "gyre"),
        stream=flag_field(body, "stream"),
        max_tokens=limit_field(body, "max_completion_tokens", "max_tokens"),
        stop=stop_field(body, "stop"),
        asked=asked_sampling(body),
        include_usage=bool(options.get("include_usage")),
    )


def tool_choice(value: object) -> str:
    """ "auto" or "none"; anything that would force a call is refused (also used by the Responses dialect)."""
    if value in (None, "auto"):
        return "auto"
    if value == "none":
        return "none"
    raise BadRequest(f"tool_choice {value!r} is not supported: only auto and none", "tool_choice")


def _tool(value: object) -> dict:
    tool = mapping(value, "every entry of 'tools'")
    if tool.get("type") != "function":
        raise BadRequest(f"tool type {tool.get('type')!r} is not supported: only function", "tools")
    name = mapping(tool.get("function"), "tool.function").get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest("every tool needs a name", "tools")
    return tool


def content_text(content: object, where: str, joiner: str = "\n") -> str:
    """The text of a string or of a list of text parts (also used by the Responses dialect)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("message content must be a string or a list of parts", where)
    texts = []
    for part in content:
        part = mapping(part, "every content part")
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if part.get("type") not in ("text", "input_text", "output_text", "refusal") or not isinstance(
            text, str
        ):
            raise BadRequest(f"content of type {part.get('type')!r} is not supported: text only", where)
        texts.append(text)
    return joiner.join(texts)


def _message(item: Mapping) -> Message:
    role = item.get("role")
    if role in ("system", "developer"):
        return Message("system", content_text(item.get("content"), "messages"))
    if role == "user":
        return Message("user", content_text(item.get("content"), "messages"))
    if role == "tool":
        text = content_text(item.get("content"), "messages")
        return Message("tool", text, call_id=text_field(item, "tool_call_id"))
    if role == "assistant":
        reasoning = item.get("reasoning_content") or item.get("reasoning") or ""
        if not isinstance(reasoning, str):
            raise BadRequest("field 'reasoning_content' must be a string", "messages")
        calls = tuple(_tool_call(call) for call in list_field(item, "tool_calls"))
        return Message("assistant", content_text(item.get("content"), "messages", ""), reasoning, calls)
    raise BadRequest(f"message role {role!r} is not supported", "messages")


def _tool_call(value: object) -> ToolCall:
    call = mapping(value, "every tool call")
    function = mapping(call.get("function"), "tool call function")
    arguments = function.get("arguments", "")
    if isinstance(arguments, dict):
        arguments = json_text(arguments)
    if not isinstance(arguments, str):
        raise BadRequest("tool call arguments must be a string of JSON", "messages")
    return ToolCall(text_field(call, "id"), text_field(function, "name"), arguments_text(arguments))


def _usage(done: Answer) -> dict:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }


def _call(call: ToolCall) -> dict:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def answer(request: Request, done: Answer) -> dict:
    """The body of a non-streaming answer."""
    message: dict = {"role": "assistant", "content": done.text or None}
    if done.reasoning:
        message["reasoning_content"] = done.reasoning
    if done.tool_calls:
        message["tool_calls"] = [_call(call) for call in done.tool_calls]
    elif not done.text:
        message["content"] = ""
    return {
        "id": f"chatcmpl-{done.id}",
        "object": "chat.completion",
        "created": done.created,
        "model": request.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": done.finish}],
        "usage": _usage(done),
    }


def error(failure: ProxyError) -> dict:
    """The error body; an over-long prompt has the code "context_length_exceeded"."""
    kind = _ERROR_TYPES.get(failure.status, "invalid_request_error")
    code, message = None, str(failure)
    if isinstance(failure, ContextOverflow):
        code = "context_length_exceeded"
        message = (
            f"This model's maximum context length is {failure.limit} tokens. "
            f"However, your messages resulted in {failure.tokens} tokens ({message})."
        )
    param = getattr(failure, "param", None)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Stream:
    """Writes one answer as chat completion chunks."""

    def __init__(self, request: Request, call_id: str, created: int, prompt_tokens: int) -> None:
        self._request = request
        self._head = {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def keepalive(self) -> bytes:
        return self._chunk({})

    def delta(self, kind: str, text: str) -> bytes:
        """More content: `kind` is "reasoning" or "text"."""
        return self._chunk({"content" if kind == "text" else "reasoning_content": text})

    def finish(self, done: Answer) -> bytes:
        """Everything after the last text: tool calls, finish reason, usage."""
        out = b""
        for index, call in enumerate(done.tool_calls):
            out += self._chunk({"tool_calls": [{"index": index, **_call(call)}]})
        out += self._chunk({}, done.finish)
        if self._request.include_usage:
            out += sse(None, {**self._head, "choices": [], "usage": _usage(done)})
        return out + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse(None, {**self._head, "choices": [choice]})
