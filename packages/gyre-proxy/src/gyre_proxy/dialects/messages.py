"""Owns the Anthropic Messages protocol: request to Conversation, Answer to JSON or events."""

from collections.abc import Mapping

import orjson

from gyre_proxy.conversation import Answer, Conversation, Message, Request, ToolCall, merge_leading_system
from gyre_proxy.dialects.fields import (
    asked_sampling,
    check_known,
    flag_field,
    function_tool,
    json_text,
    limit_field,
    list_field,
    mapping,
    sse,
    stop_field,
    text_field,
)
from gyre_proxy.errors import BadRequest, ProxyError

TOOL_ID_PREFIX = "toolu_"

_KNOWN = {
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "max_tokens",
    "stream",
    "stop_sequences",
    "temperature",
    "top_p",
    "top_k",
    "metadata",
    "service_tier",
    "thinking",
    "output_config",
    "context_management",
    "cache_control",
    "betas",
}
# Claude Code's first system block changes during a run and says nothing to the model.
_BILLING = "x-anthropic-billing-header:"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def parse(body: Mapping) -> Request:
    """The request of a /v1/messages body. Raises BadRequest naming the field."""
    check_known(body, _KNOWN)
    if mapping(body.get("output_config") or {}, "output_config").get("format"):
        raise BadRequest("structured output (output_config.format) is not supported", "output_config")
    all_tools = [_tool(tool) for tool in list_field(body, "tools")]
    definitions = {tool["function"]["name"]: tool for tool, _ in all_tools}
    tools = tuple(tool for tool, deferred in all_tools if not deferred)
    if _tool_choice(body.get("tool_choice")) == "none":
        tools = ()
    messages = [Message("system", text)] if (text := _system(body.get("system"))) else []
    for item in list_field(body, "messages"):
        messages.extend(_messages(mapping(item, "every entry of 'messages'"), definitions))
    if not messages:
        raise BadRequest("field 'messages' must hold at least one message", "messages")
    if messages[-1].role == "assistant":
        raise BadRequest("a started answer (last message of role assistant) is not supported", "messages")
    return Request(
        conversation=Conversation(merge_leading_system(messages), tools),
        model=text_field(body, "model", "gyre"),
        stream=flag_field(body, "stream"),
        max_tokens=limit_field(body, "max_tokens"),
        stop=stop_field(body, "stop_sequences"),
        asked=asked_sampling(body),
    )


def _system(value: object) -> str:
    if value is None:
        return ""
    blocks = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(blocks, list):
        raise BadRequest("field 'system' must be a string or a list of text blocks", "system")
    texts = [_text(mapping(block, "every block of 'system'"), "system") for block in blocks]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def _text(block: Mapping, where: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise BadRequest(
            f"content of type {block.get('type')!r} in {where} is not supported: text only", where
        )
    return block["text"]


def _tool(value: object) -> tuple[dict, bool]:
    tool = mapping(value, "every entry of 'tools'")
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"server tool {tool.get('type')!r} is not supported; remove it", "tools")
    spec = function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))
    return spec, bool(tool.get("defer_loading"))


def _tool_choice(value: object) -> str:
    kind = "auto" if value is None else mapping(value, "tool_choice").get("type")
    if kind not in ("auto", "none"):
        raise BadRequest(f"tool_choice {kind!r} is not supported: only auto and none", "tool_choice")
    return kind


def _messages(item: Mapping, definitions: Mapping[str, dict]) -> list[Message]:
    role, content = item.get("role"), item.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise BadRequest("message content must be a string or a list of blocks", "messages")
    blocks = [mapping(block, "every content block") for block in blocks]
    if role == "assistant":
        return [_assistant(blocks)]
    if role == "system":
        return [Message("system", "\n".join(_text(block, "messages") for block in blocks))]
    if role == "user":
        return _user(blocks, definitions)
    raise BadRequest(f"message role {role!r} is not supported", "messages")


def _user(blocks: list[Mapping], definitions: Mapping[str, dict]) -> list[Message]:
    """Tool results become messages of role "tool"; runs of text between them become user messages."""
    out: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                out.append(Message("user", "\n".join(texts)))
                texts = []
            out.append(_tool_result(block, definitions))
        else:
            texts.append(_text(block, "messages"))
    if texts or not out:
        out.append(Message("user", "\n".join(texts)))
    return out


