"""Owns the OpenAI Responses protocol: Answer to JSON or events; its requests are read by `responses_request`."""

import json

import orjson

from gyre_proxy.conversation import Answer, Request, ToolCall
from gyre_proxy.dialects.events import sse
from gyre_proxy.dialects.openai import error
from gyre_proxy.dialects.responses_request import SEARCH, Reader, parse
from gyre_proxy.errors import ProxyError

__all__ = ["TOOL_ID_PREFIX", "Reader", "Stream", "answer", "error", "failed_stream", "parse"]

TOOL_ID_PREFIX = "call_"


def _items(request: Request, done: Answer, status: str) -> list[dict]:
    """The output items of a finished answer, in order: reasoning, text, calls."""
    items = []
    if done.reasoning:
        items.append(_reasoning_item(done.id, done.reasoning))
    if done.text:
        items.append(_text_item(done.id, done.text, "completed" if done.tool_calls else status))
    return items + [_call_item(request, call) for call in done.tool_calls]


def _reasoning_item(call_id: str, text: str) -> dict:
    summary = [{"type": "summary_text", "text": text}]
    return {"id": f"rs_{call_id}", "type": "reasoning", "summary": summary, "encrypted_content": call_id}


def _text_item(call_id: str, text: str, status: str) -> dict:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_text_part(text)],
    }


def _text_part(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(request: Request, call: ToolCall) -> dict:
    """The call as its client knows the tool: a function, a custom tool's text, a search."""
    kind = request.tool_kinds.get(call.name, {"name": call.name})
    head = {"call_id": call.id, "status": "completed"}
    if SEARCH in kind:
        found = {"execution": "client", "arguments": orjson.Fragment(call.arguments)}
        return {"id": f"tsc_{call.id}", "type": "tool_search_call", **head, **found}
    head["name"] = kind["name"]
    if "namespace" in kind:
        head["namespace"] = kind["namespace"]
    if "custom" in kind:
        given = json.loads(call.arguments).get("input")
        text = given if isinstance(given, str) else call.arguments
        return {"id": f"ctc_{call.id}", "type": "custom_tool_call", **head, "input": text}
    return {"id": f"fc_{call.id}", "type": "function_call", **head, "arguments": call.arguments}


def _response(
    request: Request, call_id: str, created: int, status: str, output: list, done: Answer | None = None
) -> dict:
    usage = None
    if done is not None:
        usage = {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.reused_tokens},
            "output_tokens": done.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": done.reasoning_tokens},
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        }
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.asked.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": request.asked.get("reasoning"),
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": usage,
        **request.echoed,
    }


def _status(request: Request, done: Answer) -> str:
    """ "incomplete" only when the client's own limit cut the answer.

    Codex gives up a whole run at the word.
    """
    cut_by_client = (
        done.finish == "length"
        and request.max_tokens is not None
        and done.completion_tokens >= request.max_tokens
    )
    return "incomplete" if cut_by_client else "completed"


def answer(request: Request, done: Answer) -> dict:
    """The body of a non-streaming answer."""
    status = _status(request, done)
    return _response(request, done.id, done.created, status, _items(request, done, status), done)


def failed_stream(request: Request, failure: ProxyError, call_id: str, created: int) -> bytes:
    """A stream that only fails: streaming clients look for the over-long code there, not in a status."""
    detail = error(failure)["error"]
    begun = _response(request, call_id, created, "in_progress", [])
    reason = {"code": detail["code"] or detail["type"], "message": detail["message"]}
    response = {**begun, "status": "failed", "error": reason}
    first = {"type": "response.created", "sequence_number": 0, "response": begun}
    last = {"type": "response.failed", "sequence_number": 1, "response": response}
    return sse("response.created", first) + sse("response.failed", last)


class Stream:
    """Writes one answer as Responses events, numbered in sequence."""

    def __init__(
        self, request: Request, call_id: str, created: int, prompt_tokens: int, reused_tokens: int = 0
    ) -> None:
        self._request, self._id, self._created = request, call_id, created
        self._sequence = 0
        self._index = -1
        self._open: str | None = None
        self._text = ""

    def start(self) -> bytes:
        response = _response(self._request, self._id, self._created, "in_progress", [])
        return self._event("response.created", response=response) + self.keepalive()

    def keepalive(self) -> bytes:
        response = _response(self._request, self._id, self._created, "in_progress", [])
        return self._event("response.in_progress", response=response)

    def delta(self, kind: str, text: str) -> bytes:
        """More content: `kind` is "reasoning" or "text"."""
        out = b"" if self._open == kind else self._close() + self._begin(kind)
        self._text += text
        if kind == "text":
            return out + self._part("response.output_text.delta", delta=text, logprobs=[])
        return out + self._part("response.reasoning_summary_text.delta", delta=text)

    def finish(self, done: Answer) -> bytes:
        """Everything after the last text: tool calls and the completed response."""
        status = _status(self._request, done)
        out = self._close("completed" if done.tool_calls else status)
        for call in done.tool_calls:
            out += self._tool_call(_call_item(self._request, call))
        items = _items(self._request, done, status)
        response = _response(self._request, self._id, self._created, status, items, done)
        return out + self._event(f"response.{status}", response=response)

    def _tool_call(self, item: dict) -> bytes:
        """A whole call; a search has no events of its own for the arguments."""
        self._index += 1
        where = {"item_id": item["id"], "output_index": self._index}
        field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
        begun = {**item, "status": "in_progress"}
        if field is None:
            out = self._event("response.output_item.added", output_index=self._index, item=begun)
        else:
            begun[field] = ""
            out = self._event("response.output_item.added", output_index=self._index, item=begun)
            custom = field == "input"
            event = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
            called = {} if custom else {"name": item["name"]}
            out += self._event(f"{event}.delta", **where, delta=item[field])
            out += self._event(f"{event}.done", **where, **called, **{field: item[field]})
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _begin(self, kind: str) -> bytes:
        self._index += 1
        self._open, self._text = kind, ""
        if kind == "text":
            item = {**_text_item(self._id, "", "in_progress"), "content": []}
            added = self._event("response.output_item.added", output_index=self._index, item=item)
            return added + self._part("response.content_part.added", part=_text_part(""))
        item = {**_reasoning_item(self._id, ""), "summary": []}
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        part = {"type": "summary_text", "text": ""}
        return added + self._part("response.reasoning_summary_part.added", part=part)

    def _close(self, status: str = "completed") -> bytes:
        kind, text = self._open, self._text
        if kind is None:
            return b""
        if kind == "text":
            item = _text_item(self._id, text, status)
            out = self._part("response.output_text.done", text=text, logprobs=[])
            out += self._part("response.content_part.done", part=_text_part(text))
        else:
            item = _reasoning_item(self._id, text)
            out = self._part("response.reasoning_summary_text.done", text=text)
            part = {"type": "summary_text", "text": text}
            out += self._part("response.reasoning_summary_part.done", part=part)
        self._open = None
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _part(self, event: str, **fields: object) -> bytes:
        prefix, place = ("msg_", "content_index") if self._open == "text" else ("rs_", "summary_index")
        where = {"item_id": prefix + self._id, "output_index": self._index, place: 0}
        return self._event(event, **where, **fields)

    def _event(self, event: str, **fields: object) -> bytes:
        data = {"type": event, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse(event, data)
