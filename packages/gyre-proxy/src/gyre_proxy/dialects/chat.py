"""Owns the OpenAI Chat Completions protocol: Answer to JSON or chunks; its requests are read by `chat_request`."""

from gyre_proxy.conversation import Answer, Request, ToolCall
from gyre_proxy.dialects.chat_request import Reader, parse
from gyre_proxy.dialects.events import sse
from gyre_proxy.dialects.openai import error

__all__ = ["TOOL_ID_PREFIX", "Reader", "Stream", "answer", "error", "parse"]

TOOL_ID_PREFIX = "call_"


def _usage(done: Answer) -> dict:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": done.reasoning_tokens},
    }


def _call(call: ToolCall) -> dict:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def answer(request: Request, done: Answer) -> dict:
    """The body of a non-streaming answer."""
    message: dict = {"role": "assistant", "content": done.text or None, "refusal": None}
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


class Stream:
    """Writes one answer as chat completion chunks."""

    def __init__(
        self, request: Request, call_id: str, created: int, prompt_tokens: int, reused_tokens: int = 0
    ) -> None:
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
            head = _call(ToolCall(call.id, call.name, ""))
            out += self._chunk({"tool_calls": [{"index": index, **head}]})
            arguments = {"arguments": call.arguments}
            out += self._chunk({"tool_calls": [{"index": index, "function": arguments}]})
        out += self._chunk({}, done.finish)
        if self._request.include_usage:
            out += sse(None, {**self._head, "choices": [], "usage": _usage(done)})
        return out + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse(None, {**self._head, "choices": [choice]})