def _tool_result(block: Mapping, definitions: Mapping[str, dict]) -> Message:
    call_id, content = block.get("tool_use_id"), block.get("content") or ""
    if not isinstance(call_id, str):
        raise BadRequest("every tool_result needs a tool_use_id", "messages")
    if isinstance(content, str):
        return Message("tool", content, call_id=call_id)
    if not isinstance(content, list):
        raise BadRequest("tool_result content must be a string or a list of blocks", "messages")
    parts = []
    for block in content:
        block = mapping(block, "every tool_result block")
        if block.get("type") == "tool_reference":
            parts.append(_reference(block.get("tool_name"), definitions))
        else:
            parts.append(_text(block, "a tool_result"))
    return Message("tool", "\n".join(parts), call_id=call_id)


def _reference(name: object, definitions: Mapping[str, dict]) -> str:
    """A tool loaded in mid-conversation is shown where it was loaded.

    The tool list at the top stays as it was.
    """
    if not isinstance(name, str):
        raise BadRequest("every tool_reference needs a tool_name", "messages")
    return json_text(definitions[name]) if name in definitions else f"Tool {name} is now available."


def _assistant(blocks: list[Mapping]) -> Message:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            reasoning.append(text_field(block, "thinking", ""))
        elif kind == "tool_use":
            arguments = json_text(block.get("input") or {})
            calls.append(ToolCall(text_field(block, "id"), text_field(block, "name"), arguments))
        else:
            texts.append(_text(block, "an assistant message"))
    return Message("assistant", "".join(texts), "\n".join(reasoning), tuple(calls))


def _usage(prompt: int, completion: int) -> dict:
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion,
    }


def answer(request: Request, done: Answer) -> dict:
    """The body of a non-streaming answer."""
    content: list[dict] = []
    if done.reasoning:
        content.append({"type": "thinking", "thinking": done.reasoning, "signature": done.id})
    if done.text:
        content.append({"type": "text", "text": done.text})
    for call in done.tool_calls:
        content.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.loads(call.arguments)}
        )
    return _message(request, done.id, content, done)


def _ending(done: Answer | None) -> dict:
    if done is None:
        return {"stop_reason": None, "stop_sequence": None}
    if done.finish == "stop" and done.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_string}
    return {"stop_reason": _STOP_REASONS[done.finish], "stop_sequence": None}


def _message(request: Request, call_id: str, content: list, done: Answer | None) -> dict:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        **_ending(done),
        "usage": _usage(done.prompt_tokens, done.completion_tokens) if done else None,
    }


def count(tokens: int) -> dict:
    """The body of a count_tokens answer."""
    return {"input_tokens": tokens}


def error(failure: ProxyError) -> dict:
    """The error body; an over-long prompt reads "prompt is too long: N tokens > M maximum"."""
    kind = _ERROR_TYPES.get(failure.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(failure)}}


class Stream:
    """Writes one answer as Messages events; blocks are opened and closed as the kind of content changes."""

    def __init__(self, request: Request, call_id: str, created: int, prompt_tokens: int) -> None:
        self._request, self._id, self._prompt_tokens = request, call_id, prompt_tokens
        self._index = -1
        self._open: str | None = None

    def start(self) -> bytes:
        message = _message(self._request, self._id, [], None)
        message["usage"] = _usage(self._prompt_tokens, 0)
        return sse("message_start", {"type": "message_start", "message": message})

    def keepalive(self) -> bytes:
        return sse("ping", {"type": "ping"})

    def delta(self, kind: str, text: str) -> bytes:
        """More content: `kind` is "reasoning" or "text"."""
        out = b""
        if self._open != kind:
            block = (
                {"type": "text", "text": ""}
                if kind == "text"
                else {"type": "thinking", "thinking": "", "signature": ""}
            )
            out = self._close() + self._begin(kind, block)
        part = (
            {"type": "text_delta", "text": text}
            if kind == "text"
            else {"type": "thinking_delta", "thinking": text}
        )
        return out + self._delta(part)

    def finish(self, done: Answer) -> bytes:
        """Everything after the last text: tool calls, stop reason, usage."""
        out = self._close()
        for call in done.tool_calls:
            out += self._begin("tool", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            out += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            out += self._close()
        end = {
            "type": "message_delta",
            "delta": _ending(done),
            "usage": _usage(done.prompt_tokens, done.completion_tokens),
        }
        return out + sse("message_delta", end) + sse("message_stop", {"type": "message_stop"})

    def _begin(self, kind: str, block: dict) -> bytes:
        self._index += 1
        self._open = kind
        event = {"type": "content_block_start", "index": self._index, "content_block": block}
        return sse("content_block_start", event)

    def _delta(self, part: dict) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": part}
        return sse("content_block_delta", event)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = (
            self._delta({"type": "signature_delta", "signature": self._id})
            if self._open == "reasoning"
            else b""
        )
        self._open = None
        return signature + sse("content_block_stop", {"type": "content_block_stop", "index": self._index})
