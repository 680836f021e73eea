"""Owns the Anthropic Messages protocol: Answer to JSON or events; its requests are read by `messages_request`."""

import orjson

from gyre_proxy.conversation import Answer, Request
from gyre_proxy.dialects.events import sse
from gyre_proxy.dialects.messages_request import Reader, parse
from gyre_proxy.errors import ProxyError

__all__ = ["TOOL_ID_PREFIX", "Reader", "Stream", "answer", "count", "error", "parse"]

TOOL_ID_PREFIX = "toolu_"

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _usage(prompt: int, reused: int, completion: int) -> dict:
    """The prompt is the sum of the three counts of input."""
    return {
        "input_tokens": prompt - reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": completion,
    }


def answer(request: Request, done: Answer) -> dict:
    """The body of a non-streaming answer."""
    content: list[dict] = []
    if done.reasoning:
        content.append({"type": "thinking", "thinking": done.reasoning, "signature": done.id})
    if text := done.text[done.prefilled :]:
        content.append({"type": "text", "text": text})
    for call in done.tool_calls:
        content.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.Fragment(call.arguments)}
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
        "usage": _usage(done.prompt_tokens, done.reused_tokens, done.completion_tokens) if done else None,
    }


def count(tokens: int) -> dict:
    """The body of a count_tokens answer."""
    return {"input_tokens": tokens}


def error(failure: ProxyError) -> dict:
    """The error body; an over-long prompt reads "prompt is too long: N tokens > M maximum"."""
    default = "api_error" if failure.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(failure.status, default)
    return {"type": "error", "error": {"type": kind, "message": str(failure)}}


class Stream:
    """Writes one answer as Messages events; blocks are opened and closed as the kind of content changes."""

    def __init__(
        self, request: Request, call_id: str, created: int, prompt_tokens: int, reused_tokens: int = 0
    ) -> None:
        self._request, self._id = request, call_id
        self._usage = _usage(prompt_tokens, reused_tokens, 0)
        self._index = -1
        self._open: str | None = None

    def start(self) -> bytes:
        message = _message(self._request, self._id, [], None)
        message["usage"] = self._usage
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
            "usage": _usage(done.prompt_tokens, done.reused_tokens, done.completion_tokens),
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
